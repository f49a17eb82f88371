"""Events: what happened to the users' data, reduced to the numbers that its privacy cost depends on.

In: numbers that the mechanism decided (q, z). Out: frozen events, which the ledger keeps and the accountants read. An
event says nothing about the data: it can be written before anything is drawn.

    PoissonGaussian      one round: every user takes part with probability q, noise z   (paper: Algorithm 1, Theorem 1)
    Gaussian             one release in which every user takes part                     (private vocabulary)
    FailureProbability   with probability delta there is no guarantee                   (private vocabulary)
    NonPrivate           a release without noise: epsilon is infinite
    Selection            the best of a random number of runs                            (private tuning)

A round of Algorithm 1 is the sampled Gaussian mechanism with noise multiplier z (Mironov, Talwar and Zhang 2019). The
idea of events as data, separate from the accountants, is dp-accounting's `DpEvent`.

>>> to_record(PoissonGaussian(sampling_prob=0.01, noise_multiplier=1))
{'kind': 'poisson_gaussian', 'sampling_prob': 0.01, 'noise_multiplier': 1.0}
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
    """One round of training (paper: Algorithm 1).

    Args:
        sampling_prob: q, in (0, 1]: every user takes part with this probability, independently of all others.
        noise_multiplier: z, 0 or more: the standard deviation of the noise, in units of the sensitivity.

    Raises:
        InvalidValue: A value is out of range or no finite number.
    """

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
    """One release in which every user takes part, for example the counts of a private vocabulary.

    Args:
        noise_multiplier: z, 0 or more: the standard deviation of the noise, in units of the sensitivity.
    """

    noise_multiplier: float

    def __post_init__(self) -> None:
        _set_number(self, "noise_multiplier")
        require(self.noise_multiplier >= 0, f"noise_multiplier must be 0 or more, not {self.noise_multiplier}.")


@dataclass(frozen=True, kw_only=True)
class FailureProbability:
    """A release that with probability at most delta has no guarantee: the threshold of a private vocabulary.

    It costs what a (0, delta)-private release costs: delta for one user, and nothing else.

    Args:
        delta: In [0, 1].
    """

    delta: float

    def __post_init__(self) -> None:
        _set_number(self, "delta")
        require(0 <= self.delta <= 1, f"delta must be in [0, 1], not {self.delta}.")


@dataclass(frozen=True, kw_only=True)
class NonPrivate:
    """A release without noise: epsilon is infinite.

    Args:
        reason: Why there is no privacy; statements print it.
    """

    reason: str

    def __post_init__(self) -> None:
        require(isinstance(self.reason, str) and bool(self.reason.strip()), "reason must say why there is no privacy.")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The best of a random number of runs is released; nothing of the other runs is, nor their number.

    Literature: Papernot and Steinke, "Hyperparameter Tuning with Rényi Differential Privacy" (2022).

    Args:
        sampling_prob: q of every round of every run.
        noise_multiplier: z of every round of every run.
        rounds: The number of rounds of a run.
        mean_trials: The mean of the distribution that the number of runs is drawn from, at least 1.
        drawn_from: "geometric" (1, 2, ...) or "poisson" (0, 1, ...).
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

Counts = tuple[tuple[Event, int], ...]
"""Events and how often each happened, as the accountants take them."""

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
    """Turn an event into a plain dictionary, its kind first, as the ledger keeps it."""
    return {"kind": _KIND_OF[type(event)], **vars(event)}


def from_record(record: Mapping[str, Any]) -> Event:
    """Turn a record of the ledger back into its event.

    Raises:
        LedgerError: The kind or a key is unknown, a key is missing, or a value is out of range. The cost of such an
            event is unknown, so it is never skipped.
    """
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
    except InvalidValue as error:
        raise LedgerError(f"An event of kind '{kind}' cannot be: {error}") from None


def _set_number(event: Any, name: str) -> None:
    """Store the field as a plain finite float, so that 1 and 1.0 are one event and read back as they were written."""
    value = getattr(event, name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    require(is_number and math.isfinite(value), f"{name} must be a finite number, not {value!r}.")
    object.__setattr__(event, name, float(value))
