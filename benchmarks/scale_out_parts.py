"""Measure the parts of a round, each alone on this machine, as input for benchmarks/scale_out_simulator.py.

Run it: OMP_NUM_THREADS=1 python benchmarks/scale_out_parts.py --out parts.json [--device cuda] [--users 8]

Work of a CPU is measured in processor time of one thread, which does not depend on other programs. Disk and network
(Gloo between processes of this machine) are measured in wall time, the least of several measurements.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import unheard
from unheard.engines.distributed.process_group import Message, ProcessGroup
from unheard.mechanism.aggregation import CohortSum
from unheard.mechanism.plan import RoundPlan
from unheard.performance.benchmark import synthetic_users
from unheard.privacy.ledger import Ledger
from unheard.randomness import secure_generator
from unheard.training.round import AddServer, State, step

REPEATS, TOKENS, SMALL, MANY = 5, 1600, 1024, 8
"""Repetitions of a measurement, tokens per user, elements of the small tensor, and ranks of the larger group."""


def main() -> None:
    """Measure all parts and write them to a file. With `--network`, measure the network as one rank of a group."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--device", default="cpu")
    options.add_argument("--users", type=int, default=8, help="largest number of users in one call to the engine")
    options.add_argument("--users-per-round", type=int, default=32, help="users per round of the predicted runs")
    options.add_argument("--network", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    torch.set_num_threads(1)
    if given.network:
        _network(given.out)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()  # otherwise its threads may abort the process at exit
        return
    model = unheard.TiedLSTM(vocabulary_size=10_000)
    plan = benchmark_plan(given.users_per_round)
    parts = {"parameters": model.layout.total, **_users(model, plan, given), **_leader(model, plan.at(0, model.layout))}
    parts["hardware"] = f"{len(os.sched_getaffinity(0))} CPU cores" if given.device == "cpu" else given.device
    parts["places"] = len(os.sched_getaffinity(0)) if given.device == "cpu" else None
    with tempfile.TemporaryDirectory() as folder:
        two, many = (_on_ranks(n, Path(folder) / f"{n}.json") for n in (2, MANY))
    each = max(0.0, (many.pop("asking") - two["asking"]) / (MANY - 2))
    parts |= {"message": each, "round_trip": max(0.0, two.pop("asking") - each), **two}
    given.out.write_text(json.dumps({"users_per_round": given.users_per_round, "parts": parts}, indent=2) + "\n")
    print(given.out.read_text())


def _on_ranks(size: int, out: Path) -> dict[str, float]:
    """Measure the network between `size` ranks in new processes, and return the result."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), __file__]
    subprocess.run([*run, "--network", "--out", str(out)], check=True)
    return json.loads(out.read_text())


def benchmark_plan(users_per_round: int) -> unheard.Plan:
    """Return the plan of the measured rounds."""
    return unheard.Plan(
        population=100 * users_per_round,
        sampling=unheard.PoissonSampling(users_per_round=users_per_round),
        update=unheard.FedAvg(),
        clip=unheard.FlatClip(norm=15.0),
        noise=unheard.GaussianNoise(noise_multiplier=1.0),
    )


def _users(model: unheard.TiedLSTM, plan: unheard.Plan, given: argparse.Namespace) -> dict[str, float]:
    """Return the fixed time of a call to the engine and the time per user, from a line through two sizes of cohorts."""
    engine = unheard.EngineChoice(device=given.device).build(model)
    params_P, now = model.initial(0).to(engine.device), plan.at(0, model.layout)
    users = list(synthetic_users(model.vocabulary_size, given.users, TOKENS))
    cost = float(plan.update.cost(np.array([len(users[0].tokens)]))[0])

    def work(count: int) -> None:
        engine.sum_updates(params_P, users[:count], now, np.random.default_rng(0)).units_P.cpu()

    few = max(1, given.users // 4)
    clock = time.thread_time if given.device == "cpu" else time.perf_counter
    small, large = (_times(lambda n=n: work(n), clock) for n in (few, given.users))
    each = (min(large) - min(small)) / (given.users - few)
    return {
        "seconds_per_cost": each / cost,
        "seconds_fixed": max(0.0, min(small) - few * each),
        "cost_mean": cost,
        "cost_deviation": 0.0,
        "unsteadiness": float(np.std(large) / np.mean(large)),
    }


def _leader(model: unheard.TiedLSTM, plan: RoundPlan) -> dict[str, float]:
    """Return the seconds of the work that only the leader does: sampling, ledgers, noise and the server's step."""
    numbers, state = model.layout.total, State(round=0, params_P=model.initial(0))
    units_P = torch.zeros(numbers, dtype=torch.int64)
    contribution = plan.contribution
    total = CohortSum(units_P=units_P, grid=contribution.grid, weight=1.0, l2_bound=contribution.l2_bound)
    normals = secure_generator().standard_normal(numbers)

    class Ready:
        """A generator that returns normals that were already drawn."""

        def standard_normal(self, size: int, dtype: Any = None) -> np.ndarray:
            return normals

    def finish() -> None:
        step(AddServer(), model, state, plan.noise.add(plan.average(total), Ready()))  # pyright: ignore[reportArgumentType]

    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger.create(Path(folder) / "ledger.jsonl", {"population": plan.population, "delta": 1e-9})
        ledgers = 2 * min(
            _times(lambda: ledger.charge(plan.event(), 0), time.perf_counter)
        )  # twice: the run's ledger and the population's
    return {
        "draw": min(_times(lambda: plan.sampling.draw(100_000, plan.population, secure_generator()), time.thread_time)),
        "ledger": ledgers,
        "noise": min(_times(lambda: secure_generator().standard_normal(numbers), time.thread_time)),
        "finish": min(_times(finish, time.thread_time)),
    }


def _network(out: Path) -> None:
    """Measure, on one rank of a group, the time of messages with replies and of sums of two sizes.

    The leader writes the result to `out`.
    """
    ranks = ProcessGroup.join()
    assert ranks is not None
    ranks.connect(torch.device("cpu"), 60.0)
    sizes = (SMALL, unheard.TiedLSTM(vocabulary_size=10_000).layout.total)
    if not ranks.is_leader:
        while ranks.receive().kind != "end":
            ranks.reply()
        for size in sizes:
            _times(lambda size=size: ranks.reduce_sum(torch.zeros(size, dtype=torch.int64)), time.perf_counter)
        return

    def ask() -> None:
        """Send a message to every other rank and wait for all replies."""
        ranks.send([Message("ping") for _ in ranks.others])
        ranks.replies()

    messages = [min(_times(ask, time.perf_counter)) for _ in range(3)]
    ranks.shutdown()
    small, large = (
        min(_times(lambda size=size: ranks.reduce_sum(torch.zeros(size, dtype=torch.int64)), time.perf_counter))
        for size in sizes
    )
    rate = 8 * (sizes[1] - sizes[0]) / (large - small)
    found = {"asking": min(messages), "latency": max(0.0, small - 8 * SMALL / rate), "bytes_per_second": rate}
    out.write_text(json.dumps(found))


def _times(work: Callable[[], Any], clock: Callable[[], float]) -> list[float]:
    """Return the seconds of several calls of a function by a clock, after one call that is not timed."""
    work()
    found = []
    for _ in range(REPEATS):
        began = clock()
        work()
        found.append(clock() - began)
    return found


if __name__ == "__main__":
    main()
