"""How much of the paper is run: all of it, or a tiny version that shows in a minute that every recipe works on a corpus.

In: a run as the paper has it. Out: how many rounds, how many users a round, and what else is made smaller. No torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from reproduction.recipe import PaperRun
from unheard.config import nearest
from unheard.errors import InvalidValue


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes that every run shares."""

    name: str
    evaluate_every: int = 20
    held_out_tokens: int = 75_000
    """The paper's test set had 75,122."""
    checkpoint_every: int = 200
    most_rounds: int | None = None
    users_divided_by: int = 1
    users_from_to: tuple[int, int] = (1, 2**40)
    changes: tuple[str, ...] = ()
    """What else differs from the paper's setting."""

    def changed(self, changes: Sequence[str]) -> "Scale":
        """With more that differs from the paper's setting, in every run."""
        return replace(self, changes=(*self.changes, *changes))

    def rounds(self, run: PaperRun, cap: int | None = None) -> int:
        """How long a run is here; `cap` is what the person at the keyboard has time for."""
        return min(limit for limit in (run.rounds, self.most_rounds, cap) if limit is not None)

    def users(self, run: PaperRun, population: int | None = None) -> int:
        """Users a round. The tiny version takes what a small corpus has; the full one is as stated, or is not run."""
        if self.users_divided_by == 1:
            return run.users
        least, most = self.users_from_to
        return max(1, min(max(run.users // self.users_divided_by, least), most, population or most))

    def updates(self, run: PaperRun, rounds: int) -> int:
        """User updates of so many rounds: what time is measured in."""
        return rounds * self.users(run)


FULL = Scale(name="full")
SMOKE = Scale(
    name="smoke",
    evaluate_every=1,
    held_out_tokens=500,
    most_rounds=2,
    users_divided_by=50,
    users_from_to=(1, 3),
    changes=("model.embedding_size=8", "model.hidden_size=16"),
)
SCALES = {scale.name: scale for scale in (FULL, SMOKE)}


def scale_named(name: str) -> Scale:
    if name not in SCALES:
        raise InvalidValue(f"Unknown scale '{name}'.{nearest(name, SCALES)}")
    return SCALES[name]
