"""Profile whole rounds on a GPU: milliseconds per turn, and microseconds per user by kernel.

Run it: python -m benchmarks.profile_rounds

A turn is one round of every run that trains side by side. Users are synthetic, the model is the paper's, and z is 1.
The time of a turn is measured without the profiler. If the kernels take much less time than a turn, the GPU waits for
the host.
"""

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from unheard.engines.choice import EngineChoice
from unheard.evaluation.next_word import Evaluation
from unheard.models.recurrent import TiedLSTM
from unheard.performance.benchmark import _synthetic_store, benchmark_plan
from unheard.training.loop import train_together
from unheard.training.run import Run, Training

SETTINGS = (
    (1250, 1600, 1, 3),
    (100, 1600, 1, 20),
    (5000, 80, 1, 8),
    (1000, 80, 1, 20),
    (100, 1600, 16, 3),
    (100, 80, 15, 20),
)
"""Users per round, tokens per user, runs side by side, turns to profile."""


def profile_setting(users: int, tokens: int, runs: int, turns: int) -> None:
    """Time and profile one setting, and print its kernels."""
    model, population = TiedLSTM().pinned(10_000), max(4000, 4 * users)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        run = Run(
            corpus=_synthetic_store(work / "store", 10_000, population, tokens, 2),
            model=model,
            plan=benchmark_plan(users, population),
            training=Training(rounds=10**4, checkpoint_every=10**6),
            evaluation=Evaluation(every=10**6, max_tokens=200),
        )
        outs = [(replace(run, ledger=work / f"{k}.jsonl"), work / f"run-{k}") for k in range(runs)]
        reports = train_together(outs, engine=EngineChoice(kind="stacked", device="cuda", precision="bfloat16"))

        def train(count: int) -> float:
            """Train `count` turns and return the seconds per turn."""
            began = time.perf_counter()
            for _ in range(count * runs):
                next(reports)
            torch.cuda.synchronize()
            return (time.perf_counter() - began) / count

        train(4)  # not timed: compiles kernels and fills caches
        seconds = train(2 * turns)
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            train(turns)
        kernels = sorted(profiled.key_averages(), key=lambda kernel: -kernel.device_time_total)
        busy = sum(kernel.device_time_total for kernel in kernels) / turns / 1e3
        print(f"{users} users of {tokens} tokens, {runs} runs: {1e3 * seconds:.2f} ms per turn, ", end="")
        print(f"{users * runs / seconds:,.0f} users/s, kernels {busy:.2f} ms", flush=True)
        for kernel in kernels[:18]:
            each = kernel.device_time_total / turns / users / runs
            print(f"   {kernel.key[:52]:52} {each:8.3f} us per user, {kernel.count / turns:.1f} launches per turn")
        reports.close()


def main() -> None:
    """Profile all settings."""
    # Do not write statements: nobody reads those of these runs, and each takes seconds.
    with patch("unheard.training.loop.write_statement", lambda *_: {}):
        for setting in SETTINGS:
            profile_setting(*setting)


if __name__ == "__main__":
    main()
