"""Compare the engine's speed on a CPU with several threads in one process and with as many processes of one thread.

Run it: python benchmarks/threads.py [--workers 2] [--users 12] [--repeats 10] [--beside ANOTHER/CHECKOUT/src]

The script uses the paper's model and user update with synthetic users. All sides are started and warmed up first; then
they take turns of one round each, so that a slow phase of the machine affects all. With --beside, the source of another
checkout is measured in the same way. The script prints medians over rounds: users per second, the ratio to the first
side in the same turn, and per user the processor time, the waits of threads (voluntary context switches) and the page
faults.
"""

import argparse
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median


def work(users: int, threads: int) -> None:
    """Compute one round for each line of standard input and print its costs. Each process of a side runs this.

    Args:
        users: Users per round of this process.
        threads: Number of threads.
    """
    import torch

    from unheard.engines.stacked.engine import StackedEngine
    from unheard.models.recurrent import TiedLSTM
    from unheard.performance.benchmark import benchmark_plan, synthetic_users
    from unheard.randomness import reproducible_generator

    torch.set_num_threads(threads)
    model = TiedLSTM(vocabulary_size=10_000)
    engine, plan, params_P = StackedEngine(model), benchmark_plan(users).at(0, model.layout), model.initial(0)
    people = list(synthetic_users(model.vocabulary_size, users, 1600))
    for _ in range(2):
        engine.sum_updates(params_P, people, plan, reproducible_generator(0))
    print("ready", flush=True)
    for _ in sys.stdin:
        wall, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        engine.sum_updates(params_P, people, plan, reproducible_generator(0))
        wall, after = time.perf_counter() - wall, resource.getrusage(resource.RUSAGE_SELF)
        spent = [getattr(after, what) - getattr(before, what) for what in SPENT]
        print(wall, *spent, flush=True)


SPENT = ("ru_utime", "ru_stime", "ru_nvcsw", "ru_minflt")
"""Costs of a round, as fields of `resource.getrusage`."""


@dataclass
class Side:
    """One of the compared ways: its title and its processes."""

    name: str
    workers: list[subprocess.Popen[str]]

    @classmethod
    def start(cls, name: str, src: Path | None, processes: int, threads: int, users: int) -> "Side":
        """Start the processes of a side and wait until they are ready.

        Args:
            name: Title of the side.
            src: Source folder of another checkout; None for this one.
            processes: Number of processes.
            threads: Threads per process.
            users: Users per round over all processes.
        """
        environment = {**os.environ, **({"PYTHONPATH": str(src)} if src else {})}
        command = [sys.executable, __file__, "--work", str(threads), "--users", str(users // processes)]
        side = cls(name, [_started(command, environment) for _ in range(processes)])
        for worker in side.workers:
            if _line(worker) != "ready":
                sys.exit(f"{name}: the worker ended; its error is above.")
        return side

    def round(self) -> list[float]:
        """Run one round; return the seconds of the slowest process, and the costs (`SPENT`) of all together."""
        for worker in self.workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        answers = [[float(number) for number in _line(worker).split()] for worker in self.workers]
        return [max(a[0] for a in answers), *(sum(column) for column in zip(*(a[1:] for a in answers), strict=True))]


def _started(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start a process with pipes for its standard input and output."""
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _line(worker: subprocess.Popen[str]) -> str:
    """Return the next line of a process."""
    assert worker.stdout is not None
    return worker.stdout.readline().strip()


def main() -> None:
    """Start all sides, let them take turns, and print the medians."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    words.add_argument("--users", type=int, default=12, help="users per round")
    words.add_argument("--repeats", type=int, default=10, help="rounds of each side")
    words.add_argument("--beside", type=Path, help="the src folder of another checkout")
    words.add_argument("--work", type=int, metavar="THREADS", help=argparse.SUPPRESS)
    asked = words.parse_args()
    if asked.work:
        return work(asked.users, asked.work)
    sources = {"other source, ": asked.beside, "": None} if asked.beside else {"": None}
    n, users = asked.workers, asked.users // asked.workers * asked.workers
    sides = [
        Side.start(f"{whose}{n} {way}", src, processes, threads, users)
        for whose, src in sources.items()
        for way, processes, threads in (("threads", 1, n), ("processes", n, 1))
    ]
    turns = [[side.round() for side in sides] for _ in range(asked.repeats)]
    for k, side in enumerate(sides):
        rate = median(users / turn[k][0] for turn in turns)
        ratio = median(turn[0][0] / turn[k][0] for turn in turns)
        own, system, waits, faults = (median(turn[k][1 + j] for turn in turns) / users for j in range(len(SPENT)))
        print(
            f"{side.name:28s} {rate:5.2f} users/s, ratio {ratio:.3f}; a user: {own * 1e3:.0f} ms of processor and ",
            end="",
        )
        print(f"{system * 1e3:.0f} ms of system, {waits:.0f} waits, {faults:.0f} pages")
        for worker in side.workers:
            worker.communicate()


if __name__ == "__main__":
    main()
