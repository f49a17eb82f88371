"""Compare results on a GPU with those on the CPU: stacked kernels, the sum over users, evaluation and noise.

    python -m benchmarks.kernel_agreement

The script uses the paper's model and synthetic users. It compares the deltas of the bfloat16 kernels with the plain
version in float32 on the CPU and with the Triton kernels. It also checks that a user's delta has the same bits if the
users are in another order, if there are fewer users, and when the recorded graph runs again, and that the noise of a
round has the same bits on the GPU and on the CPU. It prints one JSON object; its exit status is 1 if bits differ.
"""

import json
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from unheard.engines.engine import Cohort
from unheard.engines.stacked.engine import Chunk, Task
from unheard.engines.stacked.kernels import KernelStep
from unheard.engines.stacked.plain import PlainStep
from unheard.engines.stacked.sizes import Buffers, Sizes
from unheard.evaluation.next_word import HeldOutText, evaluate
from unheard.mechanism.noise import ExactNormalsAhead
from unheard.models.recurrent import TiedLSTM
from unheard.performance.benchmark import benchmark_plan, synthetic_users
from unheard.randomness import reproducible_generator
from unheard.updates.user_update import ONE

MODEL = TiedLSTM(vocabulary_size=10_000)
DRAWS = 20
"""Number of rounds whose noise is compared."""
TRITON = {"cuda": 0}  # the tuning that replaces the CUDA kernels by Triton kernels


