"""The machine time of a plan: its user updates divided by a measured number of users per second.

    speeds = nearest_rounds(measured_speeds(), users_per_round=1000)
    cost_of(speeds[0], rounds=1000, users_per_round=1000, hour_price=3.0)      # .hours, .price

Input: rounds, users per round, and a measured speed with its source. Output: hours, and the price if the caller gives
the price of an hour. Speeds come with the package (speeds.toml, which benchmarks/speeds.py makes from
benchmarks/results) or from `unheard benchmark --json` on the user's own machine. The package contains no prices and no
speeds of machines that were not measured.
"""

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from unheard.config import require, require_positive
from unheard.errors import InvalidValue

LONG_TEXT = 1600
"""Tokens per user of the rounds that a cost is estimated from."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """A measured number of users per second, without evaluations and checkpoints.

    Args:
        device: The machine, for example "NVIDIA H200".
        engine: The engine and its precision.
        model: The model, in words.
        users_per_round: The size of the cohorts that were measured.
        users_per_second: The result.
        source: The file that the figure is from.
        of: What was timed: whole rounds, or the user updates alone.
        is_gpu: Whether the device is a GPU; a price per GPU hour applies only then.
        parameters: The number of the model's parameters, if known.
        tokens_per_user: The tokens of each user, if known.
    """

    device: str
    engine: str
    model: str
    users_per_round: float
    users_per_second: float
    source: str
    of: str = "whole rounds"
    is_gpu: bool = True
    parameters: int | None = None
    tokens_per_user: int | None = None

    def __post_init__(self) -> None:
        require_positive(users_per_round=self.users_per_round, users_per_second=self.users_per_second)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The machine time of a plan on machines of one kind.

    Attributes:
        speed: The measured speed that the estimate rests on.
        machines: How many machines share the work.
        machine_hours: Hours of all machines together.
        hours: Hours from start to end.
        price: machine_hours times the price of an hour; None if no price was given, or on a CPU.
    """

    speed: Speed
    machines: int
    machine_hours: float
    hours: float
    price: float | None

    @property
    def measured(self) -> str:
        """What the speed was measured on, in words."""
        return f"{self.speed.of} of {self.speed.users_per_round:,g} users"

    def record(self) -> dict[str, Any]:
        """The machine time and the speed that it rests on, as data for JSON."""
        return {
            "device": self.speed.device,
            "engine": self.speed.engine,
            "model": self.speed.model,
            "machines": self.machines,
            "users_per_second": self.speed.users_per_second,
            "measured": self.measured,
            "source": self.speed.source,
            "machine_hours": self.machine_hours,
            "hours": self.hours,
            "price": self.price,
        }


def costs_on_measured_machines(
    speeds: Sequence[Speed],
    *,
    rounds: int,
    users_per_round: float,
    gpus: int = 1,
    efficiency: float = 1.0,
    gpu_hour_price: float | None = None,
) -> list[Cost]:
    """The machine time of a plan on each device and with each engine that was measured, fastest first.

    Args:
        speeds: Measured speeds: `measured_speeds`, or `speeds_from` a benchmark of one's own.
        rounds: Rounds of the plan.
        users_per_round: Expected users per round. Of each device, the speed at the most similar number is taken.
        gpus: How many GPUs share the work. A CPU is always one machine.
        efficiency: As for `cost_of`, for GPUs.
        gpu_hour_price: The price of one GPU for one hour, in any currency.

    Raises:
        InvalidValue: A value is out of its range.
    """
    return [
        cost_of(
            speed,
            rounds=rounds,
            users_per_round=users_per_round,
            machines=gpus if speed.is_gpu else 1,
            efficiency=efficiency if speed.is_gpu else 1.0,
            hour_price=gpu_hour_price,
        )
        for speed in nearest_rounds(speeds, users_per_round)
    ]


