"""Sampling: each user is drawn independently with probability q in each round, and the event has the same q."""

import numpy as np
import pytest
from scipy import stats

from unheard import CorrelatedNoise, CyclicPoissonSampling, FixedSizeSampling, PoissonSampling
from unheard.errors import InvalidValue, UnprovenCombination
from unheard.mechanism.sampling import ExampleSampling, Turn, groups_of
from unheard.privacy.events import NonPrivate, PoissonGaussian
from unheard.randomness import reproducible_generator

ROUNDS, USERS, Q = 4000, 50, 0.1


@pytest.fixture(scope="module")
def took_part() -> np.ndarray:
    """Return an array of 0 and 1, shape [ROUNDS, USERS]: whether each user was drawn in each round."""
    sampling, seen = PoissonSampling(sampling_prob=Q), np.zeros((ROUNDS, USERS))
    for round in range(ROUNDS):
        seen[round, sampling.draw(USERS, 1000, reproducible_generator(3, round))] = 1
    return seen


def test_every_user_is_drawn_at_rate_q(took_part):
    z = (took_part.sum(0) - ROUNDS * Q) / np.sqrt(ROUNDS * Q * (1 - Q))
    assert np.abs(z).max() < 4.5


def test_the_cohort_size_is_binomial_and_not_fixed(took_part):
    sizes = took_part.sum(1)
    assert sizes.var() == pytest.approx(USERS * Q * (1 - Q), rel=0.1)
    expected = stats.binom.pmf(np.arange(13), USERS, Q) * ROUNDS
    observed = np.bincount(sizes.astype(int), minlength=13)[:13]
    assert stats.chisquare(observed[1:11], expected[1:11] * observed[1:11].sum() / expected[1:11].sum()).pvalue > 1e-4


def test_users_are_drawn_independently_of_each_other(took_part):
    correlation = np.corrcoef(took_part.T)
    assert np.abs(correlation[~np.eye(USERS, dtype=bool)]).max() < 5 / np.sqrt(ROUNDS)


def test_rounds_are_drawn_independently_so_gaps_between_them_are_geometric(took_part):
    gaps = np.concatenate([np.diff(np.flatnonzero(took_part[:, k])) for k in range(USERS)])
    assert gaps.mean() == pytest.approx(1 / Q, rel=0.05)
    assert gaps.var() == pytest.approx((1 - Q) / Q**2, rel=0.12)


def test_an_empty_cohort_and_everybody_both_happen():
    rng = reproducible_generator(1)
    assert any(len(PoissonSampling(sampling_prob=0.3).draw(3, 3, rng)) == 0 for _ in range(50))
    assert PoissonSampling(sampling_prob=1.0).draw(5, 5, rng).tolist() == [0, 1, 2, 3, 4]


def test_the_event_charges_the_probability_that_the_sampler_draws_with():
    sampling = PoissonSampling(users_per_round=20)
    assert sampling.event(200, 1.5) == PoissonGaussian(sampling_prob=0.1, noise_multiplier=1.5)
    sizes = [len(sampling.draw(1000, 200, reproducible_generator(9, i))) for i in range(2000)]
    assert np.mean(sizes) == pytest.approx(1000 * 0.1, rel=0.02)


def test_q_comes_from_the_declared_population_and_not_from_the_store():
    sampling = PoissonSampling(users_per_round=20)
    assert sampling.probability(200) == 0.1
    few = [len(sampling.draw(10, 200, reproducible_generator(4, i))) for i in range(2000)]
    assert np.mean(few) == pytest.approx(1.0, rel=0.15)


def test_a_cohort_has_nobody_twice_and_is_sorted():
    drawn = PoissonSampling(sampling_prob=0.5).draw(1000, 1000, reproducible_generator(1))
    assert (np.diff(drawn) > 0).all()


def test_fixed_size_sampling_is_exact_and_may_not_be_accounted_as_poisson():
    sampling = FixedSizeSampling(users_per_round=7)
    assert len(sampling.draw(30, 30, reproducible_generator(1))) == 7
    assert isinstance(sampling.event(30, 0.0), NonPrivate)
    with pytest.raises(UnprovenCombination, match="poisson"):
        sampling.event(30, 1.0)


