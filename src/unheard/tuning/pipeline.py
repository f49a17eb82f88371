"""The stages of a tuning, one after the other: baseline and clip trials, then noise trials at the chosen S.

`run_stages` is a generator: it yields each stage for the caller to train (and to show progress), chooses S between the
stages and sigma at the end, and returns a `TuningResult`. A tuning that was stopped continues where it was, since
trials are run folders.

    run = trial_run(run, proxy, population)
    stages = run_stages(run, grid, allowance, out, engine)
    # for each stage: for index, report in stage.reports(): ...

**The choice**: the smallest S, then the largest sigma, that cost little accuracy. A small S and a large sigma make
privacy cheap: users per round of the private run grow with S / sigma. Both are chosen by their loss against the
baseline, so the allowance for sigma is what the private model may lose in all. The paper chooses in the same way
(section 3): "choosing S in [10, 20] has at most a small effect", "a small decrease past sigma = 0.012"."""

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
from unheard.tuning.trials import (
    Grid,
    Margin,
    Result,
    Trial,
    baseline_trials,
    check_can_be_tuned,
    check_other_population,
    check_same,
    clip_trials,
    margin,
    noise_trials,
    on_proxy,
    results,
)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A chosen setting.

    Attributes:
        result: The setting and its accuracy.
        loss: What it loses against the baseline, in percentage points of AccuracyTop1.
        remarks: Sentences on how far the choice may be trusted.
    """

    result: Result
    loss: float
    remarks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Parameter:
    """The words in which messages speak of S or sigma."""

    symbol: str
    grid_option: str
    allowance_option: str
    beyond_the_grid: str


_NORM = _Parameter(
    symbol="S", grid_option="--norms", allowance_option="--allow-clip-loss", beyond_the_grid="a smaller S"
)
_NOISE = _Parameter(
    symbol="sigma",
    grid_option="--noise-stds",
    allowance_option="--allow-loss",
    beyond_the_grid="more noise, and so fewer users per round,",
)


def choose_norm(baseline: Result, clipped: Sequence[Result], allowed: float, margin: Margin) -> Choice:
    """Choose the smallest S that loses less than `allowed` points against the baseline.

    Args:
        baseline: The result without clip and noise.
        clipped: The results of each S, without noise.
        allowed: The allowance in percentage points of AccuracyTop1.
        margin: How far two results may differ by chance; it only adds remarks.

    Raises:
        InvalidValue: Every S loses more.
    """
    return _first_allowed(sorted(clipped, key=lambda result: result.norm), baseline, allowed, margin, _NORM)


def choose_noise(baseline: Result, noised: Sequence[Result], allowed: float, margin: Margin) -> Choice:
    """Choose the largest sigma that loses less than `allowed` points against the baseline.

    Args:
        baseline: The trial without clip and noise.
        noised: The trials with noise, at one S.
        allowed: Points of AccuracyTop1 that clip and noise together may cost.
        margin: The difference that chance explains.
    """
    return _first_allowed(sorted(noised, key=lambda result: -result.noise_std), baseline, allowed, margin, _NOISE)


def _first_allowed(
    ordered: Sequence[Result], baseline: Result, allowed: float, margin: Margin, parameter: _Parameter
) -> Choice:
    """Choose the first result that loses less than allowed. `ordered` begins with the best setting for privacy."""
    losses = [result.loss_against(baseline) for result in ordered]
    index = next((i for i, loss in enumerate(losses) if loss < allowed), None)
    if index is None:
        least = min(losses)
        raise InvalidValue(
            f"Every {parameter.symbol} of the grid costs {allowed:g} points of AccuracyTop1 or more against the baseline (the "
            f"least: {least:.2f}, {ordered[losses.index(least)].name}). Nothing is chosen: try other values with "
            f"{parameter.grid_option}, train longer with --rounds, or allow more with {parameter.allowance_option}."
        )
    chosen, loss, remarks = ordered[index], losses[index], []
    if index == 0:
        remarks.append(
            f"{chosen.name} is the edge of the grid: {parameter.beyond_the_grid} might cost as little. Try it with "
            f"{parameter.grid_option}."
        )
    if margin.hides(allowed - loss):
        remarks.append(
            f"{chosen.name} costs {loss:+.2f} points, allowed are {allowed:g}: the difference is within noise, and another "
            "repetition could choose otherwise."
        )
    if index > 0 and margin.hides(losses[index - 1] - allowed):
        remarks.append(
            f"{ordered[index - 1].name} was rejected for its {losses[index - 1]:.2f} points: within noise too."
        )
    return Choice(result=chosen, loss=loss, remarks=tuple(remarks))


SPEED = "speed.jsonl"


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """What the private model may lose against the baseline, in percentage points of AccuracyTop1.

    Attributes:
        clip_loss: By the clip alone. The smallest S that loses less is chosen.
        loss: By clip and noise together. The largest sigma that loses less is chosen.
    """

    clip_loss: float = 0.25
    loss: float = 0.5

    def __post_init__(self) -> None:
        for option, points in (("--allow-clip-loss", self.clip_loss), ("--allow-loss", self.loss)):
            if not math.isfinite(points):
                raise InvalidValue(f"{option} must be a number of points of AccuracyTop1, say 0.5, not {points}.")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Trials that are trained side by side.

    Attributes:
        title: What the stage tries, to be printed.
        trials: All trials of the stage.
        engine: The engine that trains them.
        out: The folder of the tuning.
    """

    title: str
    trials: tuple[Trial, ...]
    engine: EngineChoice
    out: Path

    @property
    def left(self) -> list[Trial]:
        """The trials that are not complete."""
        return [trial for trial in self.trials if not trial.is_complete()]

    def reports(self) -> Generator[tuple[int, RoundReport], None, None]:
        """Train the trials that are left, and record the speed, from which the plan's duration is computed.

        Yields:
            The index of a trial in `left`, as it was before the call, and the report of a round of that trial.
        """
        left = self.left
        runs = [(trial.run, trial.folder) for trial in left]
        # The permission is for the caller to obtain: a sweep without its baseline does not exist (`trial_run`).
        rounds = train_together(runs, engine=self.engine, allow_no_privacy=True)
        start, reported, timed_rounds = 0.0, set(), 0
        try:
            for index, report in rounds:
                if not reported:
                    start = time.monotonic()  # after the first round, which includes compilation
                timed_rounds += index in reported
                reported.add(index)
                yield index, report
        finally:
            seconds = time.monotonic() - start
            rounds.close()  # pyright: ignore[reportAttributeAccessIssue]
            if timed_rounds:
                users = timed_rounds * left[0].run.plan.at(0, left[0].run.model.layout).expected_users
                row = {"stage": left[0].stage, "users": users, "seconds": seconds}
                storage.append_line(self.out / SPEED, json.dumps(row).encode())


