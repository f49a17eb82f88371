"""The road-map: the stages one after the other, each trained by whoever asks for it, each resting on the results before it.

In: a run, what to try, a folder. Out: stages (to be trained side by side), and at the end the Tuning: all results, the choice, the
plan and the price. A tuning that was stopped goes on where it was: trials are ordinary run folders.
"""

import json
import math
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unheard import storage
from unheard.engines.choice import EngineChoice
from unheard.errors import InvalidValue
from unheard.training.loop import RoundReport, train_together
from unheard.training.run import Run
from unheard.tuning.results import Margin, Result, margin, results
from unheard.tuning.select_parameters import Choice, choose_noise, choose_norm
from unheard.tuning.trials import (
    Grid,
    Trial,
    baseline_trials,
    check_can_be_tuned,
    check_same,
    clip_trials,
    noise_trials,
)

SPEED = "speed.jsonl"


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """What the private model may lose against the baseline, in points of AccuracyTop1."""

    clip_loss: float = 0.25
    """By the clip alone: the smallest S that costs less is taken."""
    loss: float = 0.5
    """By clip and noise together: the largest sigma that costs less is taken."""

    def __post_init__(self) -> None:
        for option, points in (("--allow-clip-loss", self.clip_loss), ("--allow-loss", self.loss)):
            if not math.isfinite(points):
                raise InvalidValue(f"{option} must be a number of points of AccuracyTop1, say 0.5, not {points}.")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Trials that go side by side. `left` are those with rounds to train."""

    title: str
    trials: tuple[Trial, ...]
    engine: EngineChoice
    out: Path

    @property
    def left(self) -> list[Trial]:
        return [trial for trial in self.trials if not trial.is_complete()]

    def reports(self) -> Generator[tuple[int, RoundReport], None, None]:
        """Train what is left. How fast it went is kept: the plan's cost is worked out from it."""
        left = self.left
        going = train_together([(trial.run, trial.folder) for trial in left], engine=self.engine)
        began, seen, rounds = 0.0, set(), 0
        try:
            for place, report in going:
                if not seen:
                    began = time.monotonic()  # after the first turn: compiling and warming up is not the speed
                rounds += place in seen
                seen.add(place)
                yield place, report
        finally:
            seconds = time.monotonic() - began
            going.close()  # pyright: ignore[reportAttributeAccessIssue]
            if rounds:
                users = rounds * left[0].run.plan.at(0, left[0].run.model.layout).expected_users
                _append(self.out / SPEED, {"stage": left[0].stage, "users": users, "seconds": seconds})


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What was trained, and what was chosen; or why nothing was."""

    trials: tuple[Trial, ...]
    results: tuple[Result, ...]
    margin: Margin
    norm: Choice | None = None
    noise: Choice | None = None
    refusal: str | None = None

    @property
    def baseline(self) -> Result:
        return self.results[0]


def road_map(
    run: Run, grid: Grid, allowance: Allowance, out: Path, engine: EngineChoice = EngineChoice()
) -> Generator[Stage, None, Tuned | None]:
    """Yields each stage for the caller to train, and goes on when it is asked for the next. Returns None if a stage was left
    unfinished (the same call goes on with it), else all that was found."""
    check_can_be_tuned(run)
    out.mkdir(parents=True, exist_ok=True)
    trials: list[Trial] = []

    def stage(title: str, more: Sequence[Trial]) -> Stage:
        for trial in more:
            check_same(trial)  # complete ones too: their results would be taken for this run file's
        trials.extend(more)
        here = replace(engine, corpus_part=None)  # trials go in one process; parts are for the run that is planned
        return Stage(title=title, trials=tuple(more), engine=here, out=out)

    # Neither needs the other's results, so they go side by side.
    unnoised = [*baseline_trials(run, grid, out), *clip_trials(run, grid, out)]
    if not (yield from _trained(stage("Baseline, and clipping at each S, without noise", unnoised))):
        return None
    found = results(trials)
    try:
        norm = choose_norm(found[0], found[1:], allowance.clip_loss, margin(found))
    except InvalidValue as refusal:
        return Tuned(trials=tuple(trials), results=tuple(found), margin=margin(found), refusal=str(refusal))
    title = f"Noise sigma, at S = {norm.result.norm:g}"
    if not (yield from _trained(stage(title, noise_trials(run, grid, out, norm.result.norm)))):
        return None
    found = results(trials)
    noised = [result for result in found if result.noise_std > 0]
    noise, why = None, None
    try:
        noise = choose_noise(found[0], noised, allowance.loss, margin(found))
    except InvalidValue as refusal:
        why = str(refusal)
    return Tuned(trials=tuple(trials), results=tuple(found), margin=margin(found), norm=norm, noise=noise, refusal=why)


def users_per_second(out: Path) -> float | None:
    """User updates a second in the stage that was trained last, evaluations included; None if that is not known."""
    path = out / SPEED
    if not path.exists():
        return None
    last: dict[str, Any] = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
    return last["users"] / last["seconds"] if last["seconds"] > 0 else None


def _trained(stage: Stage) -> Generator[Stage, None, bool]:
    """Ask for a stage unless it is complete; whether it is, afterwards."""
    if stage.left:
        yield stage
    return not stage.left


def _append(path: Path, row: dict[str, Any]) -> None:
    storage.append_line(path, json.dumps(row).encode())
