"""Runs both audits on one trained run, and presents the result as sentences, as JSON and as a plot.

    result = audit_run(released, store, engine, name="first")
    result.record()           everything as strict JSON, with the sentences under "verdict"
    result.holds              False if the claimed epsilon is refuted
    result.write(folder, "first")    writes audit.json and scores.svg

`unheard audit` prints the sentences and writes both files.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unheard.audit.exposure import Exposure, exposures, memorized
from unheard.audit.one_run import BackgroundUsers, CanaryUsers, OneRunResult, audit_one_run
from unheard.corpus.canaries import has_canaries, read_canaries
from unheard.corpus.store import TokenStore
from unheard.engines.engine import Engine
from unheard.formatting import accountant_title, printable
from unheard.privacy.statement import plain
from unheard.randomness import SecureStreams, secure_generator
from unheard.run_folder import record_digest, replace_file
from unheard.training.initialise import (
    check_all_users_reachable,
    check_permission,
    parallel_map_of,
    population_ledger_of,
)
from unheard.training.released import Released

BINS = 60
"""The number of bars of each histogram of scores."""

Progress = Callable[[str, int, int], None]
"""A function that shows progress. It is called with the name of a step, the number of items done, and the total."""


def no_progress(step: str, done: int, total: int) -> None:
    """Do nothing. The default `progress` of `audit_run`."""


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """The results of both audits of a run.

    Attributes:
        exposures: The exposure of each phrase that was planted in the store; None if no phrase was planted.
        one_run: The result of the simulated run with canary users; None if it was skipped.
        run: The id of the audited run.
    """

    exposures: Sequence[Exposure] | None
    one_run: OneRunResult | None
    run: str | None = None

    @property
    def holds(self) -> bool:
        """Whether the claimed epsilon was not refuted. True if the one-run audit was skipped."""
        return self.one_run is None or self.one_run.holds

    def sentences(self) -> Iterator[str]:
        """Yield the results as lines of text, first of the planted phrases, then of the one-run audit."""
        if self.exposures is not None:
            yield from _about_exposures(self.exposures)
        if self.one_run is not None:
            yield from _about_one_run(self.one_run)

    def record(self) -> dict[str, Any]:
        """Return the result as JSON values without NaN or infinity. They are the content of `audit.json`."""
        results = self.exposures
        return plain(
            {
                "run": self.run,
                "verdict": list(self.sentences()),
                "exposure": None if results is None else [vars(result) for result in results],
                "learned_by_heart": None if results is None else [result.number for result in memorized(results)],
                "one_run": None if self.one_run is None else _one_run_record(self.one_run),
                "holds": self.holds,
            }
        )

    def write(self, folder: Path, title: str) -> None:
        """Write `audit.json`, and `scores.svg` if there was a one-run audit.

        Args:
            folder: An existing folder.
            title: The title of the plot.
        """
        record = self.record()
        content = {**record, "sha256": record_digest(record)}
        replace_file(folder / "audit.json", json.dumps(content, indent=2, allow_nan=False).encode())
        if plot := self.score_plot(title):
            replace_file(folder / "scores.svg", plot.encode())

    def score_plot(self, title: str) -> str | None:
        """Return an SVG with histograms of the scores of included and of excluded canaries.

        The more the two histograms overlap, the less the run reveals. Return None without a one-run audit.
        """
        if self.one_run is None:
            return None
        import vl_convert

        return vl_convert.vegalite_to_svg(json.dumps(_histograms(self.one_run, title)))


def audit_run(
    released: Released,
    store: Path,
    engine: Engine,
    *,
    name: str,
    canaries: int | None = None,
    rounds: int | None = None,
    candidates: int = 10_000,
    with_users: bool = False,
    skip_one_run: bool = False,
    allow_no_privacy: bool = False,
    progress: Progress = no_progress,
) -> AuditResult:
    """Rank the phrases that were planted in the store, if any, and simulate one run with canary users.

    Args:
        released: The model and run to audit.
        store: The folder of the run's store.
        engine: The engine that computes updates and log probabilities, in this process or on all ranks.
        name: The name of the run, for the population's ledger.
        canaries: The number of canary users; None for the default (`CanaryUsers.default_count`, at most 4,000).
        rounds: The number of simulated rounds; None for the rounds of the run.
        candidates: The number of random phrases that each planted phrase is ranked among.
        with_users: Whether the users of the store take part in the simulated run. They are charged for it.
        skip_one_run: Whether to skip the simulated run and only rank planted phrases.
        allow_no_privacy: Whether `with_users` is allowed for a run without noise, which makes the epsilon of its users
            infinite.
        progress: Called as the work proceeds.

    Returns:
        Both results.

    Raises:
        InvalidValue: A number is out of range.
        UnprovenCombination: `with_users` is set for a run with correlated noise.
        PrivacyError: `with_users` is set for a run without noise, and `allow_no_privacy` is not.
    """
    if with_users and not skip_one_run:
        # DP: an audit of a run without noise, in which its users take part, is itself a run without noise on them.
        check_permission(released.run, allow_no_privacy)
    ranked: list[Exposure] | None = None
    if has_canaries(store):
        planted = read_canaries(store, released.run.model.vocabulary_size)
        ranked = []
        for result in exposures(
            released.run.model,
            released.params_P,
            planted,
            secure_generator(),
            candidates=candidates,
            parallel_map=parallel_map_of(engine),
        ):
            ranked.append(result)
            progress("Ranking planted phrases", len(ranked), len(planted))
    if skip_one_run:
        return AuditResult(exposures=ranked, one_run=None, run=released.id)
    run, streams, background = released.run, SecureStreams(), None
    if with_users:
        opened = TokenStore.open(store)
        check_all_users_reachable(engine, opened)
        background = BackgroundUsers(run, opened, engine, streams, population_ledger_of(run, opened), name)
    count = canaries or CanaryUsers.default_count(run.model.layout)
    result = None
    for step in audit_one_run(run, streams, canaries=count, rounds=rounds, background=background):
        if isinstance(step, OneRunResult):
            result = step
        else:
            progress("One run with canary users", step, rounds or run.training.rounds)
    return AuditResult(exposures=ranked, one_run=result, run=released.id)


def _one_run_record(audit: OneRunResult) -> dict[str, Any]:
    """Return the result of the one-run audit as JSON values. A bound that does not exist is None."""
    return {
        "canaries": len(audit.score_M),
        "rounds": audit.rounds,
        "guesses": audit.guesses.count,
        "right": audit.guesses.correct,
        "epsilon_at_least": audit.bound,
        "bounds": [
            {
                "name": bound.name,
                "epsilon_at_least": None if math.isnan(bound.epsilon) else bound.epsilon,
                "assumptions": bound.assumptions,
            }
            for bound in audit.bounds
        ],
        "refuted_by": list(audit.refuted_by),
        "confidence": audit.confidence,
        "epsilon_estimate": audit.estimate if math.isfinite(audit.estimate) else str(audit.estimate),
        "epsilon_claimed": audit.claimed,
        "delta": audit.delta,
        "holds": audit.holds,
    }


def _about_exposures(results: Sequence[Exposure]) -> Iterator[str]:
    """Yield sentences that name the memorized phrases, or say that there are none."""
    learned = memorized(results)
    if learned:
        numbers = ", ".join(f"{r.number} (carried by {r.users}: {r.exposure:.1f} bits)" for r in learned[:10])
        yield f"Planted phrases: {len(learned)} of {len(results)} canaries were memorized: number {numbers}."
        yield f"(The largest exposure that this number of candidates can show is {learned[0].most:.1f} bits.)"
    else:
        yield f"Planted phrases: none of {len(results)} canaries is more exposed than chance explains."


def _about_one_run(audit: OneRunResult) -> Iterator[str]:
    """Yield the lower bounds of a one-run audit, and whether they refute the claim."""
    yield (
        f"One run: {audit.guesses.correct} of {audit.guesses.count} guesses about {len(audit.score_M)} canary users were right. "
        f"So epsilon is at least {audit.bound:.3g} at delta {audit.delta:.2g}, with {100 * audit.confidence:.0f} % confidence."
    )
    yield f"Lower bounds on epsilon at delta {audit.delta:.2g}, each with {100 * audit.confidence:.0f} % confidence:"
    for bound in audit.bounds:
        value = "-" if math.isnan(bound.epsilon) else f"{bound.epsilon:.3g}"
        yield f"  {bound.name:<18}{value:>6}   assumes: {bound.assumptions}"
    claimed = f"{audit.claimed:.3g} by {accountant_title(audit.accountant)}"
    if math.isinf(audit.claimed):
        yield "The run claims no guarantee (its epsilon is infinite), so there is no claim to refute."
    elif audit.holds:
        yield (
            f"The audit does not refute the upper bound, epsilon = {claimed} for the audited rounds at this delta. An audit "
            "can refute a bound but not prove it."
        )
        if audit.parametric.epsilon > audit.claimed:
            yield "The parametric bound is above the claim, as in one of 20 sound audits: repeat the audit."
        if "pure noise" in audit.parametric.reason:
            yield "If no users of the store took part, the noise is not what the plan says: look for the fault."
    else:
        yield (
            f"THE CLAIM IS REFUTED by the {' and the '.join(audit.refuted_by)} bound: {claimed} was claimed for these "
            "rounds. Release nothing of this run, and look for the fault. By chance this happens in fewer than 7 of 100 "
            "audits, so repeat the audit once."
        )


def _histograms(audit: OneRunResult, title: str) -> dict[str, Any]:
    """Return a Vega-Lite specification of the scores of included and excluded canaries."""
    low, high = float(audit.score_M.min()), float(audit.score_M.max())
    edges = np.linspace(low, high if high > low else low + 1.0, BINS + 1)
    rows = []
    for label, group_M in (("in the run", audit.included_M), ("not in it", ~audit.included_M)):
        counts = np.histogram(audit.score_M[group_M], bins=edges)[0]
        rows += [
            {"canaries": label, "from": float(a), "to": float(b), "count": int(n)}
            for a, b, n in zip(edges[:-1], edges[1:], counts, strict=True)
        ]
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        # The library that draws the plot ends the process at a control character.
        "title": {"text": printable(title), "subtitle": f"{len(audit.score_M)} canary users, {audit.rounds} rounds"},
        "width": 640,
        "height": 280,
        "data": {"values": rows},
        "mark": {"type": "bar", "opacity": 0.55},
        "encoding": {
            "x": {"field": "from", "type": "quantitative", "title": "score: evidence that this canary took part"},
            "x2": {"field": "to"},
            "y": {"field": "count", "type": "quantitative", "stack": None, "title": "canaries"},
            "color": {
                "field": "canaries",
                "type": "nominal",
                "scale": {"domain": ["in the run", "not in it"], "range": ["#c4491d", "#3a6ea5"]},
            },
        },
    }
