r"""Predict users per second on 1 to 1,024 ranks from measured parts of a round, and compare with measured runs.

    python benchmarks/scale_out_simulator.py --parts parts.json --measured measured.json
    python benchmarks/scale_out_simulator.py --parts parts.json --device "NVIDIA H200" --users-per-round 50000 \
        --bandwidth 25e9 --latency 20e-6

All inputs are explicit: the times of the parts come from a file (benchmarks/scale_out_parts.py), measured runs for
comparison from another (benchmarks/scale_out.py), and the network from the command line if it was not measured. A round
has the steps of engines/distributed/engine.py and training/loop.py, in their order:

    1. draw the cohort and charge the ledgers
    2. send a message to each rank in turn, and later receive a reply from each
    3. broadcast the parameters
    4. compute the users' updates, until the slowest rank is done
    5. sum over ranks
    6. wait for the noise, if it is not drawn yet
    7. average, add the noise, take the server's step

Users are assigned to ranks by the library's own `assign_users`. A rank is slower than others if its users cost more, or
because of its random variation in speed.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from unheard.engines.distributed.engine import assign_users
from unheard.performance.estimate import measured_speeds

RANKS = tuple(2**k for k in range(11))
"""Numbers of ranks in the table."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The measured parts of a round, in seconds unless the name or the text says otherwise."""

    hardware: str
    parameters: int
    """Number of parameters of the model."""
    seconds_per_cost: float
    """Time of one unit of a user's cost (a local step; `cost` in updates/user_update.py) on a rank that runs alone."""
    seconds_fixed: float
    """Time of a call to the engine that does not depend on the users."""
    cost_mean: float
    """Mean cost of a user."""
    cost_deviation: float
    """Standard deviation of the costs of users."""
    unsteadiness: float
    """Standard deviation of a rank's time from round to round, divided by its mean."""
    draw: float
    """Time to draw the cohort."""
    ledger: float
    """Time to charge the ledgers."""
    noise: float
    """Time to draw the noise. Another thread draws it from the start of the round, so only the part that is left after
    the users' updates delays the round."""
    finish: float
    """Time to average, add the noise and take the server's step."""
    message: float
    """Time that each further rank adds to the messages and replies, which the leader handles one after the other."""
    round_trip: float
    """Time of the messages and replies that does not depend on the number of ranks."""
    latency: float
    """Latency of the network between two ranks."""
    bytes_per_second: float
    """Bandwidth of the network between two ranks."""
    places: int | None = None
    """Number of ranks that can compute at the same time (cores, if each rank has one thread); further ranks share them.
    None if each rank has its own device."""

    @classmethod
    def read(cls, path: Path, **changes: float | None) -> "Parts":
        """Read the file of scale_out_parts.py. Values in `changes` that are not None or 0 replace measured ones."""
        found = json.loads(path.read_text())["parts"]
        known = {f.name for f in fields(cls)}
        return cls(**{**{k: v for k, v in found.items() if k in known}, **{k: v for k, v in changes.items() if v}})


def on_device(parts: Parts, device: str) -> Parts:
    """Return the parts with the times of another device.

    A line through whole rounds of two sizes in speeds.toml gives the time per user and the rest of a round. Messages
    keep the measured times, because they go over Gloo on that device too.

    Args:
        parts: The parts measured on this machine.
        device: A device of speeds.toml.

    Raises:
        SystemExit: speeds.toml has fewer than two sizes of whole rounds for this device.
    """
    rows = [s for s in measured_speeds() if s.device == device and s.of == "whole rounds"]
    if len(rows) < 2:
        raise SystemExit(f"'{device}' needs whole rounds of two sizes in src/unheard/performance/speeds.toml.")
    small, large = sorted(rows, key=lambda s: s.users_per_round)[:: len(rows) - 1]
    seconds = [s.users_per_round / s.users_per_second for s in (small, large)]
    each = (seconds[1] - seconds[0]) / (large.users_per_round - small.users_per_round)
    rest = max(0.0, seconds[0] - small.users_per_round * each)
    alone = {"draw": 0.0, "ledger": 0.0, "noise": 0.0, "seconds_fixed": 0.0, "finish": rest}
    return replace(parts, hardware=device, seconds_per_cost=each / parts.cost_mean, places=None, **alone)


def pipelined(parts: Parts, ranks: int, size: int, shape: str) -> float:
    """Return the seconds to sum over ranks, or to broadcast parameters, if the tensor is sent in many small pieces.

    The pieces follow each other, so the time of the bytes counts once. Only the latency grows with the number of ranks.

    Args:
        parts: The measured parts.
        ranks: Number of ranks.
        size: Bytes of the tensor.
        shape: `ring` or `tree`: the topology, which decides the number of hops.
    """
    if ranks == 1:
        return 0.0
    hops = ranks - 1 if shape == "ring" else 2 * math.ceil(math.log2(ranks))
    return hops * parts.latency + size / parts.bytes_per_second


def whole(parts: Parts, ranks: int, size: int, _: str) -> float:
    """Return the seconds of the same operation if each rank of a tree sends the whole tensor at once, as Gloo does."""
    return math.ceil(math.log2(ranks)) * (parts.latency + size / parts.bytes_per_second) if ranks > 1 else 0.0


