"""What one user adds does not depend on where in memory the chunk puts them: matrices of odd sizes begin at odd places."""

import numpy as np
import pytest
import torch

import unheard
from unheard.engines.engine import Drawn
from unheard.engines.stacked.engine import StackedEngine
from unheard.engines.vectorised import VectorisedEngine
from unheard.updates.stored import StoredUsers


@pytest.mark.parametrize("engine", [VectorisedEngine, StackedEngine])
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
        return engine(model).sum_updates(model.initial(3), some, plan, Drawn(5)).units_P

    assert torch.equal(total(users), sum(total(users[k : k + 1]) for k in range(40)))
