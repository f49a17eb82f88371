"""What a plan costs in machine time: user updates over measured users a second.

In: rounds and users a round; speeds that were measured, with their source. Out: hours, and money if you say what an hour costs.
Speeds come with the package (speeds.toml, made from benchmarks/results by benchmarks/speeds.py) or from `unheard benchmark --json`
on your own machine. Nothing else is known here: no price, no speed of a machine that was not measured.
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


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Users a second, as measured; evaluations and checkpoints are not in it."""

    device: str
    engine: str
    model: str
    users_per_round: float
    users_per_second: float
    source: str
    of: str = "whole rounds"
    """What was timed."""
    is_gpu: bool = True
    parameters: int | None = None
    tokens_per_user: int | None = None

    def __post_init__(self) -> None:
        require_positive(users_per_round=self.users_per_round, users_per_second=self.users_per_second)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A plan on machines of one kind."""

    speed: Speed
    machines: int
    machine_hours: float
    hours: float
    price: float | None


def cost_of(
    speed: Speed,
    *,
    rounds: int,
    users_per_round: float,
    machines: int = 1,
    efficiency: float = 1.0,
    hour_price: float | None = None,
) -> Cost:
    """Machine hours, and hours on so many machines; `efficiency` is the part of N times one machine that N machines reach."""
    require(machines >= 1, "--gpus must be 1 or more.")
    require(0 < efficiency <= 1, "--efficiency must be above 0 and at most 1: the part of ideal speed that is reached.")
    require_positive(**{"--gpu-hour-price": hour_price})
    machine_hours = rounds * users_per_round / speed.users_per_second / 3600 / efficiency
    price = machine_hours * hour_price if hour_price is not None and speed.is_gpu else None
    return Cost(
        speed=speed, machines=machines, machine_hours=machine_hours, hours=machine_hours / machines, price=price
    )


def measured_speeds() -> list[Speed]:
    """Those of the package."""
    text = resources.files("unheard.training").joinpath("speeds.toml").read_text(encoding="utf-8")
    return [Speed(**table) for table in tomllib.loads(text)["speed"]]


def speeds_from(path: Path) -> list[Speed]:
    """Those that `unheard benchmark --json` printed: whole rounds; of runs side by side nothing is taken."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        machine, parameters = str(found["machine"]["device"]), int(found["parameters"])
        rows = [_from_benchmark(row, machine, parameters, path) for row in found["rounds"] if row["runs_at_once"] == 1]
    except OSError as trouble:
        raise InvalidValue(f"Cannot read --speed-from {path}: {trouble.strerror}.") from None
    except (ValueError, KeyError, TypeError, InvalidValue, RecursionError):
        raise InvalidValue(
            f"{path} is not what `unheard benchmark --json` prints. Write it anew: unheard benchmark --json > {path.name}"
        ) from None
    if not rows:
        raise InvalidValue(f"{path} has no whole rounds. Measure some: unheard benchmark --rounds 100 --json")
    return rows


def _from_benchmark(row: dict[str, Any], machine: str, parameters: int, path: Path) -> Speed:
    return Speed(
        device=machine,
        engine="as chosen there",
        model=f"{parameters:,} parameters",
        users_per_round=float(row["users_per_round"]),
        users_per_second=float(row["users_per_second"]),
        source=path.name,
        is_gpu=not machine.startswith("CPU"),
        parameters=parameters,
    )


def nearest_rounds(speeds: Sequence[Speed], users_per_round: float) -> list[Speed]:
    """Of each device and engine the one measured with rounds most like these: the largest that is not larger, else the smallest."""
    chosen: dict[tuple[str, str, str], Speed] = {}
    for speed in sorted(speeds, key=lambda s: s.users_per_round):
        key = (speed.device, speed.engine, speed.model)
        if key not in chosen or speed.users_per_round <= users_per_round:
            chosen[key] = speed
    return sorted(chosen.values(), key=lambda s: -s.users_per_second)
