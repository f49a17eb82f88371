"""Who sums the cohorts: an engine for one run, or one engine for several runs side by side.

In: the rounds of runs, which ask for sums. Out: their reports. Runs that go together share nothing but the engine's chunks: each
has its own model, sampling, noise and ledger, and goes as it would alone.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

from unheard.engines.engine import Cohort, Engine
from unheard.mechanism.values import CohortSum


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """What may be shown after a round. Nothing in it depends on users except through the noise, or on held-out users."""

    round: int
    rounds: int
    epsilon: float
    delta: float
    metrics: dict[str, float] | None = None
    """Held-out evaluation, on the rounds that have one."""
    stopped: str | None = None
    """Why training ended before its last round, if it did."""


Rounds = Generator[Cohort | RoundReport, CohortSum | None, None]
"""Rounds of a run: yields a cohort and is sent its sum, or yields a report and is sent nothing."""


def alone(rounds: Rounds, engine: Engine) -> Iterator[RoundReport]:
    """The reports of one run."""
    for _, report in side_by_side([rounds], engine):
        yield report


def side_by_side(runs: Sequence[Rounds], engine: Engine) -> Iterator[tuple[int, RoundReport]]:
    """Reports of several runs, each with the run's place. Every turn sums a cohort of each run that has not ended, in one call; and
    reports come when all have learned from theirs, so that whoever leaves at one leaves no round half done."""
    going = dict(enumerate(runs))
    try:
        while going:
            cohorts: dict[int, Cohort] = {}
            reports: list[tuple[int, RoundReport]] = []
            for place, run in list(going.items()):
                match next(run, None):
                    case None:
                        del going[place]
                    case Cohort() as cohort:
                        cohorts[place] = cohort
                    case last_word:
                        reports.append((place, last_word))
            sums = engine.sum_cohorts(list(cohorts.values())) if cohorts else []
            for place, total in zip(cohorts, sums, strict=True):
                report = going[place].send(total)
                assert isinstance(report, RoundReport)
                reports.append((place, report))
            yield from reports
    finally:
        # However we are left: each run saves its state.
        for run in runs:
            run.close()