@dataclass(frozen=True, kw_only=True)
class TuningResult:
    """The results of all trials, and what was chosen.

    Attributes:
        trials: All trials that were trained.
        results: One result for each setting; the first is the baseline.
        margin: How far two results may differ by chance.
        norm: The chosen S; None if every S lost too much.
        noise: The chosen sigma; None if every sigma lost too much.
        refusal: Why nothing was chosen; None if both were.
    """

    trials: tuple[Trial, ...]
    results: tuple[Result, ...]
    margin: Margin
    norm: Choice | None = None
    noise: Choice | None = None
    refusal: str | None = None

    @property
    def baseline(self) -> Result:
        """The result without clip and noise."""
        return self.results[0]


def trial_run(run: Run, proxy: Path | None, population: int | None) -> Run:
    """Return the run that the trials are variants of: on the proxy corpus, if there is one.

    Args:
        run: The run to plan.
        proxy: The store of a proxy corpus, or None to tune on the run's own.
        population: The declared population of the proxy.

    Raises:
        InvalidValue: The run cannot be tuned; the proxy holds the run's own users; or the run has a budget, which
            tuning on its own users would exceed at once.
    """
    check_can_be_tuned(run)
    if (proxy is None) != (population is None):
        raise InvalidValue(
            "--corpus and --population go together: how many users the proxy has is declared, never counted."
        )
    if proxy is not None and population is not None:
        check_other_population(run, proxy)
        return on_proxy(run, proxy, population)
    if run.budget is not None:
        raise InvalidValue(
            f"The run file has a budget of ε = {run.budget.epsilon:g}, and tuning on its own users spends infinity: the baseline "
            "and the sweep of S have no noise. Tune on proxy text (--corpus PROXY --population N), or take the budget out."
        )
    return run


def run_stages(
    run: Run, grid: Grid, allowance: Allowance, out: Path, engine: EngineChoice = EngineChoice()
) -> Generator[Stage, None, TuningResult | None]:
    """Yield each stage for the caller to train, and continue when the next stage is requested.

    Args:
        run: The run that the trials are variants of (`trial_run`).
        grid: The values to try.
        allowance: What the choices may lose.
        out: The folder for the trials.
        engine: The engine that trains them.

    Returns:
        The result; None if the caller left a stage unfinished. The same call then continues with it.
    """
    check_can_be_tuned(run)
    out.mkdir(parents=True, exist_ok=True)
    trials: list[Trial] = []
    engine = replace(engine, corpus_part=None)  # trials run in one process; parts of a store are for the planned run

    def stage(title: str, new: Sequence[Trial]) -> Generator[Stage, None, bool]:
        """Yield the stage unless it is complete; return whether it is complete afterwards."""
        for trial in new:
            check_same(trial)  # complete trials too: their results would be taken for this run file's
        trials.extend(new)
        stage = Stage(title=title, trials=tuple(new), engine=engine, out=out)
        if stage.left:
            yield stage
        return not stage.left

    # The baseline and the clips do not depend on each other's results, so they are trained side by side.
    without_noise = [*baseline_trials(run, grid, out), *clip_trials(run, grid, out)]
    if not (yield from stage("Baseline, and clipping at each S, without noise", without_noise)):
        return None
    measured = results(trials)
    try:
        norm = choose_norm(measured[0], measured[1:], allowance.clip_loss, margin(measured))
    except InvalidValue as error:
        return _result(trials, measured, refusal=str(error))
    title = f"Noise sigma, at S = {norm.result.norm:g}"
    if not (yield from stage(title, noise_trials(run, grid, out, norm.result.norm))):
        return None
    measured = results(trials)
    noised = [result for result in measured if result.noise_std > 0]
    try:
        noise = choose_noise(measured[0], noised, allowance.loss, margin(measured))
    except InvalidValue as error:
        return _result(trials, measured, norm=norm, refusal=str(error))
    return _result(trials, measured, norm=norm, noise=noise)


def _result(trials: list[Trial], measured: list[Result], **chosen: Any) -> TuningResult:
    return TuningResult(trials=tuple(trials), results=tuple(measured), margin=margin(measured), **chosen)


def users_per_second(out: Path) -> float | None:
    """Return the user updates per second of the last stage that was trained, with its evaluations; None if unknown."""
    try:
        last: dict[str, Any] = json.loads((out / SPEED).read_text(encoding="utf-8").splitlines()[-1])
        return last["users"] / last["seconds"] if last["seconds"] > 0 else None
    except (OSError, ValueError, IndexError, KeyError, TypeError, RecursionError):
        return None  # the speed is only displayed
