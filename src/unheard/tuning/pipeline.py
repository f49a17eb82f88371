"""Runs the two stages of a tuning: baseline and clip trials, then noise trials at the chosen S.

`run_stages` is a generator. It yields each stage, so that the caller can train it and show progress. It chooses S
between the stages and sigma at the end, and returns a `TuningResult`. The trials are run folders, so a tuning that was
stopped continues from their checkpoints.

    run = trial_run(run, proxy, population)
    stages = run_stages(run, grid, allowance, out, engine)
    # for each stage: for index, report in stage.reports(): ...

**The choice** is the smallest S, and then the largest sigma, that cost little accuracy. The private run needs a number
of users per round that is proportional to S / sigma, so a small S and a large sigma make privacy cheap. Both are chosen
by their loss against the baseline, so the allowance for sigma is the total loss of the private model, clip included.
The paper chooses in the same way (section 3): "choosing S in [10, 20] has at most a small effect", "a small decrease
past sigma = 0.012"."""

import json
import math
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unheard import storage
from unheard.engines.choice import EngineChoice
from unheard.errors import InvalidValue, RunFolderError
from unheard.run_folder import RunFolder
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
        loss: Its loss against the baseline, in percentage points of AccuracyTop1.
        remarks: Sentences that say why the choice may be uncertain, for the user to read.
    """

    result: Result
    loss: float
    remarks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Parameter:
    """How messages name S or sigma.

    Attributes:
        symbol: The symbol.
        grid_option: The option that sets the values to try.
        allowance_option: The option that sets the accuracy that may be lost.
        beyond_the_grid: A description of the values beyond the edge of the grid that is best for privacy.
    """

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
        InvalidValue: Every S loses `allowed` points or more.
    """
    return _first_allowed(sorted(clipped, key=lambda result: result.norm), baseline, allowed, margin, _NORM)


def choose_noise(baseline: Result, noised: Sequence[Result], allowed: float, margin: Margin) -> Choice:
    """Choose the largest sigma that loses less than `allowed` points against the baseline.

    Args:
        baseline: The result without clip and noise.
        noised: The results of each sigma, all with the chosen S.
        allowed: The allowance for clip and noise together, in percentage points of AccuracyTop1.
        margin: How far two results may differ by chance; it only adds remarks.

    Raises:
        InvalidValue: Every sigma loses `allowed` points or more.
    """
    return _first_allowed(sorted(noised, key=lambda result: -result.noise_std), baseline, allowed, margin, _NOISE)


def _first_allowed(
    ordered: Sequence[Result], baseline: Result, allowed: float, margin: Margin, parameter: _Parameter
) -> Choice:
    """Choose the first result that loses less than `allowed` points against the baseline.

    Args:
        ordered: The results, the best setting for privacy first.
        baseline: The result without clip and noise.
        allowed: The allowance in percentage points of AccuracyTop1.
        margin: How far two results may differ by chance; it only adds remarks.
        parameter: How messages name the parameter.

    Raises:
        InvalidValue: Every result loses `allowed` points or more.
    """
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
            f"{chosen.name} costs {loss:+.2f} points, and {allowed:g} are allowed: the difference is within noise, and another "
            "repetition could choose another value."
        )
    if index > 0 and margin.hides(losses[index - 1] - allowed):
        remarks.append(
            f"{ordered[index - 1].name} was rejected for a loss of {losses[index - 1]:.2f} points: its difference from "
            f"{allowed:g} is within noise too."
        )
    return Choice(result=chosen, loss=loss, remarks=tuple(remarks))


