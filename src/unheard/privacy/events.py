"""Events: what was done to the users' data, as the numbers that the privacy cost depends on.

Input: numbers that the mechanism fixes (q, z). Output: frozen events, which the ledger stores and the accountants read.
An event does not depend on the data, so it can be written before a cohort is drawn. `RoundPlan.event` creates the
events of rounds (mechanism/plan.py). `NoiseLevel` compares the noise of a round with the update of one user; it says
what the noise does to training and has no part in the privacy cost.

    PoissonGaussian      one round: every user takes part with probability q, noise z   (paper: Algorithm 1, Theorem 1)
    ExampleGaussian      one round: every example is drawn with probability q, noise z  (Charles et al. 2024)
    DistributedGaussian  one round whose noise the nodes add, so that it also hides users from the server
    CorrelatedGaussian   one round with correlated noise; the first round of a block is charged, the others are free
    Gaussian             one release in which every user takes part                     (private vocabulary)
    FailureProbability   with probability delta there is no guarantee                   (private vocabulary)
    NonPrivate           a release without noise: epsilon is infinite
    Selection            the best of a random number of runs                            (private tuning)

A round of Algorithm 1 is the sampled Gaussian mechanism with noise multiplier z (Mironov, Talwar and Zhang 2019).
Events are data, separate from the accountants, as in dp-accounting's `DpEvent`.

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

LARGEST_NUMBER, SMALLEST_Q = 1e100, 1e-300
"""The largest number and the smallest sampling probability of an event. Accountants square numbers and divide by them,
which float64 cannot do for numbers far beyond these."""
FREE_RATIO, COSTLY_RATIO, DOMINANT_RATIO = 0.25, 1.0, 5.0
"""Limits of `NoiseLevel.ratio`; the docstring of `NoiseLevel` says where they come from."""


@dataclass(frozen=True, kw_only=True)
class PoissonGaussian:
    """One round of training (paper: Algorithm 1).

    Args:
        sampling_prob: q, in (0, 1]: every user takes part with this probability, independently of all others.
        noise_multiplier: z, 0 or more: the standard deviation of the noise, in units of the sensitivity.

    Raises:
        InvalidValue: A value is out of range or not a finite number.
    """

    sampling_prob: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        _check_sampling_and_noise(self)


@dataclass(frozen=True, kw_only=True)
class ExampleGaussian:
    """One round in which examples are drawn, not users. The guarantee is still for a user with all their examples.

    A user has at most G examples, and each is drawn with probability q, so the number of the user's examples that are
    drawn is at most a binomial variable. If i of them are drawn, the user moves the sum by at most i times the bound of
    one example. The round is therefore a mixture of Gaussian mechanisms with sensitivities 0 to G (Charles et al.,
    "Fine-Tuning Large Language Models with User-Level Differential Privacy", 2024; Choquette-Choo et al. 2024 for the
    mixture). Only the accountant `pld` has a bound for it.

    Args:
        sampling_prob: q, in (0, 1]: every example is drawn with this probability, independently of all others.
        examples_per_user: G, from 1 to 4096: the largest number of examples of one user.
        noise_multiplier: z, 0 or more: the standard deviation of the noise, in units of the bound of one example.

    Raises:
        InvalidValue: A value is out of range or not a finite number.
    """

    sampling_prob: float
    examples_per_user: int
    noise_multiplier: float

    def __post_init__(self) -> None:
        _check_sampling_and_noise(self)
        _check_whole(self, "examples_per_user", 1, 4096)


@dataclass(frozen=True, kw_only=True)
class DistributedGaussian(PoissonGaussian):
    """One round whose noise the nodes add before secure aggregation (mechanism/noise.py).

    Against a reader of the models the round costs as much as a `PoissonGaussian`. The server knows which users were
    drawn, so against the server the round costs as much as a `Gaussian` (`against_server`).

    Args:
        sampling_prob: q, as in `PoissonGaussian`.
        noise_multiplier: z of the sum of the noise of `min_parties` nodes.
        min_parties: The smallest number of nodes whose sum the server can see. A sum over fewer nodes is never opened.
    """

    min_parties: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_whole(self, "min_parties", 1)


@dataclass(frozen=True, kw_only=True)
class CorrelatedGaussian:
    """One round with correlated noise (docs/correlated-noise.md).

    The rounds of a mechanism are numbered from 0; a round that was lost in a crash keeps its number. Rounds j * block
    to (j + 1) * block - 1 are together one release with noise multiplier z, in which each user takes part at most once,
    with probability q. The charge of the first round of a block covers the block; the other rounds cost nothing.

    Args:
        sampling_prob: q, in (0, 1]: the probability that a user of the group whose turn it is takes part; 1 if the
            accounting assumes no sampling.
        noise_multiplier: z, 0 or more: the standard deviation of the noise that is added to C X, in units of the
            sensitivity of C X.
        block: The number of rounds that one charge covers: b, the number of groups, or all T rounds of a BLT mechanism.
        index: The number of the round in its mechanism, from 0.
    """

    sampling_prob: float
    noise_multiplier: float
    block: int
    index: int

    def __post_init__(self) -> None:
        _check_sampling_and_noise(self)
        _check_whole(self, "block", 1)
        _check_whole(self, "index", 0)


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
    """A release that has no guarantee with probability at most delta: the threshold of a private vocabulary.

    It costs as much as a (0, delta)-private release: delta for one user, and no epsilon.

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
    """The release of the best of a random number of runs. Neither the other runs nor their number are released.

    Literature: Papernot and Steinke, "Hyperparameter Tuning with Rényi Differential Privacy" (2022).

    Args:
        sampling_prob: q of every round of every run.
        noise_multiplier: z of every round of every run.
        rounds: The number of rounds of each run.
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
        _check_whole(self, "rounds", 1)
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
"""Pairs of an event and the number of times it happened: the input of the accountants."""

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
    """Whether the events include training on users' text. The events of a private vocabulary alone do not."""
    return any(not isinstance(event, Gaussian | FailureProbability) for event in events)