@dataclass(frozen=True, kw_only=True)
class Round:
    """The number of users in one round, and the seconds of each part of the round."""

    users: float
    before: float
    messages: float
    hand_out: float
    compute: float
    add_up: float
    after: float

    @property
    def seconds(self) -> float:
        """The seconds of the whole round."""
        return self.before + self.messages + self.hand_out + self.compute + self.add_up + self.after


def one_round(parts: Parts, ranks: int, users: float, shape: str, rng: np.random.Generator) -> Round:
    """Simulate one round.

    Args:
        parts: The measured parts.
        ranks: Number of ranks.
        users: Expected users per round.
        shape: `ring`, `tree` or `gloo`: how sums and parameters are sent.
        rng: Random generator of the cohort and of the ranks' speeds.
    """
    drawn = int(rng.poisson(users))
    cost_U = np.maximum(rng.normal(parts.cost_mean, parts.cost_deviation, drawn), 1.0)
    speed_R = np.clip(rng.normal(1.0, parts.unsteadiness, ranks), 0.25, 4.0)
    holds_all = np.ones((1, ranks), dtype=bool)
    rank_U = assign_users(cost_U, np.ones(ranks), np.zeros(drawn, dtype=np.int64), holds_all)
    crowd = max(1.0, ranks / (parts.places or ranks))
    own_R = np.bincount(rank_U, weights=cost_U, minlength=ranks)
    busy_R = (parts.seconds_fixed + parts.seconds_per_cost * own_R) * crowd / speed_R
    travel = whole if shape == "gloo" else pipelined
    hand_out = travel(parts, ranks, 4 * parts.parameters, shape)
    add_up = travel(parts, ranks, 8 * parts.parameters, shape)
    messages = (ranks - 1) * parts.message + parts.round_trip if ranks > 1 else 0.0
    working = messages + hand_out + float(busy_R.max()) + add_up
    return Round(
        users=drawn,
        before=parts.draw + parts.ledger,
        messages=messages,
        hand_out=hand_out,
        compute=float(busy_R.max()),
        add_up=add_up,
        after=max(0.0, parts.noise - working) + parts.finish,
    )


def predict(parts: Parts, ranks: int, users: float, shape: str, rounds: int = 20) -> tuple[float, Round]:
    """Return the predicted users per second over some rounds, and the last round."""
    # Each round has its own generator, so that every number of ranks has the same sizes of cohorts.
    done = [one_round(parts, ranks, users, shape, np.random.default_rng(k)) for k in range(rounds)]
    return sum(one.users for one in done) / sum(one.seconds for one in done), done[-1]


def table(parts: Parts, users: float, shape: str, measured: dict[int, float], ranks: Sequence[int] = RANKS) -> str:
    """Return a Markdown table of predicted and measured speeds, and the share of each part of a round.

    Args:
        parts: The measured parts.
        users: Expected users per round.
        shape: `ring`, `tree` or `gloo`.
        measured: Measured users per second by number of ranks.
        ranks: Numbers of ranks.
    """
    lines = [
        "| ranks | users/s, predicted | of ideal | measured | users | messages | parameters out | sum back | rest |"
    ]
    lines.append("| ---: " * 9 + "|")
    alone = predict(parts, 1, users, shape)[0]
    for n in ranks:
        speed, one = predict(parts, n, users, shape)
        share = [one.compute, one.messages, one.hand_out, one.add_up, one.before + one.after]
        cells = [f"{n:,}", _speed(speed), f"{speed / alone / n:.0%}", _speed(measured[n]) if n in measured else ""]
        lines.append("| " + " | ".join([*cells, *(f"{s / one.seconds:.0%}" for s in share)]) + " |")
    return "\n".join(lines)


def _speed(value: float) -> str:
    """Return a speed with at least three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    """Read the files, apply the options and print the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--parts", type=Path, required=True, help="JSON with measured parts")
    options.add_argument(
        "--measured", type=Path, help='JSON with whole runs, {"runs": [{"ranks", "users_per_second"}]}'
    )
    options.add_argument("--users-per-round", type=float, help="expected users per round; default: as measured")
    options.add_argument("--cost-deviation", type=float, help="standard deviation of costs; default: as measured")
    options.add_argument("--device", help="predict for this device of speeds.toml, one per rank")
    options.add_argument("--bandwidth", type=float, help="bytes per second between two ranks; default: as measured")
    options.add_argument("--latency", type=float, help="seconds between two ranks; default: as measured")
    options.add_argument(
        "--shape", choices=["ring", "tree", "gloo"], default="tree", help="how sums and parameters are sent"
    )
    options.add_argument("--most", type=int, default=RANKS[-1], help="largest number of ranks")
    given = options.parse_args()
    network = {"bytes_per_second": given.bandwidth, "latency": given.latency}
    parts = Parts.read(given.parts, cost_deviation=given.cost_deviation, **network)
    if given.device:
        if not (given.bandwidth and given.latency):
            raise SystemExit("--device needs --bandwidth and --latency, because its network was not measured.")
        parts = on_device(parts, given.device)
    content = json.loads((given.measured or given.parts).read_text())
    measured = {run["ranks"]: run["users_per_second"] for run in content.get("runs", [])}
    users = given.users_per_round or content["users_per_round"]
    print(f"{parts.hardware}; {users:,g} users a round; {given.shape}; {parts}\n")
    print(table(parts, users, given.shape, measured, [n for n in RANKS if n <= given.most]))


if __name__ == "__main__":
    main()
