# Unheard in a container. For a CPU:   docker build --tag unheard .
# For a CUDA GPU:                      docker build --tag unheard --build-arg TORCH=cuda .    (run it with: docker run --gpus all)
#
#     docker run --rm --volume "$PWD:/work" unheard prepare posts.jsonl --user-field author --text-field body --out corpora/posts
#
# Training needs no network: add `--network none` to the command above.
FROM python:3.12-slim

# cpu: PyTorch without CUDA, a fifth of the size. cuda: PyTorch from the package index, which brings its CUDA libraries.
ARG TORCH=cpu
ARG EXTRAS=demo,export

COPY pyproject.toml constraints.txt README.md LICENSE /src/
COPY src /src/src
RUN if [ "$TORCH" = cpu ]; then \
        pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu \
            "$(grep -m 1 '^torch==' /src/constraints.txt | cut -d ' ' -f 1)"; \
    fi \
    && pip install --no-cache-dir --constraint /src/constraints.txt "/src[$EXTRAS]" \
    && rm -rf /src

# The files of /work belong to the user who starts the container: docker run --user "$(id -u):$(id -g)" ...
WORKDIR /work
ENV HOME=/tmp
ENTRYPOINT ["unheard"]
CMD ["--help"]