def accounted(event: Event) -> Event | None:
    """Return the event that the accountants count.

    Returns:
        The event itself, except for a round with correlated noise: the release of the whole block for the first round
        of a block, and None for the other rounds, which that charge covers.

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
    """Return an event as a plain dictionary for the ledger, with its kind as the first key."""
    return {"kind": _KIND_OF[type(event)], **vars(event)}


def from_record(record: Mapping[str, Any]) -> Event:
    """Return the event of a record that `to_record` made.

    Raises:
        LedgerError: The kind or a key is unknown, a key is missing, or a value is out of range. The cost of such an
            event is unknown, so the function raises an error and does not skip it.
    """
    if not isinstance(record, Mapping):
        raise LedgerError(f"An event must be a table with a 'kind', not {record!r}.")
    kind = record.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        # DP: an event that this version does not know has an unknown cost; skipping it would under-count.
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
        raise LedgerError(f"An event of kind '{kind}' has an invalid value: {error}") from None


def against_server(event: Event) -> Event:
    """Return the event that bounds what the server of a federated run learns. The server knows which users were drawn.

    A round without noise from the nodes is not private against the server, because the server adds the noise itself.
    Events that are not rounds, such as those of a vocabulary, are returned unchanged.

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
    """Store q and z of an event as floats. Raises `InvalidValue` if one of them is out of range."""
    _set_number(event, "sampling_prob")
    _set_number(event, "noise_multiplier")
    # DP: a probability above 1 or a negative z is impossible, and a cost that is computed from it means nothing.
    require(SMALLEST_Q <= event.sampling_prob <= 1, f"sampling_prob must be in (0, 1], not {event.sampling_prob}.")
    require(event.noise_multiplier >= 0, f"noise_multiplier must be 0 or more, not {event.noise_multiplier}.")


def _check_whole(event: Any, name: str, least: int, most: int | None = None) -> None:
    """Raise `InvalidValue` if a field is not an int (a bool is none) from `least` to `most`; None for no upper limit."""
    value = getattr(event, name)
    is_within = type(value) is int and least <= value and (most is None or value <= most)
    upper = "up" if most is None else f"to {most}"
    require(is_within, f"{name} must be a whole number from {least} {upper}, not {str(value)[:50]}.")


