"""The schedule: changes of S, sigma, z or eta during training, fixed before it begins.

In the paper: section 3, "Adjusting noise and clipping as training progresses". A schedule that is chosen from private
results would need a proof of its own; this one is declared in the run file and cannot depend on any.

    >>> Change(from_round=100, clip_norm=10.0).clip_norm
    10.0
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from unheard.config import require, require_positive
from unheard.errors import InvalidValue


@dataclass(frozen=True, kw_only=True)
class Change:
    """New values from a round on. What is left out keeps its value.

    Args:
        from_round: the first round with the new values; the first round of training is 0.
        clip_norm: S.
        noise_std: sigma.
        noise_multiplier: z, instead of `noise_std`.
        learning_rate: eta of the user's local steps.

    Raises:
        InvalidValue: if nothing changes, both kinds of noise are given, or a number is out of range.
    """

    from_round: int
    clip_norm: float | None = None
    noise_std: float | None = None
    noise_multiplier: float | None = None
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        require(
            self.from_round >= 1,
            "from_round must be at least 1; what holds from round 0 is set in the parts themselves.",
        )
        require(
            self.noise_std is None or self.noise_multiplier is None, "give noise_std or noise_multiplier, not both."
        )
        given = (self.clip_norm, self.noise_std, self.noise_multiplier, self.learning_rate)
        require(any(v is not None for v in given), "a change must change something.")
        for value in given:
            require_positive(**{"every value": value})


def in_order(changes: Sequence[Change]) -> tuple[Change, ...]:
    """The changes as a tuple; raises `InvalidValue` unless their rounds strictly increase."""
    for before, after in pairwise(changes):
        if after.from_round <= before.from_round:
            raise InvalidValue(
                f"[[schedule]] from_round = {after.from_round} stands after {before.from_round}: list changes by increasing round."
            )
    return tuple(changes)
