"""What one user adds does not depend on where in memory the chunk puts them: matrices of odd sizes begin at odd places."""

import numpy as np
import pytest
import torch

import unheard
from unheard.engines.engine import Drawn
from unheard.engines.stacked.engine import StackedEngine
from unheard.engines.vectorised import ROWS_AT_ONCE, VectorisedEngine
from unheard.updates.stored import StoredUsers
from unheard.updates.user import User

from ..conftest import ManyAtOnce


@pytest.mark.parametrize("engine", [ManyAtOnce, StackedEngine])
@pytest.mark.parametrize(("batch_size", "unroll"), [(1, 7), (3, 5), (5, 3)])
def test_where_a_user_lies_in_memory_does_not_move_what_they_add(store, model, engine, batch_size, unroll):
    """To the bit: a sum of forty is the sum of forty sums of one."""
    plan = unheard.Plan(
        population=60,
        sampling=unheard.PoissonSampling(users_per_round=40),
        update=unheard.FedAvg(batch_size=batch_size, unroll=unroll, learning_rate=1.0),
        clip=unheard.FlatClip(norm=2.0),
        noise=unheard.GaussianNoise(noise_multiplier=1.0),
    ).at(0, model.layout)
    users = StoredUsers(store.train, np.arange(40), with_features=False)

    def total(some: StoredUsers) -> torch.Tensor:
        return engine(model, users_at_once=16).sum_updates(model.initial(3), some, plan, Drawn(5)).units_P

    assert torch.equal(total(users), sum(total(users[k : k + 1]) for k in range(40)))


def sums(engine, update, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all users together, and of the sums of each alone."""
    model, rng = engine.model, np.random.default_rng(1)
    plan = unheard.Plan(
        population=60,
        sampling=unheard.PoissonSampling(users_per_round=40),
        update=update,
        clip=unheard.FlatClip(norm=5.0),
        noise=unheard.GaussianNoise(noise_multiplier=1.0),
    ).at(0, model.layout)
    users = [User(rng.integers(3, model.vocabulary_size, n), None, k) for k, n in enumerate(lengths)]

    def total(some: list[User]) -> torch.Tensor:
        return engine.sum_updates(model.initial(1), some, plan, Drawn(5)).units_P

    alone = torch.stack([total([user]) for user in users])
    return total(users), alone.sum(dim=0)


@pytest.mark.parametrize("users_at_once", [None, 8])
@pytest.mark.parametrize("update", [unheard.FedAvg(batch_size=7, unroll=9), unheard.FedSGD(unroll=9)], ids=str)
@pytest.mark.parametrize("engine", [VectorisedEngine, StackedEngine])
def test_who_comes_last_in_an_array_does_not_move_what_they_add(engine, update, users_at_once):
    """torch's sigmoid has another last bit at the end of an array whose length is no multiple of its vectors."""
    model = unheard.TiedGRU(vocabulary_size=50, embedding_size=9, hidden_size=47)
    together, apart = sums(engine(model, users_at_once=users_at_once), update, [130, 128, 131, 133, 129])
    assert torch.equal(together, apart)


@pytest.mark.parametrize("engine", [ManyAtOnce, VectorisedEngine, StackedEngine])
def test_how_much_others_wrote_does_not_move_what_one_user_adds_in_one_batch(engine):
    """FedSGD on all of a user's data: filled up to the largest in the chunk, products would be larger, and round otherwise."""
    model = unheard.TiedLSTM(vocabulary_size=300, embedding_size=24, hidden_size=32)
    lengths = [40, 90, 200, 333, 510, 700, 900, 1200]
    together, apart = sums(engine(model, users_at_once=8), unheard.FedSGD(unroll=10), lengths)
    assert torch.equal(together, apart)


@pytest.mark.parametrize("users_at_once", [1, 3, 20])
def test_rows_are_filled_up_to_no_more_than_a_chunk_may_have(model, users_at_once, monkeypatch):
    """As on a GPU: who asks for one user at a time, for want of memory, gets one."""
    monkeypatch.setitem(ROWS_AT_ONCE, "cpu", 16)
    seen, engine = [], ManyAtOnce(model, users_at_once=users_at_once)
    step = VectorisedEngine._local_step
    monkeypatch.setattr(VectorisedEngine, "_local_step", lambda self, *a: seen.append(len(a[1])) or step(self, *a))
    sums(engine, unheard.FedAvg(batch_size=2, unroll=5), [30, 40, 50, 60])
    assert max(seen) == min(users_at_once, 16)