SPEED = "speed.jsonl"
"""The file in the folder of a tuning to which each trained stage appends its number of users and its seconds."""


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """The accuracy that the private model may lose against the baseline, in percentage points of AccuracyTop1.

    Attributes:
        clip_loss: The loss due to the clip alone. The smallest S that loses less is chosen.
        loss: The loss due to clip and noise together. The largest sigma that loses less is chosen.

    Raises:
        InvalidValue: A value is not finite.
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
        title: A description of the stage, for printing.
        trials: All trials of the stage, complete or not.
        engine: The engine that trains them.
        out: The folder of the tuning.
    """

    title: str
    trials: tuple[Trial, ...]
    engine: EngineChoice
    out: Path

    @property
    def left(self) -> list[Trial]:
        """The trials that are not complete, read from their run folders at each access."""
        return [trial for trial in self.trials if not trial.is_complete()]

    def reports(self) -> Generator[tuple[int, RoundReport], None, None]:
        """Train the trials that are left, and append the speed to `speed.jsonl`.

        The caller must have asked for permission to train without privacy, since some trials have no noise.

        Yields:
            The index of a trial in `left` (as `left` was before the call), and the report of one of its rounds.
        """
        left = self.left
        runs = [(trial.run, trial.folder) for trial in left]
        # Every sweep has trials without noise, so `unheard tune` asks for this permission before it starts.
        rounds = train_together(runs, engine=self.engine, allow_no_privacy=True)
        start, reported, timed_rounds = 0.0, set(), 0
        try:
            for index, report in rounds:
                if not reported:
                    start = time.monotonic()  # start after the first round, which includes compilation
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
        noise: The chosen sigma; None if every sigma lost too much, or if no S was chosen.
        refusal: The reason why S or sigma was not chosen; None if both were chosen.
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
    """Return the run whose variants are the trials: the given run, moved to the proxy corpus if there is one.

    Args:
        run: The run to tune.
        proxy: The store of a proxy corpus; None to tune on the run's own users.
        population: The declared population of the proxy; None without a proxy.

    Raises:
        InvalidValue: The run cannot be tuned; only one of `proxy` and `population` is given; the proxy holds the run's
            own users; or the run has a budget and no proxy, and the first trial would exceed the budget.
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
            f"The run file has a budget of ε = {run.budget.epsilon:g}, and tuning on its own users has an infinite epsilon: the "
            "baseline and the sweep of S have no noise. Tune on proxy text (--corpus PROXY --population N), or remove "
            "budget_epsilon."
        )
    return run


def run_stages(
    run: Run, grid: Grid, allowance: Allowance, out: Path, engine: EngineChoice = EngineChoice()
) -> Generator[Stage, None, TuningResult | None]:
    """Yield each stage that is not complete. The caller trains it (`Stage.reports`) before it requests the next stage.

    Args:
        run: The run whose variants are the trials (`trial_run`).
        grid: The values to try.
        allowance: How much accuracy the choices may lose.
        out: The folder for the trials.
        engine: The engine that trains them.

    Returns:
        The result of the tuning; None if the caller did not finish a stage. In that case, call again to continue.

    Raises:
        InvalidValue: The run cannot be tuned.
        RunFolderExists: `out` holds trials of another run, or of the same run on another corpus.
        RunFolderError: A trial that was trained to its end has lost its evaluations, or a file is a pipe or a device.
    """
    check_can_be_tuned(run)
    out.mkdir(parents=True, exist_ok=True)
    if special := storage.special_file(out):
        raise RunFolderError(f"{special} is not a regular file. Delete it, or tune into another folder.")
    trials: list[Trial] = []
    engine = replace(engine, corpus_part=None)  # trials run in one process, which needs the whole store

    def stage(title: str, new: Sequence[Trial]) -> Generator[Stage, None, bool]:
        """Yield the stage unless it is complete; return whether it is complete afterwards."""
        for trial in new:
            RunFolder(trial.folder).check_files()
            check_same(trial)  # also complete trials: otherwise the results of another run would be used
        trials.extend(new)
        stage = Stage(title=title, trials=tuple(new), engine=engine, out=out)
        if stage.left:
            yield stage
        for trial in stage.left:
            # A run folder begins with a checkpoint, so `saved_round` is that of the trial.
            if RunFolder(trial.folder).saved_round >= trial.run.training.rounds:
                raise RunFolderError(
                    f"{trial.folder} is trained to its last round, but lacks the evaluation of it in metrics.jsonl. Put "
                    "the file back, or delete the folder: the trial is then trained, and charged, again."
                )
        return not stage.left

    # No trial without noise depends on the result of another, so all of them are trained side by side.
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
    """Return the user updates per second of the stage that was trained last; None if unknown.

    The time of the stage includes its evaluations.
    """
    try:
        last: dict[str, Any] = json.loads((out / SPEED).read_text(encoding="utf-8").splitlines()[-1])
        return last["users"] / last["seconds"] if last["seconds"] > 0 else None
    except (OSError, ValueError, IndexError, KeyError, TypeError, RecursionError):
        return None  # the speed is only displayed, so a damaged file is not an error
