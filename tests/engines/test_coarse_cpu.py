"""Matrix products in bfloat16 on a CPU are close to float32, and one user's update does not depend on other users."""

import numpy as np
import pytest
import torch

import unheard
from unheard.engines.stacked.engine import StackedEngine
from unheard.randomness import reproducible_generator
from unheard.updates.user_update import User


def summed(model, users, precision):
    plan = unheard.Plan(
        population=50,
        sampling=unheard.PoissonSampling(users_per_round=4),
        update=unheard.FedAvg(batch_size=2, unroll=5, learning_rate=0.5),
        clip=unheard.FlatClip(norm=5.0),
        noise=unheard.GaussianNoise(noise_multiplier=1.0),
    ).at(0, model.layout)
    engine = StackedEngine(model, torch.device("cpu"), None, precision)
    total = engine.sum_updates(model.initial(1), users, plan, reproducible_generator(1))
    return total.units_P.double() * total.grid


@pytest.mark.parametrize("unit_norm", [True, False])
@pytest.mark.parametrize("kind", [unheard.TiedLSTM, unheard.TiedGRU])
def test_bfloat16_on_a_cpu_is_close_to_float32_and_keeps_users_apart(kind, unit_norm):
    model = kind(vocabulary_size=60, embedding_size=16, hidden_size=16, unit_norm=unit_norm)
    rng = np.random.default_rng(2)
    users = [User(rng.integers(3, 60, size=n), None, k) for k, n in enumerate((41, 12, 30))]
    fine, coarse = summed(model, users, "float32"), summed(model, users, "bfloat16")
    assert not torch.equal(fine, coarse)
    assert (fine - coarse).norm() < 0.05 * fine.norm()
    alone = sum(summed(model, [user], "bfloat16") for user in users)
    assert torch.equal(alone, coarse)
