"""The choice of S and sigma from results whose outcome can be computed by hand."""

import math

import pytest

from unheard.errors import InvalidValue
from unheard.tuning.pipeline import choose_noise, choose_norm
from unheard.tuning.trials import Margin, Result, margin


def result(stage, norm, noise_std, *accuracies, name=None):
    """Return results with one seed per accuracy, each evaluated twice with the same accuracy."""
    last = tuple((accuracy, accuracy) for accuracy in accuracies)
    return Result(
        stage=stage, norm=norm, noise_std=noise_std, name=name or f"S={norm:g},sigma={noise_std:g}", last=last
    )


BASELINE = result("baseline", math.inf, 0.0, 0.200)
CLIPPED = [result("clip", s, 0.0, a) for s, a in ((20, 0.200), (5, 0.190), (10, 0.198), (30, 0.201))]
NOISED = [
    result("noise", 10, sigma, a) for sigma, a in ((0.003, 0.199), (0.006, 0.197), (0.012, 0.1949), (0.024, 0.150))
]
SURE = Margin(points=0.01, of_seeds=True)


def test_the_smallest_s_that_costs_less_than_allowed_is_chosen():
    assert choose_norm(BASELINE, CLIPPED, 0.25, SURE).result.norm == 10
    assert choose_norm(BASELINE, CLIPPED, 0.1, SURE).result.norm == 20
    assert choose_norm(BASELINE, CLIPPED, 5.0, SURE).result.norm == 5


def test_the_largest_noise_that_costs_less_than_allowed_is_chosen():
    chosen = choose_noise(BASELINE, NOISED, 0.5, SURE)
    assert (chosen.result.noise_std, chosen.loss) == (0.006, pytest.approx(0.3))
    assert choose_noise(BASELINE, NOISED, 0.52, SURE).result.noise_std == 0.012


@pytest.mark.parametrize("choose", [choose_norm, choose_noise])
def test_a_loss_of_exactly_what_is_allowed_is_too_much_and_one_bit_less_is_not(choose):
    best, worse = result("baseline", math.inf, 0.0, 0.5), result("noise", 1, 1.0, 0.25)
    assert choose(best, [worse], math.nextafter(25.0, 26), SURE).loss == 25.0
    with pytest.raises(InvalidValue, match="Nothing is chosen"):
        choose(best, [worse], 25.0, SURE)


def test_a_difference_as_large_as_the_margin_is_not_chance():
    margin = Margin(points=0.5, of_seeds=True)
    for sign in (-1, 1):
        assert not margin.hides(sign * 0.5)
        assert margin.hides(sign * math.nextafter(0.5, 0))


def test_where_everything_costs_too_much_nothing_is_chosen_and_the_least_is_named():
    with pytest.raises(InvalidValue, match=r"the least: 0\.10, S=10,sigma=0\.003.*--noise-stds.*--allow-loss"):
        choose_noise(BASELINE, NOISED, 0.05, SURE)


def test_a_choice_at_the_edge_of_the_grid_says_so():
    assert "edge of the grid" in choose_norm(BASELINE, CLIPPED, 5.0, SURE).remarks[0]
    assert not choose_norm(BASELINE, CLIPPED, 0.25, SURE).remarks


def test_a_choice_that_chance_could_turn_says_so():
    remarks = choose_noise(BASELINE, NOISED, 0.5, Margin(points=0.25, of_seeds=True)).remarks
    assert "within noise" in remarks[0]  # 0.30 against 0.50 allowed
    assert "rejected for a loss of 0.51" in remarks[1]
    assert choose_noise(BASELINE, NOISED, 0.5, Margin(points=None, of_seeds=False)).remarks


@pytest.mark.parametrize("rejected", [(), (0.55,), (0.9,), (5.0, 0.55), (0.55, 0.9), (5.0, 5.0, 0.9)])
@pytest.mark.parametrize("loss", [-0.4, 0.1, 0.45])
@pytest.mark.parametrize("choose", [choose_norm, choose_noise])
def test_each_remark_is_made_if_it_is_true_and_only_then(choose, loss, rejected):
    """The allowance is 0.5 points and the margin 0.2. `rejected` are the losses of better settings, the best first."""
    losses = [*rejected, loss, -1.0]
    order = range(len(losses)) if choose is choose_norm else range(len(losses), 0, -1)
    results = [result("clip", n, n, 0.5 - x / 100, name=f"n{n}") for n, x in zip(order, losses, strict=True)]
    chosen = choose(result("baseline", math.inf, 0.0, 0.5), results[::-1], 0.5, Margin(points=0.2, of_seeds=True))
    name, before = results[len(rejected)].name, results[len(rejected) - 1].name
    assert (chosen.result.name, chosen.loss) == (name, pytest.approx(loss))
    expected = [f"{name} is the edge of the grid"] * (not rejected)
    expected += [f"{name} costs {loss:+.2f} points, and 0.5 are allowed: the difference is within noise"] * (
        loss == 0.45
    )
    expected += [f"{before} was rejected for a loss of 0.55 points"] * (rejected[-1:] == (0.55,))
    assert len(chosen.remarks) == len(expected)
    assert all(remark.startswith(words) for remark, words in zip(chosen.remarks, expected, strict=True))


def test_the_margin_is_students_for_the_difference_of_two_means():
    """Two settings with two seeds each, one point apart: s^2 = (0.5 + 0.5) / 2, t(2 degrees) = 4.303, times sqrt(2 / 2)."""
    found = margin([result("clip", 1, 0, 0.20, 0.21), result("clip", 2, 0, 0.30, 0.31)])
    assert found.of_seeds
    assert found.points == pytest.approx(4.3027 * math.sqrt(0.5), rel=1e-4)
    assert found.hides(3.0)
    assert not found.hides(-3.1)


def test_the_margin_is_that_of_the_setting_with_the_fewest_repetitions():
    """Three and two seeds: s^2 = (0.5 + 0.5) / 3 with 3 degrees of freedom, and two means of two seeds each."""
    found = margin([result("clip", 1, 0, 0.20, 0.205, 0.21), result("clip", 2, 0, 0.30, 0.31)])
    assert found.points == pytest.approx(3.1824 * math.sqrt(1 / 3) * math.sqrt(2 / 2), rel=1e-4)


def test_with_one_seed_the_margin_comes_from_the_last_evaluations_and_says_that_it_may_be_too_small():
    one = Result(stage="clip", norm=1, noise_std=0, name="one", last=((0.20, 0.21, 0.20, 0.21, 0.205),))
    found = margin([one])
    assert not found.of_seeds
    assert found.points is not None
    assert "perhaps larger ones too" in found.sentence


def test_without_any_repetition_every_difference_is_within_noise():
    found = margin([Result(stage="clip", norm=s, noise_std=0, name="", last=((0.1 * s,),)) for s in (1, 2)])
    assert found.points is None
    assert found.hides(10.0)
    assert "no difference can be told from chance" in found.sentence
