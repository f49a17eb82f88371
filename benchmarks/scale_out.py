"""Measure whole rounds of the paper's model on 1, 2, 4 and 8 ranks of one machine: users per second and efficiency.

Run it: python benchmarks/scale_out.py --out measured.json [--ranks 1,2,4,8] [--users-per-round 48] [--rounds 4]

Each rank has one thread, so that two ranks on two cores are compared with one single-threaded rank. Users are synthetic
and have equal lengths. Cohorts are the same for every number of ranks, because the runs have a seed. Rounds are whole
rounds, with ledgers on disk, sampling, reading, noise and the server's step. The first round is not counted. The
efficiency of the best round is printed too, for machines that other programs use at the same time.
benchmarks/scale_out_parts.py measures the parts of a round; benchmarks/scale_out_simulator.py reads both files.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import unheard
from unheard.corpus.store import write_store
from unheard.corpus.vocabulary import Vocabulary
from unheard.engines.distributed.process_group import ProcessGroup
from unheard.performance.benchmark import synthetic_users
from unheard.randomness import ReproducibleStreams
from unheard.training.loop import train
from unheard.training.worker import serve

SEED, TOKENS = 1, 1600
"""Seed of the runs, and tokens per user."""


def main() -> None:
    """Measure each number of ranks in new processes. With `--store`, train as one of these processes."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--ranks", default="1,2,4,8")
    options.add_argument("--users-per-round", type=int, default=48)
    options.add_argument("--rounds", type=int, default=4, help="rounds that are counted; one more comes before them")
    options.add_argument("--device", default="cpu")
    options.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.store is not None:
        on_one_rank(given)
        return
    cores = len(os.sched_getaffinity(0))
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        make_store(Path(folder) / "store", 10 * given.users_per_round)
        for size in map(int, given.ranks.split(",")):
            runs.append(measured(size, given, Path(folder)))
            show(runs, cores)
    content = {"device": given.device, "cores": cores, "users_per_round": given.users_per_round, "runs": runs}
    given.out.write_text(json.dumps(content, indent=2) + "\n")


def show(runs: list[dict[str, Any]], cores: int) -> None:
    """Add speed-up and efficiency to the last result, and print it.

    The speed-up is relative to the first result. The efficiency is the speed-up divided by the ideal one, which is
    limited by the number of cores.
    """
    one, last = runs[0], runs[-1]
    last["speed_up"] = last["users_per_second"] / one["users_per_second"]
    ideal = min(last["ranks"], cores) / min(one["ranks"], cores)
    last["efficiency"] = last["speed_up"] / ideal
    last["best_efficiency"] = last["best_users_per_second"] / one["best_users_per_second"] / ideal
    print(
        f"{last['ranks']} ranks: {last['users_per_second']:.3f} users/s, {last['speed_up']:.2f} times {one['ranks']} rank, "
        f"{100 * last['efficiency']:.0f} % of {min(last['ranks'], cores)} cores "
        f"({100 * last['best_efficiency']:.0f} % by best rounds)",
        flush=True,
    )


def measured(size: int, given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run this script on `size` ranks with torchrun and return the result."""
    out = folder / f"{size}.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), __file__]
    words = ["--store", str(folder / "store"), "--out", str(out), "--users-per-round", str(given.users_per_round)]
    words += ["--rounds", str(given.rounds), "--device", given.device]
    # One thread per rank, also if there are more cores than ranks.
    subprocess.run([*launch, *words], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return json.loads(out.read_text())


def on_one_rank(given: argparse.Namespace) -> None:
    """Train on one rank of a group. The leader writes the result to `--out`."""
    ranks = ProcessGroup.join()
    torch.set_num_threads(1)
    if ranks is not None and not ranks.is_leader:
        serve(ranks)
        return
    model, population = unheard.TiedLSTM(vocabulary_size=10_000), 10 * given.users_per_round
    plan = unheard.Plan(
        population=population,
        sampling=unheard.PoissonSampling(users_per_round=given.users_per_round),
        update=unheard.FedAvg(),
        clip=unheard.FlatClip(norm=15.0),
        noise=unheard.GaussianNoise(noise_multiplier=1.0),
    )
    run = unheard.Run(
        corpus=given.store,
        model=model,
        plan=plan,
        training=unheard.Training(rounds=given.rounds + 2, checkpoint_every=10**6, reproducible_seed=SEED),
        evaluation=unheard.Evaluation(every=10**6, max_tokens=100),
        ledger=given.out.with_suffix(".people.jsonl"),
    )
    engine, ends = unheard.EngineChoice(device=given.device), []
    for report in train(run, given.out.with_suffix(".run"), engine=engine, ranks=ranks):
        ends.append(time.perf_counter())
        if report.round > given.rounds:  # stop before the last round, which also evaluates and saves
            break
    if ranks is not None:
        ranks.shutdown()
    seconds, streams = np.diff(ends), ReproducibleStreams(seed=SEED)
    users = [len(plan.sampling.draw(population, population, streams.sampling(r + 1))) for r in range(len(seconds))]
    found = {
        "ranks": 1 if ranks is None else ranks.size,
        "users_per_second": sum(users) / float(seconds.sum()),
        "best_users_per_second": float(np.max(np.array(users) / seconds)),
        "median_round_seconds": float(np.median(seconds)),
    }
    given.out.write_text(json.dumps(found))


def make_store(path: Path, population: int) -> None:
    """Write a store of `population` synthetic users."""
    model = unheard.TiedLSTM(vocabulary_size=10_000)
    write_store(
        path,
        train=[user.tokens for user in synthetic_users(model.vocabulary_size, population, TOKENS)],
        held_out=[user.tokens for user in synthetic_users(model.vocabulary_size, 2, 200)],
        vocabulary=Vocabulary.of([f"w{k}" for k in range(model.vocabulary_size - 3)]),
        info={"tokens": {"kind": "words"}, "vocabulary": {"kind": "file", "source": "synthetic"}, "synthetic": True},
    )


if __name__ == "__main__":
    main()
