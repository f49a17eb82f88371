"""What happened to the users' data, in the few words that its privacy cost depends on.

In: numbers that the mechanism decided (q, z). Out: frozen events, which the ledger keeps and the accountants read.
Paper: a round of Algorithm 1 is the sampled Gaussian mechanism with noise scale z (Theorem 1).
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unheard.config import nearest, require
from unheard.errors import InvalidValue, LedgerError


@dataclass(frozen=True, kw_only=True)
class PoissonGaussian:
    """One round: every user takes part with probability q; the noise has z times the sensitivity as its deviation."""

    sampling_prob: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        _set_number(self, "sampling_prob")
        _set_number(self, "noise_multiplier")
        # DP: a probability above 1 or a negative z would be accounted as something that cannot have happened.
        require(0 < self.sampling_prob <= 1, f"sampling_prob must be in (0, 1], not {self.sampling_prob}.")
        require(self.noise_multiplier >= 0, f"noise_multiplier must be 0 or more, not {self.noise_multiplier}.")


@dataclass(frozen=True, kw_only=True)
class Gaussian:
    """One release in which everybody takes part (vocabulary discovery); noise of z times the sensitivity."""

    noise_multiplier: float

    def __post_init__(self) -> None:
        _set_number(self, "noise_multiplier")
        require(self.noise_multiplier >= 0, f"noise_multiplier must be 0 or more, not {self.noise_multiplier}.")


@dataclass(frozen=True, kw_only=True)
class FailureProbability:
    """With probability at most delta the guarantee fails outright (the threshold of private vocabulary discovery).

    It costs what a (0, delta)-private release costs: delta for one user, and nothing else.
    """

    delta: float

    def __post_init__(self) -> None:
        _set_number(self, "delta")
        require(0 <= self.delta <= 1, f"delta must be in [0, 1], not {self.delta}.")


@dataclass(frozen=True, kw_only=True)
class NonPrivate:
    """Something was released without noise: epsilon is infinite. The reason is for people."""

    reason: str

    def __post_init__(self) -> None:
        require(isinstance(self.reason, str) and bool(self.reason.strip()), "reason must say why there is no privacy.")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The best of a random number of runs, each of so many rounds at q and z, is released; of the others nothing, nor their number.

    The number is drawn from a geometric distribution (1, 2, ...) or a Poisson distribution (0, 1, ...) with this mean.
    """

    sampling_prob: float
    noise_multiplier: float
    rounds: int
    mean_trials: float
    drawn_from: str

    def __post_init__(self) -> None:
        for name in ("sampling_prob", "noise_multiplier", "mean_trials"):
            _set_number(self, name)
        require(0 < self.sampling_prob <= 1, f"sampling_prob must be in (0, 1], not {self.sampling_prob}.")
        require(self.noise_multiplier >= 0, f"noise_multiplier must be 0 or more, not {self.noise_multiplier}.")
        is_whole = isinstance(self.rounds, int) and not isinstance(self.rounds, bool)
        require(is_whole and self.rounds >= 1, f"rounds must be a whole number from 1 up, not {self.rounds!r}.")
        # DP: the bound is for a mean of at least 1, and for these two distributions.
        require(self.mean_trials >= 1, f"mean_trials must be at least 1, not {self.mean_trials}.")
        require(
            self.drawn_from in ("geometric", "poisson"),
            f"drawn_from must be 'geometric' or 'poisson', not {self.drawn_from!r}.",
        )


Event = PoissonGaussian | Gaussian | FailureProbability | NonPrivate | Selection

KINDS: dict[str, type] = {
    "poisson_gaussian": PoissonGaussian,
    "gaussian": Gaussian,
    "failure_probability": FailureProbability,
    "non_private": NonPrivate,
    "selection": Selection,
}
_KIND_OF = {cls: kind for kind, cls in KINDS.items()}
_FIELDS = {kind: {f.name for f in dataclasses.fields(cls)} for kind, cls in KINDS.items()}


def to_record(event: Event) -> dict[str, Any]:
    """The event as a plain table, its kind first."""
    return {"kind": _KIND_OF[type(event)], **vars(event)}


def from_record(record: Mapping[str, Any]) -> Event:
    """The event that a table of the ledger stands for; anything unknown in it is refused, since its cost is unknown."""
    if not isinstance(record, Mapping):
        raise LedgerError(f"An event must be a table with a 'kind', not {record!r}.")
    kind = record.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        # DP: an event that this version does not know has an unknown cost; to skip it would be to under-count.
        raise LedgerError(
            f"Unknown event kind {kind!r}.{nearest(str(kind), KINDS)} Read it with the version that wrote it."
        )
    values = {key: value for key, value in record.items() if key != "kind"}
    if values.keys() != _FIELDS[kind]:
        odd = ", ".join(sorted(values.keys() ^ _FIELDS[kind]))
        raise LedgerError(f"An event of kind '{kind}' has exactly the keys {sorted(_FIELDS[kind])}; check: {odd}.")
    try:
        return KINDS[kind](**values)
    except InvalidValue as refusal:
        raise LedgerError(f"An event of kind '{kind}' cannot be: {refusal}") from None


def _set_number(event: Any, name: str) -> None:
    """Store the field as a plain finite float, so that 1 and 1.0 are one event and read back as they were written."""
    value = getattr(event, name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    require(is_number and math.isfinite(value), f"{name} must be a finite number, not {value!r}.")
    object.__setattr__(event, name, float(value))
