"""Compare the accuracy of one run in several precisions of the engine, with the same seed, cohorts and noise.

Run it: python benchmarks/precision.py CORPUS [--rounds 3000] [--precision bfloat16 --precision float32] [--device cuda]

The script prints the held-out AccuracyTop1 by round, and the seconds since the start of the run (with evaluations and
checkpoints). The run has S = 15, sigma = 0.003, and the paper's model and settings. Its seed is known, so it has no
privacy guarantee.
"""

import argparse
import tempfile
import time
from pathlib import Path

import unheard
from unheard.engines.choice import EngineChoice


def main() -> None:
    """Train the run in each precision and print its evaluations."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    words.add_argument("corpus")
    words.add_argument("--rounds", type=int, default=3000)
    words.add_argument("--every", type=int, default=100)
    words.add_argument("--users-per-round", type=int, default=100)
    words.add_argument("--precision", action="append")
    words.add_argument("--device", default="auto")
    asked = words.parse_args()
    store = unheard.TokenStore.open(asked.corpus)
    with tempfile.TemporaryDirectory() as folder:
        for precision in asked.precision or ["bfloat16", "float32"]:
            run = unheard.Run(
                corpus=asked.corpus,
                model=unheard.TiedLSTM(vocabulary_size=len(store.vocabulary)),
                plan=unheard.Plan(
                    population=store.train.num_users,  # counted: acceptable for a public corpus only
                    sampling=unheard.PoissonSampling(users_per_round=asked.users_per_round),
                    update=unheard.FedAvg(),
                    clip=unheard.FlatClip(norm=15.0),
                    noise=unheard.GaussianNoise(noise_std=0.003),
                ),
                training=unheard.Training(rounds=asked.rounds, checkpoint_every=500, reproducible_seed=1),
                evaluation=unheard.Evaluation(every=asked.every),
                ledger=Path(folder) / "people.jsonl",
            )
            began = time.perf_counter()
            engine = EngineChoice(device=asked.device, precision=precision)
            for report in unheard.train(run, Path(folder) / precision, engine=engine):
                if report.metrics:
                    top1, seconds = report.metrics["accuracy_top1"], time.perf_counter() - began
                    print(
                        f"{precision}: round {report.round}, {seconds:.1f} s, AccuracyTop1 {100 * top1:.2f} %",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
