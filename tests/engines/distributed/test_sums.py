"""On any number of ranks the sum of a cohort equals that of one process, bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import unheard
from tests.engines.distributed.forks import LeaderFailed, on_ranks
from unheard.engines.choice import EngineChoice
from unheard.engines.distributed import engine as distributed
from unheard.engines.distributed.engine import EXTRA, _checksum, _cohort_sum, plan_from_table, plan_table
from unheard.engines.engine import Cohort
from unheard.errors import RankError
from unheard.mechanism.clipping import AdaptiveClip
from unheard.randomness import reproducible_generator
from unheard.training import initialise, worker
from unheard.updates.user_update import StoredUsers

PLANS = {
    "flat": lambda plan: plan,
    "capped": lambda plan: replace(
        plan,
        weights=unheard.CappedWeights(weight_cap=70, total_weight=40.0),
        clip=unheard.PerLayerClip(norm=1.0),
        estimator=unheard.ClippedDenominator(min_total_weight=20.0),
    ),
    "adaptive": lambda plan: replace(plan, clip=AdaptiveClip(initial_norm=0.5)),
    "fedsgd": lambda plan: replace(plan, update=unheard.FedSGD(batch_size=3, unroll=5, learning_rate=1.0)),
    "bare": lambda plan: replace(plan, clip=unheard.NoClip(), noise=unheard.NoNoise()),
}


def sums(ranks, store, model, plans, engine: str) -> np.ndarray:
    """Return the sums of several cohorts over two rounds, as rows. The cohorts of the first round are almost empty."""
    built = initialise.build_engine(EngineChoice(kind=engine, device="cpu"), model, ranks)
    initialise.check_all_users_reachable(built, store)
    found = []
    for attempt in range(2):
        cohorts = []
        for k, plan in enumerate(plans):
            drawn = np.flatnonzero(reproducible_generator(attempt, "who", k).random(60) < (0.3 if attempt else 0.02))
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


@pytest.mark.parametrize(("size", "engine"), [(2, "reference"), (2, "vectorised"), (2, "stacked"), (8, "stacked")])
def test_sums_on_many_ranks_are_those_of_one_to_the_bit(store, model, plan, engine, size):
    plans = [make(plan) for make in PLANS.values()]
    alone = sums(None, store, model, plans, engine)
    assert np.abs(alone).sum() > 0
    together = on_ranks(size, lambda ranks: sums(ranks, store, model, plans, engine))
    assert together.dtype == np.int64
    assert np.array_equal(together, alone)


def test_a_sum_over_ranks_is_of_whole_numbers_beyond_what_floats_hold():
    def lead(ranks):
        ranks.send([unheard_message(ranks)])
        ranks.connect(torch.device("cpu"), 20.0)
        return ranks.reduce_sum(torch.tensor([2**60 + 1, -(2**60) - 3])).numpy()

    def follow(ranks):
        ranks.receive()
        ranks.connect(torch.device("cpu"), 20.0)
        ranks.reduce_sum(torch.tensor([1, 1]))

    assert on_ranks(2, lead, follow).tolist() == [2**60 + 2, -(2**60) - 2]


def unheard_message(ranks):
    from unheard.engines.distributed.process_group import Message

    return Message("connect", {"seconds": 20.0}, np.arange(3))


def test_a_sum_of_floats_is_refused():
    def lead(ranks):
        ranks.reduce_sum(torch.zeros(3))

    with pytest.raises(LeaderFailed, match="int64"):
        on_ranks(2, lead, lambda ranks: None)


def test_every_user_is_dealt_to_one_rank_and_summed_there_once(store, model, plan):
    """If other users were summed than were drawn, or not each once, the round is not used."""
    now = plan.at(0, model.layout)
    row = torch.zeros(model.layout.total + EXTRA, dtype=torch.int64)
    row[-2:] = torch.tensor(_checksum(np.array([6, 1, 9, 5])))
    assert _cohort_sum(row, now, some(store, [9, 1, 5, 6])).units_P.shape == (model.layout.total,)
    for drawn in (
        [6, 6, 9],
        [0, 1, 5, 6, 9],
        [1, 5, 6, 8],
        [1, 4, 7, 9],
        [5, 5, 5, 6],
    ):  # the last two have the same sum
        with pytest.raises(RankError, match="did not sum"):
            _cohort_sum(row, now, some(store, drawn))


def some(store, numbers) -> StoredUsers:
    return StoredUsers(store.train, np.array(numbers), with_features=False)


@pytest.mark.parametrize(
    ("changed", "is_refused"),
    [
        (lambda numbers_U: numbers_U, False),
        (lambda numbers_U: numbers_U[1:], True),  # one user is left out
        # One user is summed twice and another one not at all.
        (lambda numbers_U: np.array([numbers_U[0], *numbers_U[:-1]]), True),
    ],
)
def test_a_rank_that_sums_others_than_it_was_asked_for_is_found_out(store, model, plan, changed, is_refused):
    """A rank reports the users whom it summed, not those of the request: repeating the request would prove nothing."""

    class Changed(StoredUsers):
        def __init__(self, source, numbers_U, *, with_features):
            super().__init__(source, changed(np.asarray(numbers_U)), with_features=with_features)

    def follow(ranks):
        distributed.StoredUsers = Changed  # only in this fork
        worker.serve(ranks)

    def lead(ranks):
        built = initialise.build_engine(EngineChoice(device="cpu"), model, ranks)
        initialise.check_all_users_reachable(built, store)
        users, now = some(store, np.arange(20)), plan.at(0, model.layout)
        return built.sum_updates(model.initial(0), users, now, reproducible_generator(0)).units_P.numpy()

    if is_refused:
        with pytest.raises(LeaderFailed, match="RankError: The ranks did not sum each drawn user exactly once"):
            on_ranks(2, lead, follow)
    else:
        assert np.array_equal(on_ranks(2, lead, follow), lead(None))


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_survives_its_message(model, plan, name):
    made = PLANS[name](plan).at(0, model.layout)
    again = plan_from_table(plan_table(made), model.layout)
    assert again == made
    assert (again.contribution, again.adaptive_clip) == (made.contribution, made.adaptive_clip)


def test_users_of_no_store_are_summed_by_the_leader_alone(store, model, plan):
    users = list(StoredUsers(store.train, np.arange(5), with_features=False))
    now = plan.at(0, model.layout)

    def summed(ranks):
        built = initialise.build_engine(EngineChoice(device="cpu"), model, ranks)
        return built.sum_updates(model.initial(0), users, now, reproducible_generator(0)).units_P.numpy()

    assert np.array_equal(on_ranks(2, summed), summed(None))
