"""Measure the time of a local step on a GPU: microseconds per user and step, in all and by kernel.

Run it: python benchmarks/kernels.py [--users 512] [--precision bfloat16] [--set table_words=64 --set table_warps=4 ...]

The script uses the paper's model and synthetic users, with a clip after every step. The whole step is timed as a
recorded graph. `--set` changes a block size that engines/stacked/kernels.py lists. The tables of docs/log.md under
"kernel by kernel" were measured with earlier versions of this script.
"""

import argparse
import time

import torch
from torch.profiler import ProfilerActivity, profile

from unheard.engines.engine import Cohort
from unheard.engines.stacked.engine import PRECISIONS, Chunk, Task
from unheard.engines.stacked.kernels import KernelStep
from unheard.engines.stacked.sizes import Buffers, Sizes
from unheard.models.recurrent import TiedLSTM
from unheard.performance.benchmark import benchmark_plan, synthetic_users
from unheard.randomness import reproducible_generator

STEPS = 3
"""Local steps per user."""


def chunk_of(users: int, precision: str, tuning: dict[str, int]) -> tuple[Chunk, Cohort, list[tuple[Task, int]]]:
    """Return a chunk of synthetic users, its cohort, and its users as `Chunk.fill` takes them.

    Args:
        users: Number of users.
        precision: `bfloat16` or `float32`.
        tuning: Block sizes of the kernels that are changed.
    """
    model, device = TiedLSTM(vocabulary_size=10_000), torch.device("cuda")
    cohort = Cohort(
        params_P=model.initial(0).to(device),
        users=list(synthetic_users(model.vocabulary_size, users, 80 * STEPS)),
        plan=benchmark_plan(users).at(0, model.layout),
        rng=reproducible_generator(0),
    )
    task = Task.of(0, cohort)
    sizes = Sizes.of(model, 8, 10)
    buffers = Buffers.allocate(sizes, U=users, S=STEPS, R=1, device=device, dtype=PRECISIONS[precision])
    return Chunk((), buffers, KernelStep(buffers, **tuning)), cohort, [(task, k) for k in range(users)]


def main() -> None:
    """Time the whole step, then profile its kernels, and print both."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    words.add_argument("--users", type=int, default=512)
    words.add_argument("--precision", choices=("bfloat16", "float32"), default="bfloat16")
    words.add_argument("--top", type=int, default=14, help="number of kernels to print")
    words.add_argument("--set", action="append", default=[], metavar="NAME=NUMBER")
    asked = words.parse_args()
    tuning = {name: int(number) for name, number in (pair.split("=") for pair in asked.set)}
    chunk, cohort, members = chunk_of(asked.users, asked.precision, tuning)
    step = chunk.step
    assert isinstance(step, KernelStep)
    print(
        f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {asked.users} users, {asked.precision}, {tuning}"
    )
    for _ in range(2):  # not timed: the first call compiles the kernels and records the graph
        chunk.fill([cohort], members)
        step.run(STEPS)
    taken = []
    for _ in range(5):
        chunk.fill([cohort], members)
        torch.cuda.synchronize()
        began = time.perf_counter()
        step.run(STEPS)
        torch.cuda.synchronize()
        taken.append((time.perf_counter() - began) / STEPS / asked.users * 1e6)
    whole = sorted(taken)[len(taken) // 2]
    print(f"whole, as a graph: {whole:.2f} us a user and step, {1e6 / 20 / whole:,.0f} users/s of 20 steps")
    for name, count in (("the first local step", 1), ("the other local steps", STEPS - 1)):
        chunk.fill([cohort], members)
        if count > 1:
            step.take(True)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(count):
                step.take(count == 1)
            torch.cuda.synchronize()
        kernels = sorted(seen.key_averages(), key=lambda k: -k.device_time_total)
        print(f"{name}: {sum(k.device_time_total for k in kernels) / count / asked.users:.2f} us")
        for kernel in kernels[: asked.top]:
            print(f"  {kernel.key[:40]:40} {kernel.device_time_total / count / asked.users:8.3f} us")


if __name__ == "__main__":
    main()
