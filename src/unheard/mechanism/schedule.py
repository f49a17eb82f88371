"""What changes during training, fixed before it begins.

In: a list of changes, each from a stated round on. Out: for any round, the changes in force. A schedule chosen from private
results would need a proof of its own; this one cannot see any.
Where in the paper: section 3, "Adjusting noise and clipping as training progresses".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from unheard.config import require, require_positive
from unheard.errors import InvalidValue


@dataclass(frozen=True, kw_only=True)
class Change:
    """From this round on (the first round is 0): another S, sigma, z or eta. What is left out stays as it was."""

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
    """Changes as a schedule: strictly increasing rounds."""
    for before, after in pairwise(changes):
        if after.from_round <= before.from_round:
            raise InvalidValue(
                f"[[schedule]] from_round = {after.from_round} stands after {before.from_round}: list changes by increasing round."
            )
    return tuple(changes)
