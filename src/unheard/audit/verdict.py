"""What an audit means, in plain words and as plain data.

In: exposures and the one-run audit, either of which may be missing. Out: sentences; a table for JSON; whether the claim survived.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from unheard.audit.exposure import Exposure, learned_by_heart
from unheard.audit.one_run import OneRunAudit
from unheard.privacy.statement import plain


def verdict(found: Sequence[Exposure] | None, audit: OneRunAudit | None) -> Iterator[str]:
    """One sentence or two for each part."""
    if found is not None:
        yield from _about_exposures(found)
    if audit is not None:
        yield from _about_one_run(audit)


def as_data(found: Sequence[Exposure] | None, audit: OneRunAudit | None) -> dict[str, Any]:
    return plain(
        {
            "verdict": list(verdict(found, audit)),
            "exposure": None if found is None else [vars(one) for one in found],
            "learned_by_heart": None if found is None else [one.number for one in learned_by_heart(found)],
            "one_run": None if audit is None else _one_run(audit),
            "holds": audit is None or audit.holds,
        }
    )


def _one_run(audit: OneRunAudit) -> dict[str, Any]:
    return {
        "canaries": len(audit.score_M),
        "rounds": audit.rounds,
        "guesses": audit.guesses.made,
        "right": audit.guesses.right,
        "epsilon_at_least": audit.bound,
        "confidence": audit.confidence,
        "epsilon_estimate": audit.estimate if math.isfinite(audit.estimate) else str(audit.estimate),
        "epsilon_claimed": audit.claimed,
        "delta": audit.delta,
        "holds": audit.holds,
    }


def _about_exposures(found: Sequence[Exposure]) -> Iterator[str]:
    learned = learned_by_heart(found)
    most = found[0].most if found else 0.0
    if learned:
        who = ", ".join(f"{one.number} (carried by {one.users}: {one.exposure:.1f} bits)" for one in learned[:10])
        yield f"Secrets: {len(learned)} of {len(found)} canaries were learned by heart: number {who}."
        yield f"(Among so many candidates {most:.1f} bits are the most that can be seen.)"
    else:
        yield f"Secrets: none of {len(found)} canaries is more exposed than chance explains."


def _about_one_run(audit: OneRunAudit) -> Iterator[str]:
    yield (
        f"One run: {audit.guesses.right} of {audit.guesses.made} guesses about {len(audit.score_M)} canary users were right. "
        f"So epsilon is at least {audit.bound:.3g} at delta {audit.delta:.2g}, with {100 * audit.confidence:.0f} % confidence."
    )
    if math.isinf(audit.claimed):
        yield "The run claims no guarantee (epsilon is infinite), and the audit is what that looks like."
    elif audit.holds:
        yield f"The claim of {audit.claimed:.3g} for these rounds stands: an audit can refute it, not prove it."
    else:
        yield (
            f"THE CLAIM IS REFUTED: {audit.claimed:.3g} was claimed for these rounds. Release nothing of this run, and look for "
            "the fault: by chance this happens less than once in 20 audits, so repeat it once."
        )