def test_more_users_than_there_are_is_refused():
    with pytest.raises(InvalidValue, match="declared population"):
        PoissonSampling(users_per_round=20).probability(10)
    with pytest.raises(InvalidValue, match="Lower it"):
        FixedSizeSampling(users_per_round=20).draw(10, 10, reproducible_generator(1))


@pytest.mark.parametrize(
    "bad", [{}, {"users_per_round": 1, "sampling_prob": 0.1}, {"sampling_prob": 0.0}, {"sampling_prob": 1.1}]
)
def test_impossible_sampling_is_refused(bad):
    with pytest.raises(InvalidValue):
        PoissonSampling(**bad)


class Asked:
    """A generator that records the parameters of the binomial draw and draws no user."""

    def binomial(self, n, p):
        self.n, self.p = n, p
        return 0

    def choice(self, *_, **__):
        return np.empty(0, dtype=np.int64)


def test_every_sampler_draws_with_exactly_the_probability_that_is_charged():
    asked = Asked()
    poisson = PoissonSampling(users_per_round=7.3)
    poisson.draw(1000, 67, asked)  # pyright: ignore[reportArgumentType]
    assert (asked.n, asked.p) == (1000, poisson.event(67, 1.0).sampling_prob)  # pyright: ignore[reportAttributeAccessIssue]
    examples = ExampleSampling(examples_per_user=3, examples_per_round=5.3, total_examples=150)
    examples.draw_examples(np.array([2, 11, 1000]), 10, 67, asked)  # pyright: ignore[reportArgumentType]
    assert (asked.n, asked.p) == (1 + 1 + 3, examples.event(67, 1.0).sampling_prob)  # pyright: ignore[reportAttributeAccessIssue]
    cyclic = CyclicPoissonSampling(users_per_round=7.3, groups=3)
    noise = CorrelatedNoise(noise_multiplier=1.0, rounds=6)
    groups = groups_of(1000, 3, bytes(16))
    for index in range(6):
        cyclic.draw(1000, 67, asked, Turn(index=index, groups_key=bytes(16)))  # pyright: ignore[reportArgumentType]
        assert asked.n == (groups == index % 3).sum()
        assert asked.p == noise.event(cyclic, 67, index).sampling_prob


SETS = [(3, 0.05), (3, 0.15), (3, 0.5), (2, 0.9)]


@pytest.mark.parametrize(("users", "q"), SETS)
@pytest.mark.parametrize("kind", ["poisson", "cyclic", "examples"])
def test_every_set_of_users_has_the_probability_of_independent_draws(kind, users, q):
    """No event is proved for cohorts that are truncated or padded to some size, because their size depends on the draw."""
    population, draws = users, 8_000  # the expected number is q * users, so a limit at it would show
    seen = np.zeros(2**users)
    for number in range(draws):
        rng = reproducible_generator(11, kind, users, number)
        if kind == "poisson":
            drawn = PoissonSampling(sampling_prob=q).draw(users, population, rng)
        elif kind == "cyclic":
            cyclic = CyclicPoissonSampling(users_per_round=q * population, groups=1)
            drawn = cyclic.draw(users, population, rng, Turn(index=0, groups_key=bytes(16)))
        else:
            examples = ExampleSampling(examples_per_user=1, examples_per_round=q * users, total_examples=users)
            drawn, _ = examples.draw_examples(np.full(users, 2), 5, population, rng)
        seen[sum(1 << int(user) for user in drawn)] += 1
    sizes = np.array([bin(members).count("1") for members in range(2**users)])
    expected = draws * q**sizes * (1 - q) ** (users - sizes)
    assert stats.chisquare(seen, expected).pvalue > 1e-4


@pytest.mark.parametrize("limit", [1, 8, 9, 64, 4096])
def test_a_user_takes_part_with_as_many_examples_as_the_event_charges_for_and_no_more(limit):
    sampling = ExampleSampling(examples_per_user=limit, examples_per_round=1000 * limit, total_examples=1000 * limit)
    event = sampling.event(1000, 1.5)
    users, windows = sampling.draw_examples(np.array([10**6, 3]), 5, 1000, reproducible_generator(1))
    assert event.examples_per_user == limit == (users == 0).sum() == len(set(windows[users == 0]))
    assert (event.sampling_prob, event.noise_multiplier) == (1.0, 1.5)