def deltas(
    device: str, users: int, steps: int, *, runs: int = 1, order: Sequence[int] | None = None, tuning: dict[str, int]
) -> Buffers:
    """Compute the local steps of some users twice, and return the buffers with their deltas.

    Exit if the second run, which replays the recorded graph, has other bits than the first.

    Args:
        device: `cpu` for the plain version in float32, `cuda` for the kernels in bfloat16.
        users: Number of users.
        steps: Local steps per user.
        runs: Number of runs side by side; the users are distributed over them.
        order: Another order of the users; None for the original order.
        tuning: Settings of the kernels.
    """
    people = list(synthetic_users(MODEL.vocabulary_size, users, 80 * steps))
    people = people if order is None else [people[k] for k in order]
    cohorts = [
        Cohort(
            params_P=(MODEL.initial(r) * 1.1).to(device),
            users=people[r::runs],
            plan=benchmark_plan(users).at(0, MODEL.layout),
            rng=reproducible_generator(0),
        )
        for r in range(runs)
    ]
    members = [(task, np.arange(len(task.num_steps_U))) for task in (Task.of(r, c) for r, c in enumerate(cohorts))]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    buffers = Buffers.allocate(
        Sizes.of(MODEL, 8, 10), U=users, S=steps, R=runs, device=torch.device(device), dtype=dtype
    )
    step = PlainStep(buffers) if device == "cpu" else KernelStep(buffers, **tuning)
    chunk = Chunk((), buffers, step)
    buffers.delta_UP.fill_(float("nan"))  # the result must not depend on the previous content
    step.run(chunk.fill(cohorts, members))
    first_UP = buffers.delta_UP.clone()
    step.run(chunk.fill(cohorts, members))
    if not torch.equal(first_UP, buffers.delta_UP):
        sys.exit("The second run, which replays the recorded graph, has other deltas than the first.")
    return buffers


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the norm of the difference, divided by the norm of `theirs`."""
    a, b = ours.double().cpu(), theirs.double().cpu()
    return float((a - b).norm() / b.norm())


def noise() -> tuple[bool, list[float]]:
    """Return whether a GPU draws the same integers as a CPU, and the milliseconds of a draw (elapsed, and GPU alone).

    Also print the slowest kernels of a draw to standard error.
    """
    count, cpu, gpu = MODEL.layout.total, torch.device("cpu"), torch.device("cuda")
    equal, device_ms = True, []
    for draw in range(DRAWS):
        scale = 2.0 ** (18 + draw % 13)
        here, there = (
            ExactNormalsAhead(reproducible_generator(draw), count, device, scale).take(count, scale).cpu()
            for device in (gpu, cpu)
        )
        equal = equal and torch.equal(here, there)
    began = time.perf_counter()
    for draw in range(50):
        ExactNormalsAhead(reproducible_generator(draw), count, gpu, 2.0**20.5).take(count, 2.0**20.5)
        torch.cuda.synchronize()
    elapsed = (time.perf_counter() - began) * 20
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for draw in range(20):
            ExactNormalsAhead(reproducible_generator(draw), count, gpu, 2.0**20.5).take(count, 2.0**20.5)
        torch.cuda.synchronize()
    for kernel in sorted(profiled.key_averages(), key=lambda kernel: -kernel.device_time_total)[:6]:
        print(f"   {kernel.key[:60]:60} {kernel.device_time_total / 20:8.1f} us", file=sys.stderr)
        device_ms.append(kernel.device_time_total / 20e3)
    return equal, [round(elapsed, 3), round(sum(device_ms), 3)]


def main() -> None:
    """Run all comparisons and print them as one JSON object."""
    found: dict[str, object] = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    plain_UP = deltas("cpu", 3, 2, tuning={}).delta_UP
    for name, tuning in (("cuda", {}), ("triton", TRITON)):
        ours_UP = deltas("cuda", 3, 2, tuning=tuning).delta_UP
        found[f"{name} against float32 on the CPU, 2 steps, largest of 3 users"] = max(
            difference(ours, plain) for ours, plain in zip(ours_UP, plain_UP, strict=True)
        )
    same = True
    for steps in (1, 3):
        ours_UP = deltas("cuda", 150, steps, tuning={}).delta_UP
        triton_UP = deltas("cuda", 150, steps, tuning=TRITON).delta_UP
        reversed_UP = deltas("cuda", 150, steps, order=range(149, -1, -1), tuning={}).delta_UP.flip(0)
        fewer_UP = deltas("cuda", 37, steps, tuning={}).delta_UP
        found[f"cuda against triton, {steps} steps"] = difference(ours_UP, triton_UP)
        bits = torch.equal(ours_UP, reversed_UP) and torch.equal(ours_UP[:37], fewer_UP)
        found[f"the same bits in reverse order and among fewer users, {steps} steps"] = bits
        same = same and bits
    three = deltas("cuda", 90, 2, runs=3, tuning={})
    found["cuda against triton, three runs"] = difference(
        three.delta_UP, deltas("cuda", 90, 2, runs=3, tuning=TRITON).delta_UP
    )

    # Compute the sum over users in three ways: with given squared norms, with norms computed on the GPU, on the CPU.
    delta_UP = three.delta_UP.clone()
    delta_UP[7, 100] = float("nan")
    delta_UP[8] *= 100
    weight_U = np.full(90, ONE)
    weight_U[5] = ONE // 3
    contribution = benchmark_plan(90).at(0, MODEL.layout).contribution
    square_UM = delta_UP.double().square().sum(1, keepdim=True)
    known_P = contribution.of_users(delta_UP, weight_U, None, square_UM).units_P
    own_P = contribution.of_users(delta_UP, weight_U).units_P
    cpu_P = contribution.of_users(delta_UP.cpu(), weight_U).units_P
    found["sum: units between known and computed norms"] = int((known_P - own_P).abs().max())
    found["sum: units between GPU and CPU"] = int((own_P.cpu() - cpu_P).abs().max())
    found["sum: largest unit"] = int(cpu_P.abs().max())

    equal, milliseconds = noise()
    found[f"noise: the same integers on both, {DRAWS} rounds"] = equal
    found["noise: ms until the integers of a round are on the GPU, and of the GPU alone"] = milliseconds
    same = same and equal

    people = list(synthetic_users(MODEL.vocabulary_size, 375, 200))
    params_P = MODEL.initial(3)
    here, there = (evaluate(MODEL, params_P.to(d), people[:40], unroll=10) for d in ("cuda", "cpu"))
    found["evaluation, GPU and CPU"] = [str(here), str(there)]
    text = HeldOutText(MODEL, people, unroll=10, device=torch.device("cuda"))
    params_P = params_P.cuda()
    text.start(params_P)()
    began = time.perf_counter()
    for _ in range(10):
        text.start(params_P)()
    found["evaluation of 75,000 tokens, ms"] = round((time.perf_counter() - began) * 100, 2)
    print(json.dumps(found, indent=1))
    sys.exit(not same)


if __name__ == "__main__":
    main()
