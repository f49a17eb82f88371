"""How many trials a selection makes: drawn by the tool itself, secretly, by the object that says what that is worth.

In: a mean and a distribution. Out: a number for the tool alone, and the event that is charged. The bound (Papernot and Steinke
2022, "Hyperparameter Tuning with Renyi Differential Privacy"; Liu and Talwar 2019 for pure epsilon) is for a number that nobody
chose and nobody sees.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unheard.errors import InvalidValue, UnprovenCombination
from unheard.parts import require
from unheard.privacy.events import PoissonGaussian, Selection
from unheard.training.run import Run


@dataclass(frozen=True, kw_only=True)
class TrialCount:
    """A random number of trials: geometric (1, 2, ...; at least one model) or Poisson (0, 1, ...; perhaps none)."""

    mean: float
    drawn_from: str = "geometric"

    def __post_init__(self) -> None:
        require(1 <= self.mean <= 1000, f"the mean number of trials must be from 1 to 1000, not {self.mean:g}.")
        require(
            self.drawn_from in ("geometric", "poisson"),
            f"trials can be drawn from 'geometric' or 'poisson', not {self.drawn_from!r}.",
        )

    def draw(self, rng: np.random.Generator) -> int:
        """Only a secure generator may be given here: whoever could foresee the number would know what the bound hides."""
        # DP: the mean and the distribution are those of the event below.
        return int(rng.geometric(1 / self.mean) if self.drawn_from == "geometric" else rng.poisson(self.mean))

    def event(self, candidates: Sequence[Run]) -> Selection:
        """What the whole selection costs: all candidates must have one privacy curve, for any of them may be drawn."""
        one = _only_event(candidates[0])
        for run in candidates:
            # DP: the bound is about repeating one mechanism. A candidate with less noise or more rounds is another one.
            if (_only_event(run), run.training.rounds) != (one, candidates[0].training.rounds):
                raise UnprovenCombination(
                    "The candidates of a selection must all cost the same: one q, one z and one number of rounds. Vary what does "
                    "not change them (clip.norm with noise_multiplier, update.learning_rate, server ...)."
                )
        return Selection(
            sampling_prob=one.sampling_prob,
            noise_multiplier=one.noise_multiplier,
            rounds=candidates[0].training.rounds,
            mean_trials=self.mean,
            drawn_from=self.drawn_from,
        )


def check_candidates(candidates: Sequence[Run]) -> None:
    """Candidates differ in what one user's update or the server does with it; in nothing that the account is about."""
    if not candidates:
        raise InvalidValue("There are no candidates to select from.")
    first = candidates[0]
    for run in candidates:
        if run.training.reproducible_seed is not None:
            raise UnprovenCombination(
                "A selection with a reproducible_seed proves nothing: its trials could be foreseen. Take the seed out."
            )
        alike = ("corpus", "ledger", "model", "training", "evaluation", "budget", "claimed_delta")
        odd = [name for name in alike if getattr(run, name) != getattr(first, name)]
        if odd or run.plan.population != first.plan.population:
            raise InvalidValue(
                f"All candidates of a selection have the same {', '.join(odd) or 'population'}: vary the update, the clip or the "
                "server."
            )


def _only_event(run: Run) -> PoissonGaussian:
    events = {plan.event() for _, plan in run.plan.phases(run.model.layout)}
    event = events.pop()
    if events or not isinstance(event, PoissonGaussian):
        raise UnprovenCombination(
            "A selection is among private runs whose rounds all cost the same: Poisson sampling, a clip, Gaussian noise, and no "
            "schedule that changes z."
        )
    return event