def _set_number(event: Any, name: str) -> None:
    """Store a field as a plain float, so that 1 and 1.0 give equal events and equal lines in the ledger.

    Raises `InvalidValue` if the value is not a number, or above `LARGEST_NUMBER`.
    """
    value = getattr(event, name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_usable = is_number and abs(value) <= LARGEST_NUMBER
    require(is_usable, f"{name} must be a number of at most {LARGEST_NUMBER:g}, not {str(value)[:50]}.")
    object.__setattr__(event, name, float(value))


@dataclass(frozen=True, kw_only=True)
class NoiseLevel:
    """How large the noise of one round is, compared with the largest possible update of one user.

    The ratio compares two norms. Noise with standard deviation sigma on P parameters has norm sigma * sqrt(P); the
    average of updates that are clipped to S has a norm of at most S. The limits of the ratio come from these
    experiments. A larger ratio gave a worse model, although S, P and sigma differ between the experiments:

    - 0.23: the paper's LSTM (P = 1,346,144, S = 15) loses 0.13 points of accuracy at sigma = 0.003; a small cost.
    - 0.93: the same model loses 1.3 points at sigma = 0.012 (Table 2 of the paper); it trains.
    - 0.23 and 0.93, with 750,947 reviewers as users and one local step each: the same model loses 1.35 and 7.6 points,
      and still trains (17.7 % accuracy after 5,000 rounds; a bigram model has 18.5 %). Short texts make small updates.
    - 0.88, 3.5, 7 and 14: the demo's LSTM (P = 122,912, S = 8, 75 users per round) has perplexity 124, 181, 292 and 544
      after 30 rounds. Word frequencies alone have 214, so at 7 and above the model is worse than counting words.

    >>> NoiseLevel(noise_std=0.3, clip_norm=15.0, parameters=1_346_144).verdict
    'dominates'

    Args:
        noise_std: sigma, the standard deviation of the noise on each parameter.
        clip_norm: S, the largest L2 norm of a user's update.
        parameters: P, the number of parameters that are trained.
    """

    noise_std: float
    clip_norm: float
    parameters: int

    @property
    def ratio(self) -> float:
        """The norm of the noise of one round, in units of S."""
        return self.noise_std * math.sqrt(self.parameters) / self.clip_norm

    @property
    def is_dominant(self) -> bool:
        """Whether the model is expected to learn nothing."""
        return self.ratio > DOMINANT_RATIO

    @property
    def verdict(self) -> str:
        """The expected effect on training: "small cost", "trains", "costs much" or "dominates"."""
        if self.ratio <= FREE_RATIO:
            return "small cost"
        if self.ratio <= COSTLY_RATIO:
            return "trains"
        return "dominates" if self.is_dominant else "costs much"

    def __str__(self) -> str:
        effect = {
            "small cost": "costs little accuracy",
            "trains": "costs some accuracy, and the model trains",
            "costs much": "costs much accuracy",
            "dominates": "dominates the updates",
        }[self.verdict]
        return (
            f"sigma = {self.noise_std:.3g}: the norm of the noise of one round is {self.ratio:.2g} times S = "
            f"{self.clip_norm:g}. This noise {effect} (a ratio up to {FREE_RATIO:g} costs little; above {DOMINANT_RATIO:g} "
            "the noise dominates the updates)."
        )

    def record(self) -> dict[str, Any]:
        """Return the fields, the ratio and the verdict as plain JSON values."""
        return {**vars(self), "ratio": self.ratio, "verdict": self.verdict}

    def caution(self) -> str | None:
        """Return a warning with possible remedies if the noise will dominate the updates; None otherwise."""
        if not self.is_dominant:
            return None
        factor = self.ratio / COSTLY_RATIO
        return (
            f"The noise will dominate the updates: with sigma = {self.noise_std:.3g} and {self.parameters:,} parameters, the "
            f"norm of the noise of one round is {self.ratio:.2g} times the largest norm of a user's update (S = "
            f"{self.clip_norm:g}). The model will learn little or nothing; this number should be about {COSTLY_RATIO:g} or "
            f"less. To lower it: take about {factor:.0f} times as many users per round at the same z (sigma = z S / users per "
            "round); train fewer rounds, which allow a smaller z at the same epsilon; use fewer parameters (a smaller model, "
            "or LoRA on a pre-trained one); or use correlated noise (`unheard plan --compare-noise`). A public start "
            "(training.init_from) leaves less to learn. `unheard plan --users N --epsilon E` shows what your users allow."
        )
