"""A user's text is divided into windows and batches: every target occurs once and in order, for any length."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import unheard
from unheard.errors import InvalidValue
from unheard.models.model import PAD
from unheard.updates.user_update import User, batches_of, windows_of

SEED = 5


@given(st.integers(0, 60), st.integers(1, 12), st.integers(1, 5))
def test_every_token_but_the_first_is_a_target_exactly_once_and_in_order(n, unroll, batch_size):
    tokens = np.arange(100, 100 + n)
    batches = batches_of(windows_of(tokens, unroll), batch_size)
    assert batches.shape[1:] == (batch_size, unroll + 1)
    targets = batches[:, :, 1:].flatten()
    assert targets[targets != PAD].tolist() == tokens[1:].tolist()


@given(st.integers(2, 60), st.integers(1, 12))
def test_the_input_of_every_target_is_the_token_before_it(n, unroll):
    windows = windows_of(np.arange(n), unroll)
    real = windows[:, 1:] != PAD
    assert (windows[:, :-1][real] == windows[:, 1:][real] - 1).all()


def test_the_papers_user_takes_20_steps_of_80_tokens():
    batches = unheard.FedAvg().batches(User(np.arange(1601)), SEED)
    assert batches.shape == (20, 8, 11)
    assert (batches != PAD).all()


def test_nothing_to_predict_is_no_step():
    for tokens in (np.array([]), np.array([7])):
        for update in (unheard.FedAvg(), unheard.FedSGD(), unheard.FedSGD(batch_size=3)):
            assert len(update.batches(User(tokens), SEED)) == 0


def test_epochs_repeat_the_same_batches():
    once, twice = (unheard.FedAvg(epochs=e).batches(User(np.arange(200)), SEED) for e in (1, 2))
    assert (twice == np.concatenate([once, once])).all()


def test_fedsgd_takes_all_the_data_in_one_batch_or_a_random_part_of_it():
    tokens = np.arange(101)
    assert unheard.FedSGD(unroll=10).batches(User(tokens), SEED).shape == (1, 10, 11)
    drawn = [unheard.FedSGD(unroll=10, batch_size=3).batches(User(tokens, number=k), SEED)[0, :, 0] for k in range(40)]
    assert all(len(set(d)) == 3 for d in drawn)
    assert len({tuple(d) for d in drawn}) > 10
    assert {int(start) for d in drawn for start in d} == set(range(0, 100, 10))


@pytest.mark.parametrize(
    "bad", [{"batch_size": 0}, {"unroll": 0}, {"epochs": 0}, {"learning_rate": 0.0}, {"update_penalty": -1.0}]
)
def test_impossible_settings_are_refused(bad):
    with pytest.raises(InvalidValue):
        unheard.FedAvg(**bad)
