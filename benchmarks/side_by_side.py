"""Measure how long runs side by side wait for anything except users' updates, such as charges on disk and noise.

Run it: python benchmarks/side_by_side.py [--runs 15] [--noised 12] [--turns 40] [--embedding-size 12] [--updates-ms 25]

The engine is replaced by one that sleeps for the time of the users' updates and sums nothing, so no GPU is needed. The
script times a turn, which is one round of every run. The noise of 15 runs of the paper's model needs 16 cores. On fewer
cores use a smaller model, so that the noise per core is the same (--embedding-size 12, about an eighth, on two cores).
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import unheard
from unheard.corpus.store import write_store
from unheard.corpus.vocabulary import Vocabulary
from unheard.mechanism.aggregation import FixedDenominator, TrueAverage
from unheard.training import loop


class SleepingEngine:
    """An engine that sleeps instead of computing updates, and returns sums of no users.

    Args:
        model: The model.
        seconds: Time of one call.
    """

    device = torch.device("cpu")

    def __init__(self, model: unheard.TiedLSTM, seconds: float) -> None:
        self.model, self.seconds = model, seconds

    def sum_cohorts(self, cohorts):
        """Sleep, and return an empty sum for each cohort."""
        time.sleep(self.seconds)
        return [cohort.plan.contribution.sum([], self.model.layout.total) for cohort in cohorts]


def main() -> None:
    """Train the runs with the sleeping engine and print the median time of a turn."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--runs", type=int, default=15)
    options.add_argument("--noised", type=int, default=12, help="runs with noise; the others are baselines")
    options.add_argument("--turns", type=int, default=40)
    options.add_argument("--embedding-size", type=int, default=12, help="96 is the paper's model")
    options.add_argument("--updates-ms", type=float, default=25.0, help="milliseconds of the users' updates of a turn")
    chosen = options.parse_args()
    words = tuple(f"w{k}" for k in range(9_997))
    model = unheard.TiedLSTM(vocabulary_size=10_000, embedding_size=chosen.embedding_size, hidden_size=64)
    loop.build_engine = lambda choice, model, ranks=None: SleepingEngine(model, chosen.updates_ms / 1e3)  # pyright: ignore
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        tokens = [np.array([0, 5, 6, 7, 1], dtype=np.uint16)] * 2_000
        write_store(work / "store", train=tokens, held_out=tokens[:20], vocabulary=Vocabulary.of(words))
        runs = []
        for number in range(chosen.runs):
            is_noised = number < chosen.noised
            plan = unheard.Plan(
                population=750_947,
                sampling=unheard.PoissonSampling(users_per_round=100)
                if is_noised
                else unheard.FixedSizeSampling(users_per_round=100),
                update=unheard.FedAvg(),
                clip=unheard.FlatClip(norm=15.0) if is_noised else unheard.NoClip(),
                estimator=FixedDenominator() if is_noised else TrueAverage(),
                noise=unheard.GaussianNoise(noise_std=0.003) if is_noised else unheard.NoNoise(),
            )
            run = unheard.Run(
                corpus=work / "store",
                model=model,
                plan=plan,
                ledger=work / f"{number}.jsonl",
                training=unheard.Training(rounds=10_000, checkpoint_every=10_000, reproducible_seed=number),
                evaluation=unheard.Evaluation(every=10_000, max_tokens=100),
            )
            runs.append((run, work / f"run-{number}"))
        reports = loop.train_together(runs, allow_no_privacy=True)
        seconds = []
        for turn in range(chosen.turns + 2):
            began = time.perf_counter()
            for _ in runs:
                next(reports)
            if turn >= 2:
                seconds.append(time.perf_counter() - began)
        reports.close()
    median = 1e3 * statistics.median(seconds)
    print(f"{model.layout.total:,} parameters, {chosen.noised} of {chosen.runs} runs with noise, ", end="")
    print(f"updates {chosen.updates_ms:g} ms: {median:.1f} ms per turn (median of {chosen.turns}; ", end="")
    print(f"fastest {1e3 * min(seconds):.1f} ms)")


if __name__ == "__main__":
    main()