def cost_of(
    speed: Speed,
    *,
    rounds: int,
    users_per_round: float,
    machines: int = 1,
    efficiency: float = 1.0,
    hour_price: float | None = None,
) -> Cost:
    """The machine time of a plan.

    >>> figures = dict(users_per_round=100, users_per_second=1000, source="a benchmark")
    >>> speed = Speed(device="a GPU", engine="stacked", model="LSTM", **figures)
    >>> cost_of(speed, rounds=3600, users_per_round=1000, machines=2, hour_price=3.0).price
    3.0

    Args:
        speed: A measured speed.
        rounds: Rounds of the plan.
        users_per_round: Expected users in a round.
        machines: How many machines share the work.
        efficiency: The fraction of `machines` times the speed of one machine that they reach together, in (0, 1].
        hour_price: The price of one machine for one hour, in any currency.

    Raises:
        InvalidValue: A value is out of its range.
    """
    require(machines >= 1, "--gpus must be 1 or more.")
    require(0 < efficiency <= 1, "--efficiency must be above 0 and at most 1: the part of ideal speed that is reached.")
    require_positive(**{"--gpu-hour-price": hour_price})
    machine_hours = rounds * users_per_round / speed.users_per_second / 3600 / efficiency
    price = machine_hours * hour_price if hour_price is not None and speed.is_gpu else None
    return Cost(
        speed=speed, machines=machines, machine_hours=machine_hours, hours=machine_hours / machines, price=price
    )


def measured_speeds() -> list[Speed]:
    """The speeds that come with the package."""
    text = resources.files("unheard.performance").joinpath("speeds.toml").read_text(encoding="utf-8")
    return [Speed(**table) for table in tomllib.loads(text)["speed"]]


def speeds_from(path: Path) -> list[Speed]:
    """The speeds of whole rounds in the output of `unheard benchmark --json`.

    Those of several runs at once and of short texts are left out.

    Raises:
        InvalidValue: The file cannot be read, is not such an output, or holds no whole rounds.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        machine, parameters = str(content["machine"]["device"]), int(content["parameters"])
        rows = [
            _from_benchmark(row, machine, parameters, path)
            for row in content["rounds"]
            if row["runs_at_once"] == 1 and row.get("tokens_per_user", LONG_TEXT) == LONG_TEXT
        ]
    except OSError as error:
        raise InvalidValue(f"Cannot read --speed-from {path}: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, InvalidValue, RecursionError):
        raise InvalidValue(
            f"{path} is not what `unheard benchmark --json` prints. Write it anew: unheard benchmark --json > "
            f"{path.name}"
        ) from None
    if not rows:
        raise InvalidValue(f"{path} has no whole rounds. Measure some: unheard benchmark --rounds 100 --json")
    return rows


def _from_benchmark(row: dict[str, Any], machine: str, parameters: int, path: Path) -> Speed:
    """Speed that a row of the benchmark file states."""
    return Speed(
        device=machine,
        engine="as chosen there",
        model=f"{parameters:,} parameters",
        users_per_round=float(row["users_per_round"]),
        users_per_second=float(row["users_per_second"]),
        source=path.name,
        is_gpu=not machine.startswith("CPU"),
        parameters=parameters,
        tokens_per_user=LONG_TEXT,
    )


def nearest_rounds(speeds: Sequence[Speed], users_per_round: float) -> list[Speed]:
    """For each device and engine the speed that was measured with the most similar cohort size, fastest first.

    The most similar size is the largest that is not larger than `users_per_round`; if there is none, the smallest.

    Args:
        speeds: Measured speeds.
        users_per_round: The expected users per round of a plan.
    """
    chosen: dict[tuple[str, str, str], Speed] = {}
    for speed in sorted(speeds, key=lambda s: s.users_per_round):
        key = (speed.device, speed.engine, speed.model)
        if key not in chosen or speed.users_per_round <= users_per_round:
            chosen[key] = speed
    return sorted(chosen.values(), key=lambda s: -s.users_per_second)
