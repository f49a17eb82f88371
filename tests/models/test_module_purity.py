"""A module is a pure function of its parameters in any thread. If vmap does not support it, users run one at a time."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

import unheard
from tests.conftest import ROWS, ManyAtOnce, counting_user
from unheard.engines.reference import ReferenceEngine
from unheard.engines.vectorised import VectorisedEngine
from unheard.errors import ModelError
from unheard.models.module import PureModule, shell_of
from unheard.randomness import reproducible_generator
from unheard.updates.user_update import User

MEETING = threading.Barrier(2, timeout=60)


class Meets(nn.Module):
    """A module that reads its parameter only while a second call runs in another thread."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        MEETING.wait()
        answer = x * self.scale
        MEETING.wait()
        return answer


def test_two_threads_in_one_module_each_compute_with_their_own_parameters():
    """Otherwise the local steps of one chunk could use the parameters of another chunk."""
    pure = PureModule(Meets())

    def call(scale: float) -> float:
        return pure({"scale": torch.tensor(scale)}, torch.tensor(10.0), device=torch.device("cpu")).item()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(call, [2.0, 3.0])) == [20.0, 30.0]


def test_a_shell_shares_all_tensors_but_the_named_ones():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    shell = shell_of(module, own={"1.weight"})
    mine, others = dict(module.named_parameters()), dict(shell.named_parameters())
    assert [name for name in mine if mine[name] is not others[name]] == ["1.weight"]
    assert shell is not module


def test_after_an_error_the_module_is_as_it_was():
    pure = PureModule(nn.Linear(2, 2, bias=False))
    here = torch.device("cpu")
    with pytest.raises(RuntimeError):
        pure({"weight": torch.ones(2, 2)}, torch.ones(3), device=here)
    assert torch.equal(pure({}, torch.ones(2), device=here), pure.module.weight.sum(1))


class Looks(nn.Module):
    """A module with control flow that depends on values, as in a mixture of experts, which vmap does not support."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.scores = nn.Embedding(ROWS, 6), nn.Linear(6, ROWS)

    def forward(self, tokens):
        x = self.words(tokens).cumsum(1)
        return self.scores(x.tanh() if x.sum().item() > 0 else x.sin())


def plan_for(model) -> unheard.Plan:
    return unheard.Plan(
        population=50,
        sampling=unheard.PoissonSampling(users_per_round=6),
        update=unheard.FedAvg(batch_size=2, unroll=5, learning_rate=0.5),
        clip=unheard.FlatClip(norm=0.7),
        noise=unheard.GaussianNoise(noise_multiplier=1.0),
    ).at(0, model.layout)


def total(engine, some, model):
    return engine.sum_updates(model.initial(0), some, plan_for(model), reproducible_generator(1)).units_P


def some_users() -> list[User]:
    rng = np.random.default_rng(3)
    return [User(counting_user(rng, n), None, k) for k, n in enumerate((60, 1, 33, 0, 12, 47))]


def test_a_model_that_vmap_cannot_take_runs_one_user_at_a_time_and_agrees():
    model, users = unheard.ModuleModel.wrap(Looks(), vocabulary_size=ROWS), some_users()
    engine = ManyAtOnce(model, users_at_once=4)
    with pytest.warns(UserWarning, match="one user at a time"):
        fast = total(engine, users, model)
    plain = total(ReferenceEngine(model), users, model)
    assert plain.any()
    assert (fast - plain).double().norm() / plain.double().norm() < 1e-4
    assert torch.equal(fast, total(engine, users[:2], model) + total(engine, users[2:], model))


class Fails(nn.Embedding):
    def forward(self, tokens):
        raise RuntimeError("out of cheese")


def test_a_model_that_fails_by_itself_is_not_taken_for_one_that_resists_vmap():
    model = unheard.ModuleModel.wrap(Fails(ROWS, ROWS), vocabulary_size=ROWS)
    with pytest.raises(ModelError, match="out of cheese"):
        total(VectorisedEngine(model), some_users(), model)


def test_with_two_threads_a_module_gives_the_sum_of_one():
    model, users = unheard.ModuleModel.wrap(Looks(), vocabulary_size=ROWS), some_users() * 2
    with pytest.warns(UserWarning, match="one user at a time"):
        alone = total(ManyAtOnce(model, users_at_once=1), users, model)
    torch.set_num_threads(2)
    try:
        with pytest.warns(UserWarning, match="one user at a time"):
            assert torch.equal(total(ManyAtOnce(model, users_at_once=1), users, model), alone)
    finally:
        torch.set_num_threads(1)
