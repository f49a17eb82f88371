"""Users are divided evenly, each to one rank that has their text; a slower rank gets fewer."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import unheard
from unheard.engines.distributed.engine import RankSpeeds, assign_users


@given(
    costs=st.lists(st.integers(1, 50), max_size=900),
    speeds=st.lists(st.floats(0.25, 4.0), min_size=1, max_size=9),
    data=st.data(),
)
def test_every_user_goes_to_exactly_one_rank_that_holds_them(costs, speeds, data):
    groups = data.draw(st.integers(1, 4))
    may_HR = np.array(
        data.draw(
            st.lists(
                st.lists(st.booleans(), min_size=len(speeds), max_size=len(speeds)), min_size=groups, max_size=groups
            )
        )
    )
    may_HR[:, 0] |= ~may_HR.any(axis=1)  # each group is on some rank
    holder_U = np.arange(len(costs)) % groups
    rank_U = assign_users(np.array(costs, dtype=float), np.array(speeds), holder_U, may_HR)
    assert rank_U.shape == (len(costs),)
    assert ((rank_U >= 0) & (rank_U < len(speeds))).all()
    assert may_HR[holder_U, rank_U].all()


def test_among_many_users_too_nobody_goes_to_a_rank_that_does_not_hold_them():
    rng = np.random.default_rng(2)
    may_HR = np.array([[True, False, False], [False, True, True], [True, True, True]])
    holder_U = rng.integers(3, size=5000)
    rank_U = assign_users(1.0 + rng.integers(20, size=5000), np.array([1.0, 2.0, 1.0]), holder_U, may_HR)
    assert may_HR[holder_U, rank_U].all()
    assert np.bincount(rank_U, minlength=3).min() > 0


@pytest.mark.parametrize("users", [40, 1250, 20_000])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_all_ranks_end_together(users, ranks):
    rng = np.random.default_rng(0)
    cost_U = 1.0 + rng.integers(0, 21, users)
    speed_R = np.linspace(1, 2, ranks)
    rank_U = assign_users(cost_U, speed_R, np.zeros(users, dtype=int), np.ones((1, ranks), dtype=bool))
    ends_R = np.bincount(rank_U, weights=cost_U, minlength=ranks) / speed_R
    assert ends_R.max() <= 1.02 * cost_U.sum() / speed_R.sum() + 1


def test_the_cost_of_a_user_is_known_from_how_much_they_wrote():
    update = unheard.FedAvg(batch_size=8, unroll=10, epochs=2)
    assert update.cost(np.array([0, 1, 2, 81, 82, 1601])).tolist() == [1, 1, 3, 3, 5, 41]
    whole, one = unheard.FedSGD(unroll=10), unheard.FedSGD(batch_size=4, unroll=10)
    assert whole.cost(np.array([1, 801])).tolist() == [1, 11]
    assert one.cost(np.array([1, 801])).tolist() == [1, 1.5]


def test_a_rank_that_was_slow_is_given_less_but_never_starved():
    speeds = RankSpeeds(3)
    assert speeds.speed_R.tolist() == [1, 1, 1]
    speeds.measured(np.array([10.0, 10.0, 0.0]), np.array([1.0, 2.0, 0.0]))
    assert speeds.speed_R[0] == pytest.approx(2 * speeds.speed_R[1])
    assert speeds.speed_R[2] == 1  # unknown speed: the median
    for _ in range(20):
        speeds.measured(np.array([10.0, 10.0, 10.0]), np.array([1.0, 1e6, 1.0]))
    assert speeds.speed_R.tolist() == [1, 0.25, 1]
