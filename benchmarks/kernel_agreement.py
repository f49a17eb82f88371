"""How far the stacked kernels, the sum over users and the evaluation on a GPU are from the CPU, and their invariances.

    python -m benchmarks.kernel_agreement

The paper's model on synthetic users. The deltas of bfloat16 kernels are compared with the plain version in float32 on the
CPU and with the Triton kernels; a user's delta must have the same bits in another order and among fewer users, and when the
recorded graph runs again. Prints one JSON object; exits with 1 if an invariance fails.
"""

import json
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from unheard.engines.engine import Cohort
from unheard.engines.stacked.engine import Chunk, Task
from unheard.engines.stacked.kernels import KernelStep
from unheard.engines.stacked.plain import PlainStep
from unheard.engines.stacked.sizes import Buffers, Sizes
from unheard.evaluation.next_word import HeldOutText, evaluate
from unheard.models.recurrent import TiedLSTM
from unheard.performance.benchmark import benchmark_plan, synthetic_users
from unheard.randomness import reproducible_generator
from unheard.updates.user_update import ONE

MODEL = TiedLSTM(vocabulary_size=10_000)
TRITON = {"cuda": 0}  # the tuning that turns the CUDA kernels off


def deltas(
    device: str, users: int, steps: int, *, runs: int = 1, order: Sequence[int] | None = None, tuning: dict[str, int]
) -> Buffers:
    """The buffers after the local steps of `users` users: the plain version on a CPU, the kernels on a GPU, run twice."""
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
    buffers.delta_UP.fill_(float("nan"))  # what was there before must not matter
    step.run(chunk.fill(cohorts, members))
    first_UP = buffers.delta_UP.clone()
    step.run(chunk.fill(cohorts, members))
    if not torch.equal(first_UP, buffers.delta_UP):
        sys.exit("the second run, by the recorded graph, gives other deltas than the first")
    return buffers


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The norm of the difference, relative to `theirs`."""
    a, b = ours.double().cpu(), theirs.double().cpu()
    return float((a - b).norm() / b.norm())


def main() -> None:
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

    # The sum over users: squared norms known from the steps, computed on the GPU, and all on the CPU.
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
