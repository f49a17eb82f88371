"""A user's update does not depend on other users, bit for bit.

It depends neither on its address in memory, nor on the last position in an array, nor on the length of other users' text."""

import numpy as np
import pytest
import torch

import unheard
from unheard.engines.engine import Drawn
from unheard.engines.stacked.engine import StackedEngine
from unheard.engines.vectorised import ROWS_AT_ONCE, VectorisedEngine
from unheard.updates.user_update import StoredUsers, User

from ..conftest import ManyAtOnce


def alone_and_together(engine, update, users, clip_norm: float = 5.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum over users that were computed one at a time, and the sum of all users computed together."""
    model = engine.model
    plan = unheard.Plan(
        population=60,
        sampling=unheard.PoissonSampling(users_per_round=40),
        update=update,
        clip=unheard.FlatClip(norm=clip_norm),
        noise=unheard.GaussianNoise(noise_multiplier=1.0),
    ).at(0, model.layout)

    def total(some) -> torch.Tensor:
        return engine.sum_updates(model.initial(3), some, plan, Drawn(5)).units_P

    alone = torch.stack([total(users[k : k + 1]) for k in range(len(users))])
    return alone.sum(dim=0), total(users)


def made_up(model, lengths: list[int]) -> list[User]:
    rng = np.random.default_rng(1)
    return [User(rng.integers(3, model.vocabulary_size, n), None, k) for k, n in enumerate(lengths)]


@pytest.mark.parametrize("engine", [ManyAtOnce, StackedEngine])
@pytest.mark.parametrize(("batch_size", "unroll"), [(1, 7), (3, 5), (5, 3)])
def test_the_address_in_memory_does_not_change_a_users_update(store, model, engine, batch_size, unroll):
    """Matrices of odd sizes begin at addresses that are not aligned."""
    users = StoredUsers(store.train, np.arange(40), with_features=False)
    update = unheard.FedAvg(batch_size=batch_size, unroll=unroll, learning_rate=1.0)
    assert torch.equal(*alone_and_together(engine(model, users_at_once=16), update, users, clip_norm=2.0))


@pytest.mark.parametrize("users_at_once", [None, 8])
@pytest.mark.parametrize("update", [unheard.FedAvg(batch_size=7, unroll=9), unheard.FedSGD(unroll=9)], ids=str)
@pytest.mark.parametrize("engine", [VectorisedEngine, StackedEngine])
def test_the_last_position_in_an_array_does_not_change_a_users_update(engine, update, users_at_once):
    """torch's sigmoid rounds the end of an array differently if the length is not a multiple of its vector size."""
    model = unheard.TiedGRU(vocabulary_size=50, embedding_size=9, hidden_size=47)
    users = made_up(model, [130, 128, 131, 133, 129])
    assert torch.equal(*alone_and_together(engine(model, users_at_once=users_at_once), update, users))


@pytest.mark.parametrize("engine", [ManyAtOnce, VectorisedEngine, StackedEngine])
def test_the_length_of_other_texts_does_not_change_a_users_update_in_one_batch(engine):
    """FedSGD on all data of a user: with batches padded to the largest in the chunk, matrix products would round differently."""
    model = unheard.TiedLSTM(vocabulary_size=300, embedding_size=24, hidden_size=32)
    users = made_up(model, [40, 90, 200, 333, 510, 700, 900, 1200])
    assert torch.equal(*alone_and_together(engine(model, users_at_once=8), unheard.FedSGD(unroll=10), users))


@pytest.mark.parametrize("users_at_once", [1, 3, 20])
def test_rows_are_padded_batches_to_no_more_than_a_chunk_may_have(model, users_at_once, monkeypatch):
    """As on a GPU. `users_at_once` limits the rows of an array, so that memory is bounded."""
    monkeypatch.setitem(ROWS_AT_ONCE, "cpu", 16)
    seen, engine = [], ManyAtOnce(model, users_at_once=users_at_once)
    step = VectorisedEngine._local_step
    monkeypatch.setattr(VectorisedEngine, "_local_step", lambda self, *a: seen.append(len(a[1])) or step(self, *a))
    alone_and_together(engine, unheard.FedAvg(batch_size=2, unroll=5), made_up(model, [30, 40, 50, 60]))
    assert max(seen) == min(users_at_once, 16)
