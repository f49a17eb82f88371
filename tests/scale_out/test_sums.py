"""On any number of ranks the sum of a cohort is the same, to the bit: what one process gives."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import unheard
from tests.scale_out.forks import on_ranks
from unheard.engines.engine import Cohort, EngineChoice
from unheard.mechanism.adaptive import AdaptiveClip
from unheard.randomness import reproducible_generator
from unheard.training import crew
from unheard.updates.stored import StoredUsers

PLANS = {
    "flat": lambda plan: plan,
    "capped": lambda plan: replace(
        plan,
        weights=unheard.CappedWeights(weight_cap=70, total_weight=40.0),
        clip=unheard.PerLayerClip(norm=1.0),
    ),
    "adaptive": lambda plan: replace(plan, clip=AdaptiveClip(initial_norm=0.5)),
    "fedsgd": lambda plan: replace(plan, update=unheard.FedSGD(batch_size=2, unroll=5, learning_rate=1.0)),
}


def sums(ranks, store, model, plans, engine: str) -> np.ndarray:
    """The sums of a few cohorts at once, three rounds of them, as rows."""
    built = crew.build(EngineChoice(kind=engine, device="cpu"), model, ranks)
    crew.reach(built, store)
    found = []
    for attempt in range(3):
        cohorts = []
        for k, plan in enumerate(plans):
            drawn = np.flatnonzero(reproducible_generator(attempt, "who", k).random(60) < (0.4 if attempt else 0.02))
            cohorts.append(
                Cohort(
                    params_P=model.initial(k),
                    users=StoredUsers(store.train, drawn, with_features=False),
                    plan=plan.at(0, model.layout),
                    rng=reproducible_generator(attempt, k),
                )
            )
        for one in built.sum_cohorts(cohorts):
            extra = torch.tensor([round(one.weight * 2**30), one.balance or 0])
            found.append(torch.cat([one.units_P, extra]).numpy())
    return np.stack(found)


@pytest.mark.parametrize("engine", ["reference", "stacked", "vectorised"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_sums_on_many_ranks_are_those_of_one_to_the_bit(store, model, plan, engine, size):
    plans = [make(plan) for make in PLANS.values()]
    alone = sums(None, store, model, plans, engine)
    assert np.abs(alone).sum() > 0
    together = on_ranks(size, lambda ranks: sums(ranks, store, model, plans, engine))
    assert together.dtype == np.int64
    assert np.array_equal(together, alone)
