"""Compare the accuracy with and without rescaling word vectors to norm 1 after each round (`keep_norm`), by noise.

Run it: python benchmarks/word_norms.py CORPUS [--model lstm] [--rounds 160] [--users-per-round 20] [--norm 15]
        [--noise-std 0 0.003 0.012] [--public RUN]

Both runs have the paper's model and settings (eta = 6, B = 8, unroll 10), the same cohorts and the same seed, and are
evaluated every 20 rounds. The script prints the accuracy as a mean over five evaluations, like the paper, and the
median norm of the word vectors at the end. With --public both runs let the vectors grow and start from the model of a
public run: one with its vectors as they are, the other with the vectors rescaled to norm 1 once, at the start.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import torch

import unheard
from unheard.models.model import LanguageModel
from unheard.training.checkpoint import load_model, save_model

MODELS = {"lstm": unheard.TiedLSTM, "gru": unheard.TiedGRU}


def main() -> None:
    """Train both runs for each sigma and print their accuracy."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    words.add_argument("corpus")
    words.add_argument("--model", choices=MODELS, default="lstm")
    words.add_argument("--rounds", type=int, default=160)
    words.add_argument("--users-per-round", type=int, default=20)
    words.add_argument("--norm", type=float, default=15.0, help="S; 0 for no clip (and no noise)")
    words.add_argument("--noise-std", type=float, nargs="*", default=[0.0, 0.003, 0.012])
    words.add_argument("--public", type=Path, help="a run folder of the same model, trained on public text")
    asked = words.parse_args()
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"torch {torch.__version__}, {name}, {asked}", flush=True)
    for sigma in asked.noise_std:
        for is_put_back in (True, False):
            rows, length = trained(asked, sigma, is_put_back)
            accuracies = [100 * row["accuracy_top1"] for row in rows]
            smooth = [statistics.fmean(accuracies[max(0, i - 4) : i + 1]) for i in range(len(accuracies))]
            shown = "  ".join(f"{value:.2f}" for value in smooth[4::5] or smooth[-1:])
            way = "put back" if is_put_back else "left alone"
            print(f"S = {asked.norm:g}, sigma = {sigma:g}, {way:10s}: {shown} %; median norm {length:.2f}", flush=True)


def trained(asked: argparse.Namespace, sigma: float, is_put_back: bool) -> tuple[list[dict[str, float]], float]:
    """Train one run; return its evaluations and the median norm of the word vectors at the end.

    Args:
        asked: The options of the command.
        sigma: Standard deviation of the noise; 0 for no noise.
        is_put_back: Whether word vectors are rescaled to norm 1: after each round, or with --public once at the start.
    """
    words = len(unheard.TokenStore.open(asked.corpus).vocabulary)
    model = MODELS[asked.model](vocabulary_size=words, keep_norm=is_put_back and asked.public is None)
    plan = unheard.Plan(
        population=10_000,
        sampling=unheard.PoissonSampling(users_per_round=asked.users_per_round),
        update=unheard.FedAvg(),
        clip=unheard.FlatClip(norm=asked.norm) if asked.norm else unheard.NoClip(),
        noise=unheard.GaussianNoise(noise_std=sigma) if sigma else unheard.NoNoise(),
    )
    with tempfile.TemporaryDirectory() as folder:
        run = unheard.Run(
            corpus=asked.corpus,
            model=model,
            plan=plan,
            training=unheard.Training(
                rounds=asked.rounds,
                reproducible_seed=1,
                init_from=begun(asked, model, is_put_back, Path(folder) / "start.safetensors"),
                init_is_public=asked.public is not None,
            ),
            evaluation=unheard.Evaluation(every=20, max_tokens=40_000),
            ledger=Path(folder) / "people.jsonl",
        )
        reports = unheard.train(run, Path(folder) / "run", allow_no_privacy=True)
        rows = [row.metrics for row in reports if row.metrics]
        params_P = load_model(Path(folder) / "run" / "model.safetensors", model)
    return rows, float(model.layout.split(params_P)["embedding"].norm(dim=1).median())


def begun(asked: argparse.Namespace, model: LanguageModel, is_put_back: bool, to: Path) -> str | None:
    """Write the initial model of a run to the file `to` and return its path; None without --public.

    Rescaling the word vectors does not change the predictions of the model, which normalises them.
    """
    if asked.public is None:
        return None
    params_P = unheard.Released.open(asked.public).params_P.clone()
    if is_put_back:
        vectors_VE = model.layout.split(params_P)["embedding"]
        vectors_VE /= vectors_VE.norm(dim=1, keepdim=True)
    save_model(to, model, params_P, {})
    return str(to)


if __name__ == "__main__":
    main()
