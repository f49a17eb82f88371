"""Batches computed for many users at once equal those of each user alone."""

import numpy as np
import pytest

import unheard
from unheard.models.model import PAD
from unheard.updates.user_update import User, stacked_batches

UPDATES = [
    unheard.FedAvg(batch_size=3, unroll=4),
    unheard.FedAvg(batch_size=2, unroll=5, epochs=3),
    unheard.FedSGD(unroll=4),
    unheard.FedSGD(batch_size=2, unroll=4),
]


def counted(windows: np.ndarray) -> np.ndarray:
    """Return the pairs of input and target of a window in which both are tokens. Padding may differ and is left out."""
    inputs, targets = windows[..., :-1], windows[..., 1:]
    real = (inputs != PAD) & (targets != PAD)
    return np.where(real, inputs * 1000 + targets, PAD)


@pytest.mark.parametrize("update", UPDATES, ids=str)
@pytest.mark.parametrize("longest", [90, 1300])
def test_the_same_windows_as_one_by_one(update, longest):
    rng = np.random.default_rng(3)
    users = [User(rng.integers(3, 900, size=n), None, k) for k, n in enumerate((longest, 1, 0, 2, 33, 61, 12, 13))]
    windows_USBW, num_steps_U = stacked_batches(update, users, 5)
    for user, windows_SBW, steps in zip(users, windows_USBW, num_steps_U, strict=True):
        alone = update.batches(user, 5)
        assert steps == len(alone)
        np.testing.assert_array_equal(counted(windows_SBW[:steps, : alone.shape[1]]), counted(alone))
        assert (counted(windows_SBW[:steps, alone.shape[1] :]) == PAD).all()


@pytest.mark.parametrize("update", UPDATES, ids=str)
@pytest.mark.parametrize("lengths", [(), (0,), (1, 1)])
def test_an_empty_cohort_and_users_without_a_target_have_no_batches(update, lengths):
    users = [User(np.full(n, 7), None, k) for k, n in enumerate(lengths)]
    windows_USBW, num_steps_U = stacked_batches(update, users, 5)
    assert len(windows_USBW) == len(lengths)
    assert num_steps_U.tolist() == [0] * len(lengths)
