"""Estimates the machine time of a plan: the number of its user updates divided by a measured number per second.

    speeds = nearest_rounds(measured_speeds(), users_per_round=1000)
    cost_of(speeds[0], rounds=1000, users_per_round=1000, hour_price=3.0)      # .hours, .price

Input: rounds, users per round, and a measured speed with its source. Output: hours, and the price if the caller gives
the price per hour. Speeds are read from the package (speeds.toml, which benchmarks/speeds.py generates from
benchmarks/results) or from the output of `unheard benchmark --json` on your own machine. The package contains no
prices, and no speeds of machines that were not measured.
"""

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from unheard import storage
from unheard.config import require, require_positive
from unheard.errors import InvalidValue

LONG_TEXT = 1600
"""Tokens per user, as in the paper. `speeds_from` ignores benchmarks with another number."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """A measured number of users per second, without evaluations and checkpoints.

    Args:
        device: The machine, for example "NVIDIA H200".
        engine: The engine and its precision.
        model: The model, in words.
        users_per_round: The size of the cohorts that were measured.
        users_per_second: The measured speed.
        source: The file that reports the measurement.
        of: What was timed: whole rounds, or only a part of a round, such as the user updates.
        is_gpu: Whether the device is a GPU; a price per GPU hour applies only then.
        parameters: The number of the model's parameters; None if unknown.
        tokens_per_user: The number of tokens of each user; None if unknown.

    Raises:
        InvalidValue: `users_per_round` or `users_per_second` is not above 0.
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
        speed: The measured speed from which the estimate is computed.
        machines: How many machines share the work.
        machine_hours: The hours of all machines together.
        hours: The hours from start to end.
        price: `machine_hours` times the price per hour; None if no price was given, or if the device is a CPU.
    """

    speed: Speed
    machines: int
    machine_hours: float
    hours: float
    price: float | None

    @property
    def measured(self) -> str:
        """A description of the measurement, for example "whole rounds of 100 users"."""
        return f"{self.speed.of} of {self.speed.users_per_round:,g} users"

    def record(self) -> dict[str, Any]:
        """Return the estimate, and the speed from which it is computed, as values that JSON can hold."""
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
    """Estimate the machine time of a plan for each measured combination of device, engine and model, fastest first.

    Args:
        speeds: Measured speeds, from `measured_speeds` or `speeds_from`.
        rounds: Rounds of the plan.
        users_per_round: Expected users per round. If a combination was measured with several cohort sizes,
            `nearest_rounds` selects one.
        gpus: How many GPUs share the work. A CPU is always one machine.
        efficiency: The efficiency of several GPUs, see `cost_of`. It does not apply to a CPU.
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
    """Estimate the machine time of a plan at one measured speed.

    >>> figures = dict(users_per_round=100, users_per_second=1000, source="a benchmark")
    >>> speed = Speed(device="a GPU", engine="stacked", model="LSTM", **figures)
    >>> cost_of(speed, rounds=3600, users_per_round=1000, machines=2, hour_price=3.0).price
    3.0

    Args:
        speed: A measured speed.
        rounds: Rounds of the plan.
        users_per_round: Expected users per round.
        machines: How many machines share the work.
        efficiency: The joint speed of all machines, divided by `machines` times the speed of one; in (0, 1].
        hour_price: The price of one machine for one hour, in any currency; ignored for a CPU.

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
    """Return the speeds in speeds.toml, which is part of the package."""
    text = resources.files("unheard.performance").joinpath("speeds.toml").read_text(encoding="utf-8")
    return [Speed(**table) for table in tomllib.loads(text)["speed"]]


def speeds_from(path: Path) -> list[Speed]:
    """Read the speeds of whole rounds from a file with the output of `unheard benchmark --json`.

    Only rounds of a single run with 1,600 tokens per user are returned.

    Raises:
        InvalidValue: The file cannot be read, is not the output of this command, or has no such rounds.
    """
    try:
        content = json.loads(storage.regular_file(path).read_text(encoding="utf-8"))
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
            f"{path} is not the output of `unheard benchmark --json`. Write it again: unheard benchmark --json > "
            f"{path.name}"
        ) from None
    if not rows:
        raise InvalidValue(f"{path} has no measurement of whole rounds. Run: unheard benchmark --rounds 100 --json")
    return rows


def _from_benchmark(row: dict[str, Any], machine: str, parameters: int, path: Path) -> Speed:
    """Return the speed of one row of `rounds` in the output of a benchmark."""
    return Speed(
        device=machine,
        engine="as in the benchmark",
        model=f"{parameters:,} parameters",
        users_per_round=float(row["users_per_round"]),
        users_per_second=float(row["users_per_second"]),
        source=path.name,
        is_gpu=not machine.startswith("CPU"),
        parameters=parameters,
        tokens_per_user=LONG_TEXT,
    )


def nearest_rounds(speeds: Sequence[Speed], users_per_round: float) -> list[Speed]:
    """Select one speed for each combination of device, engine and model, and return them, fastest first.

    Of several measured cohort sizes, the largest that does not exceed `users_per_round` is selected. If all are larger,
    the smallest is selected.

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
