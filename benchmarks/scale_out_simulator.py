r"""Users a second on 1 to 1,024 ranks, predicted from measured parts of a round, and held against measured runs.

    python benchmarks/scale_out_simulator.py --parts parts.json --measured measured.json
    python benchmarks/scale_out_simulator.py --parts parts.json --device "NVIDIA H200" --users-per-round 50000 \
        --bandwidth 25e9 --latency 20e-6

Nothing is assumed silently: times of the parts come from a file (benchmarks/scale_out_parts.py), whole runs to hold
them against from another (benchmarks/scale_out.py), the network from the command line where it was not measured. A
round is what engines/distributed/engine.py and training/loop.py do, in their order:

    draw, ledger | tell every rank, one after the other | hand out parameters | the slowest rank's users | hear every
    rank | add up
    | noise, if it is not ready yet | average, noise, server

Users are dealt by the library's own `assign_users`: stragglers come from the spread of what users cost and from ranks'
own unsteadiness.
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


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What was measured, in seconds unless the name says otherwise."""

    hardware: str
    parameters: int
    seconds_per_cost: float
    """Of one unit of a user's cost (a local step; updates/user_update.py `cost`), on one rank alone."""
    seconds_fixed: float
    """Of a rank's call to its engine, whoever is in it."""
    cost_mean: float
    cost_deviation: float
    """Of users' costs: how unequal they are."""
    unsteadiness: float
    """Deviation of a rank's speed from round to round, as a part of it."""
    draw: float
    ledger: float
    noise: float
    """Drawn on another thread from the round's beginning on, so it costs only what is left of it after the users."""
    finish: float
    """Average, adding the noise, server's step."""
    message: float
    """What each further rank adds to asking all and hearing all: the leader does that one after the other."""
    round_trip: float
    """What asking and hearing takes besides."""
    latency: float
    bytes_per_second: float
    """Of the network between two ranks."""
    places: int | None = None
    """How many ranks can compute at once (cores, for ranks of one thread); more share them.

    None: each rank has its own.
    """

    @classmethod
    def read(cls, path: Path, **changes: float | None) -> "Parts":
        found = json.loads(path.read_text())["parts"]
        known = {f.name for f in fields(cls)}
        return cls(**{**{k: v for k, v in found.items() if k in known}, **{k: v for k, v in changes.items() if v}})


def on_device(parts: Parts, device: str) -> Parts:
    """Users and what else a round does on another device, from a line through its whole rounds in speeds.toml; messages
    as measured here, since they go over Gloo there too."""
    rows = [s for s in measured_speeds() if s.device == device and s.of == "whole rounds"]
    if len(rows) < 2:
        raise SystemExit(f"'{device}' needs whole rounds of two sizes in src/unheard/training/speeds.toml.")
    small, large = sorted(rows, key=lambda s: s.users_per_round)[:: len(rows) - 1]
    seconds = [s.users_per_round / s.users_per_second for s in (small, large)]
    each = (seconds[1] - seconds[0]) / (large.users_per_round - small.users_per_round)
    rest = max(0.0, seconds[0] - small.users_per_round * each)
    alone = {"draw": 0.0, "ledger": 0.0, "noise": 0.0, "seconds_fixed": 0.0, "finish": rest}
    return replace(parts, hardware=device, seconds_per_cost=each / parts.cost_mean, places=None, **alone)


def pipelined(parts: Parts, ranks: int, size: int, shape: str) -> float:
    """A sum to one rank, or parameters to all, in many small pieces: the bytes go once; what grows is the way of the
    first."""
    if ranks == 1:
        return 0.0
    hops = ranks - 1 if shape == "ring" else 2 * math.ceil(math.log2(ranks))
    return hops * parts.latency + size / parts.bytes_per_second


def whole(parts: Parts, ranks: int, size: int, _: str) -> float:
    """The same down a tree, each rank passing all of it on at once, as Gloo does."""
    return math.ceil(math.log2(ranks)) * (parts.latency + size / parts.bytes_per_second) if ranks > 1 else 0.0


@dataclass(frozen=True, kw_only=True)
class Round:
    """Seconds of each part of one round."""

    users: float
    before: float
    messages: float
    hand_out: float
    compute: float
    add_up: float
    after: float

    @property
    def seconds(self) -> float:
        return self.before + self.messages + self.hand_out + self.compute + self.add_up + self.after


def one_round(parts: Parts, ranks: int, users: float, shape: str, rng: np.random.Generator) -> Round:
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
    """Users a second over some rounds, and the last round's parts."""
    # A generator for each round: however many ranks there are, the cohorts are the same.
    done = [one_round(parts, ranks, users, shape, np.random.default_rng(k)) for k in range(rounds)]
    return sum(one.users for one in done) / sum(one.seconds for one in done), done[-1]


def table(parts: Parts, users: float, shape: str, measured: dict[int, float], ranks: Sequence[int] = RANKS) -> str:
    """Markdown: predicted beside measured, and where the time goes."""
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
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--parts", type=Path, required=True, help="JSON with measured parts")
    options.add_argument(
        "--measured", type=Path, help='JSON with whole runs, {"runs": [{"ranks", "users_per_second"}]}'
    )
    options.add_argument("--users-per-round", type=float, help="default: as measured")
    options.add_argument("--cost-deviation", type=float, help="of users' costs, to see what unequal users do")
    options.add_argument("--device", help="users on a device of the package's speeds, each rank with one of its own")
    options.add_argument("--bandwidth", type=float, help="bytes a second between two ranks, if it was not measured")
    options.add_argument("--latency", type=float, help="seconds, if it was not measured")
    options.add_argument(
        "--shape", choices=["ring", "tree", "gloo"], default="tree", help="how sums and parameters travel"
    )
    options.add_argument("--most", type=int, default=RANKS[-1], help="ranks, at most")
    given = options.parse_args()
    network = {"bytes_per_second": given.bandwidth, "latency": given.latency}
    parts = Parts.read(given.parts, cost_deviation=given.cost_deviation, **network)
    if given.device:
        if not (given.bandwidth and given.latency):
            raise SystemExit("--device needs --bandwidth and --latency: its network was not measured here.")
        parts = on_device(parts, given.device)
    content = json.loads((given.measured or given.parts).read_text())
    measured = {run["ranks"]: run["users_per_second"] for run in content.get("runs", [])}
    users = given.users_per_round or content["users_per_round"]
    print(f"{parts.hardware}; {users:,g} users a round; {given.shape}; {parts}\n")
    print(table(parts, users, given.shape, measured, [n for n in RANKS if n <= given.most]))


if __name__ == "__main__":
    main()
