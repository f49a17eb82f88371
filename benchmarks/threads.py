"""Are two threads of one process as fast as two processes? The engine's user updates on a CPU, both ways, in turn.

Run it: python benchmarks/threads.py [--workers 2] [--users 6] [--repeats 3]
The paper's model and user update, synthetic users, so many for each worker. A worker process has one thread; they begin together.
"""

import argparse
import multiprocessing
import os
import time
from statistics import median

import torch

from unheard.engines.stacked.engine import StackedEngine
from unheard.models.tied_lstm import TiedLSTM
from unheard.randomness import reproducible_generator
from unheard.training.speed import _plan, _synthetic_users


def seconds(users: int, threads: int, begin: float = 0.0) -> tuple[float, float]:
    """Wall and processor seconds of so many user updates, after one round that warms up."""
    torch.set_num_threads(threads)
    model = TiedLSTM()
    engine, plan, params_P = StackedEngine(model), _plan(users).at(0, model.layout), model.initial(0)
    people = list(_synthetic_users(model.vocabulary_size, users, 1600))
    engine.sum_updates(params_P, people, plan, reproducible_generator(0))
    time.sleep(max(0.0, begin - time.time()))
    wall, processor = time.perf_counter(), time.process_time()
    engine.sum_updates(params_P, people, plan, reproducible_generator(0))
    return time.perf_counter() - wall, time.process_time() - processor


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    words.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    words.add_argument("--users", type=int, default=6)
    words.add_argument("--repeats", type=int, default=3)
    asked = words.parse_args()
    every, apart = asked.users * asked.workers, multiprocessing.get_context("spawn")
    found: dict[str, list[tuple[float, float]]] = {"threads": [], "processes": []}
    for _ in range(asked.repeats):
        with apart.Pool(1) as pool:
            found["threads"].append(pool.apply(seconds, (every, asked.workers)))
        with apart.Pool(asked.workers) as pool:
            at = time.time() + 15  # when all have warmed up
            taken = pool.starmap(seconds, [(asked.users, 1, at)] * asked.workers)
            found["processes"].append((max(wall for wall, _ in taken), sum(used for _, used in taken)))
    for way, taken in found.items():
        wall, used = (median(column) for column in zip(*taken, strict=True))
        print(f"{asked.workers} {way}: {every / wall:.2f} users/s, {used / every:.3f} processor s a user")


if __name__ == "__main__":
    main()
