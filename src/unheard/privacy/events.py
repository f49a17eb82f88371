"""Events: what happened to the users' data, reduced to the numbers that its privacy cost depends on.

In: numbers that the mechanism decided (q, z). Out: frozen events, which the ledger keeps and the accountants read. An
event says nothing about the data: it can be written before anything is drawn.

    PoissonGaussian      one round: every user takes part with probability q, noise z   (paper: Algorithm 1, Theorem 1)
    ExampleGaussian      one round: every example is drawn with probability q, noise z  (Charles et al. 2024)
    DistributedGaussian  the same with noise that the nodes add, so that it also hides users from the server
    CorrelatedGaussian   one round with correlated noise; the first of a block of rounds costs, the others nothing
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
from collections.abc import Iterable, Mapping
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
        _check_sampling_and_noise(self)


@dataclass(frozen=True, kw_only=True)
class ExampleGaussian:
    """One round in which examples are drawn, not users; the guarantee is still for a user with all their examples.

    A user has at most G examples, and each is drawn with probability q, so the number that is drawn is at most a
    binomial variable. If i of them are drawn, the user moves the sum by at most i times the bound of one example: the
    round is a mixture of Gaussian mechanisms with sensitivities 0 to G (Charles et al., "Fine-Tuning Large Language
    Models with User-Level Differential Privacy", 2024; Choquette-Choo et al. 2024 for the mixture). Only PLD bounds it.

    Args:
        sampling_prob: q, in (0, 1]: every example is drawn with this probability, independently of all others.
        examples_per_user: G, from 1 to 4096: the largest number of examples of one user.
        noise_multiplier: z, 0 or more: the standard deviation of the noise, in units of the bound of one example.

    Raises:
        InvalidValue: A value is out of range or no finite number.
    """

    sampling_prob: float
    examples_per_user: int
    noise_multiplier: float

    def __post_init__(self) -> None:
        _check_sampling_and_noise(self)
        is_whole = isinstance(self.examples_per_user, int) and not isinstance(self.examples_per_user, bool)
        require(
            is_whole and 1 <= self.examples_per_user <= 4096,
            f"examples_per_user must be a whole number from 1 to 4096, not {self.examples_per_user!r}.",
        )


@dataclass(frozen=True, kw_only=True)
class DistributedGaussian(PoissonGaussian):
    """One round whose noise the nodes add before secure aggregation (mechanism/noise.py).

    Against readers of the models it costs what `PoissonGaussian` costs. The server knows who was drawn, so against the
    server it costs what `Gaussian` costs (`against_server`).

    Args:
        sampling_prob: q, as in `PoissonGaussian`.
        noise_multiplier: z of the noise of `min_parties` nodes together.
        min_parties: The smallest number of nodes whose sum is ever seen.
    """

    min_parties: int

    def __post_init__(self) -> None:
        super().__post_init__()
        is_whole = isinstance(self.min_parties, int) and not isinstance(self.min_parties, bool)
        require(is_whole and self.min_parties >= 1, f"min_parties must be at least 1, not {self.min_parties!r}.")


@dataclass(frozen=True, kw_only=True)
class CorrelatedGaussian:
    """One round with correlated noise (docs/correlated-noise.md).

    The rounds of a mechanism are numbered from 0, rounds that a crash made void included. Rounds j * block to
    (j + 1) * block - 1 are together one release of noise multiplier z, in which every user takes part with probability
    q at most once. The first of them is charged for all; the others cost nothing.

    Args:
        sampling_prob: q, in (0, 1]: of the users whose turn it is. 1 if no sampling is assumed.
        noise_multiplier: z, 0 or more: the noise of C X + z, in units of its sensitivity.
        block: The number of rounds that one charge covers: b groups, or all T rounds of a BLT mechanism.
        index: The number of the round in its mechanism, from 0.
    """

    sampling_prob: float
    noise_multiplier: float
    block: int
    index: int

    def __post_init__(self) -> None:
        _check_sampling_and_noise(self)
        for name, least in (("block", 1), ("index", 0)):
            value = getattr(self, name)
            require(type(value) is int and value >= least, f"{name} must be a whole number from {least} up.")


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
        _check_sampling_and_noise(self)
        _set_number(self, "mean_trials")
        is_whole = isinstance(self.rounds, int) and not isinstance(self.rounds, bool)
        require(is_whole and self.rounds >= 1, f"rounds must be a whole number from 1 up, not {self.rounds!r}.")
        # DP: the bound is for a mean of at least 1, and for these two distributions.
        require(self.mean_trials >= 1, f"mean_trials must be at least 1, not {self.mean_trials}.")
        require(
            self.drawn_from in ("geometric", "poisson"),
            f"drawn_from must be 'geometric' or 'poisson', not {self.drawn_from!r}.",
        )


Event = (
    PoissonGaussian
    | ExampleGaussian
    | DistributedGaussian
    | CorrelatedGaussian
    | Gaussian
    | FailureProbability
    | NonPrivate
    | Selection
)

Counts = tuple[tuple[Event, int], ...]
"""Events and how often each happened, as the accountants take them."""

KINDS: dict[str, type] = {
    "poisson_gaussian": PoissonGaussian,
    "example_gaussian": ExampleGaussian,
    "distributed_gaussian": DistributedGaussian,
    "correlated_gaussian": CorrelatedGaussian,
    "gaussian": Gaussian,
    "failure_probability": FailureProbability,
    "non_private": NonPrivate,
    "selection": Selection,
}
_KIND_OF = {cls: kind for kind, cls in KINDS.items()}
_FIELDS = {kind: {f.name for f in dataclasses.fields(cls)} for kind, cls in KINDS.items()}


def has_rounds(events: Iterable[Event]) -> bool:
    """Whether users' text has trained a model in these events. A vocabulary alone is no round."""
    return any(not isinstance(event, Gaussian | FailureProbability) for event in events)


def accounted(event: Event) -> Event | None:
    """The event that the accountants charge for: itself, or for a round with correlated noise its block's release.

    Returns:
        None for a round that its block's first round has paid for.

    >>> rounds = [CorrelatedGaussian(sampling_prob=0.2, noise_multiplier=1, block=3, index=i) for i in range(4)]
    >>> [accounted(event) is not None for event in rounds]
    [True, False, False, True]
    """
    if not isinstance(event, CorrelatedGaussian):
        return event
    # DP: the first round of each block pays for the block: ceil(t / b) charges after t rounds, never fewer.
    if event.index % event.block:
        return None
    q, z = event.sampling_prob, event.noise_multiplier
    return Gaussian(noise_multiplier=z) if q == 1 else PoissonGaussian(sampling_prob=q, noise_multiplier=z)


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


def against_server(event: Event) -> Event:
    """The same event as the server of a federated run sees it, which knows who was drawn.

    >>> against_server(DistributedGaussian(sampling_prob=0.01, noise_multiplier=2.0, min_parties=10))
    Gaussian(noise_multiplier=2.0)
    """
    if isinstance(event, DistributedGaussian):
        # DP: against someone who knows the cohort there is no amplification by sampling.
        return Gaussian(noise_multiplier=event.noise_multiplier)
    if isinstance(event, PoissonGaussian | ExampleGaussian | CorrelatedGaussian | Selection):
        return NonPrivate(reason="the server adds the noise itself")
    return event


def _check_sampling_and_noise(event: Any) -> None:
    """Check q and z of an event."""
    _set_number(event, "sampling_prob")
    _set_number(event, "noise_multiplier")
    # DP: a probability above 1 or a negative z would be accounted as something that cannot have happened.
    require(0 < event.sampling_prob <= 1, f"sampling_prob must be in (0, 1], not {event.sampling_prob}.")
    require(event.noise_multiplier >= 0, f"noise_multiplier must be 0 or more, not {event.noise_multiplier}.")


def _set_number(event: Any, name: str) -> None:
    """Store the field as a plain finite float, so that 1 and 1.0 are one event and read back as they were written."""
    value = getattr(event, name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    require(is_number and math.isfinite(value), f"{name} must be a finite number, not {value!r}.")
    object.__setattr__(event, name, float(value))
