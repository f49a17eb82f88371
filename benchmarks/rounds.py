"""Measure which share of a round is not the engine: charging, sampling, reading, noise, evaluations, checkpoints.

Run it: python benchmarks/rounds.py CORPUS [--users 1250] [--runs 1] [--rounds 40] [--device cuda] [--kernels]

The same cohorts are computed three times: by the engine alone; in whole rounds without evaluations and checkpoints; and
in whole rounds with an evaluation every 20 rounds and a checkpoint every 200. The share is the additional time compared
with the engine alone, divided by the time of the whole rounds. `--kernels` also prints how much of the time the GPU was
busy, and with which kernels.
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

import unheard
from unheard.engines.choice import EngineChoice
from unheard.engines.engine import Cohort
from unheard.parameters import finish
from unheard.randomness import ReproducibleStreams
from unheard.training.loop import train_together
from unheard.training.round import Round, State, draw_cohort

WARM_UP = 3
"""Rounds that are not timed, in which kernels are compiled and buffers are allocated."""


def run_of(corpus: str, users: int, rounds: int, seed: int, ledger: Path, *, measured: bool) -> unheard.Run:
    """Return a run of the paper's model.

    Args:
        corpus: Folder of the token store.
        users: Users per round.
        rounds: Rounds to time.
        seed: Seed of the run.
        ledger: Population ledger.
        measured: Whether the run has evaluations and checkpoints.
    """
    store, never = unheard.TokenStore.open(corpus), 10**6
    return unheard.Run(
        corpus=corpus,
        model=unheard.TiedLSTM(vocabulary_size=len(store.vocabulary)),
        plan=unheard.Plan(
            population=store.train.num_users,  # counted: acceptable for a public corpus only
            sampling=unheard.PoissonSampling(users_per_round=users),
            update=unheard.FedAvg(),
            clip=unheard.FlatClip(norm=15.0),
            noise=unheard.GaussianNoise(noise_std=0.012),
        ),
        training=unheard.Training(
            rounds=rounds + WARM_UP + 1, checkpoint_every=200 if measured else never, reproducible_seed=seed
        ),
        evaluation=unheard.Evaluation(every=20 if measured else never),
        ledger=ledger,
    )


def engine_alone(runs: list[unheard.Run], rounds: int, choice: EngineChoice) -> float:
    """Return the seconds per turn (one round of every run) of the engine alone, on the cohorts that the runs draw."""
    model = runs[0].model
    engine, store = choice.build(model), unheard.TokenStore.open(runs[0].corpus)
    params_P = model.initial(0).to(engine.device)

    def turn(attempt: int) -> None:
        """Sum the cohorts of one round of every run."""
        engine.sum_cohorts([_cohort(run, store, params_P, attempt) for run in runs])

    for attempt in range(WARM_UP):
        turn(attempt)
    began = _now(engine.device)
    for attempt in range(WARM_UP, WARM_UP + rounds):
        turn(attempt)
    return (_now(engine.device) - began) / rounds


def _cohort(run: unheard.Run, store: unheard.TokenStore, params_P: torch.Tensor, attempt: int) -> Cohort:
    """Return the cohort that a run draws in a round."""
    seed = run.training.reproducible_seed
    assert seed is not None
    return draw_cohort(
        Round(
            state=State(round=attempt, params_P=params_P),
            plan=run.plan.at(attempt, run.model.layout),
            model=run.model,
            server=run.server,
            users=store.train,
            streams=ReproducibleStreams(seed=seed),
            attempt=attempt,
        )
    )


def whole(runs: list[unheard.Run], rounds: int, choice: EngineChoice, folder: Path, *, kernels: bool) -> float:
    """Return the seconds per turn of training. The last turn, which saves and writes statements, is left out.

    Args:
        runs: The runs.
        rounds: Rounds to time.
        choice: The engine.
        folder: Folder of the run folders.
        kernels: Whether to profile the GPU and print its kernels.
    """
    device = choice.torch_device()
    going = train_together([(run, folder / str(k)) for k, run in enumerate(runs)], engine=choice)
    _skip(going, WARM_UP * len(runs))
    began = _now(device)
    with profile(activities=[ProfilerActivity.CUDA]) if kernels else nullcontext() as seen:
        _skip(going, rounds * len(runs))
        taken = _now(device) - began
    if seen is not None:
        told = sorted(seen.key_averages(), key=lambda kernel: -kernel.device_time_total)
        busy = sum(kernel.device_time_total for kernel in told) / 1e6
        print(f"  the GPU was at work {100 * busy / taken:.1f} % of the time (while being watched)")
        for kernel in told[:24]:
            print(f"    {100 * kernel.device_time_total / 1e6 / busy:5.1f} %  {kernel.count:7,}  {kernel.key[:70]}")
    _skip(going, len(runs))
    return taken / rounds


def _skip(reports: Iterator[object], count: int) -> None:
    """Train until `count` reports have come."""
    for _ in itertools.islice(reports, count):
        pass


def _now(device: torch.device) -> float:
    """Wait until the device has finished, and return the time in seconds."""
    finish(device)
    return time.perf_counter()


def main() -> None:
    """Time the engine and the whole rounds, and print the shares."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    words.add_argument("corpus")
    words.add_argument("--users", type=int, default=1250)
    words.add_argument("--runs", type=int, default=1)
    words.add_argument("--rounds", type=int, default=40)
    words.add_argument("--device", default="auto")
    words.add_argument("--kernels", action="store_true")
    asked = words.parse_args()
    choice = EngineChoice(device=asked.device)
    users = asked.users * asked.runs
    print(f"{asked.runs} runs of {asked.users} users per round, {asked.rounds} rounds", flush=True)
    with tempfile.TemporaryDirectory() as folder:

        def runs(measured: bool, name: str) -> list[unheard.Run]:
            """Return the runs that train side by side, each with its own ledger."""
            ledgers = [Path(folder) / f"{name}-{seed}.jsonl" for seed in range(asked.runs)]
            return [
                run_of(asked.corpus, asked.users, asked.rounds, seed, ledger, measured=measured)
                for seed, ledger in enumerate(ledgers)
            ]

        alone = engine_alone(runs(False, "alone"), asked.rounds, choice)
        print(f"  the engine alone: {alone * 1e3:.1f} ms, {users / alone:,.0f} users/s", flush=True)
        for name, measured in (("without evaluations", False), ("with evaluations", True)):
            taken = whole(runs(measured, name), asked.rounds, choice, Path(folder) / name, kernels=False)
            print(
                f"  whole, {name}: {taken * 1e3:.1f} ms, {users / taken:,.0f} users/s, "
                f"{100 * (taken - alone) / taken:.1f} % is not the engine",
                flush=True,
            )
        if asked.kernels:
            whole(runs(True, "watched"), asked.rounds, choice, Path(folder) / "watched", kernels=True)


if __name__ == "__main__":
    main()
