"""Compare initialisations of the LSTM by the held-out accuracy of the paper's baseline.

Run it: python benchmarks/initialisation.py CORPUS [--rounds 100] [--users-per-round 100]

The baseline has fixed-size sampling, the true average, no clip, no noise, eta = 6, B = 8 and unroll 10.
"""

import argparse
import tempfile
from pathlib import Path

import torch

import unheard
from unheard.training.checkpoint import save_model

SCALES = {
    "1/sqrt(fan-in) for all, forget bias 1": (352**-0.5 / 3**0.5, 352**-0.5 / 3**0.5, 256**-0.5 / 3**0.5, 1.0),
    "0.1, 0.06, 0.06; 0": (0.1, 0.06, 0.06, 0.0),
    "0.1, 0.06, 0.06; 1": (0.1, 0.06, 0.06, 1.0),
    "0.3, 0.06, 0.1; 0": (0.3, 0.06, 0.1, 0.0),
    "1, 1/sqrt(H), 1/sqrt(H); 0 (TiedLSTM.initial)": (1.0, 256**-0.5, 256**-0.5, 0.0),
}
"""The initialisations by title: standard deviations of the input weights, the state weights and the projection, and the
bias of the forget gate."""


def begin(model: unheard.TiedLSTM, scales: tuple[float, float, float, float]) -> torch.Tensor:
    """Return the initial parameters of the model with weights drawn at other scales (a value of `SCALES`)."""
    from_input, from_state, projection, forget_bias = scales
    params_P = model.initial(0)
    generator = torch.Generator().manual_seed(1)
    for name, tensor in model.layout.split(params_P).items():
        if name == "projection_weight":
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * projection)
        elif name.endswith("_weight"):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * from_state)
            tensor[: model.embedding_size] *= from_input / from_state
        elif name == "forget_bias":
            tensor.fill_(forget_bias)
    return params_P


def main() -> None:
    """Train from each initialisation and print the accuracy after half of the rounds and at the end."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    words.add_argument("corpus")
    words.add_argument("--rounds", type=int, default=100)
    words.add_argument("--users-per-round", type=int, default=100)
    asked = words.parse_args()
    size = len(unheard.TokenStore.open(asked.corpus).vocabulary)
    model = unheard.TiedLSTM(vocabulary_size=size)
    print(
        f"torch {torch.__version__}, {torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'}, {asked}",
        flush=True,
    )
    plan = unheard.Plan(
        population=10_000,
        sampling=unheard.FixedSizeSampling(users_per_round=asked.users_per_round),
        update=unheard.FedAvg(),
        clip=unheard.NoClip(),
        estimator=unheard.TrueAverage(),
        noise=unheard.NoNoise(),
    )
    for name, scales in SCALES.items():
        with tempfile.TemporaryDirectory() as folder:
            start = Path(folder) / "start.safetensors"
            save_model(start, model, begin(model, scales), {})
            run = unheard.Run(
                corpus=asked.corpus,
                model=model,
                plan=plan,
                training=unheard.Training(rounds=asked.rounds, init_from=str(start), reproducible_seed=1),
                evaluation=unheard.Evaluation(every=asked.rounds // 2),
            )
            reports = unheard.train(run, Path(folder) / "run", allow_no_privacy=True)
            rows = [r.metrics for r in reports if r.metrics]
        figures = (f"{100 * m['accuracy_top1']:.2f} % ({100 * m['accuracy_top1_words']:.2f})" for m in rows)
        print(f"{name:48s}", *figures, sep="  ", flush=True)


if __name__ == "__main__":
    main()
