"""The server accepts a `NoisyAverage` only, and its optimisers compute the next model from it."""

from dataclasses import replace

import pytest
import torch

from unheard.mechanism.aggregation import BoundedAverage, CohortSum, NoisyAverage
from unheard.training.round import AdamServer, AddServer, MomentumServer, State, step


def noisy(model, value):
    return NoisyAverage(average_P=torch.full((model.layout.total,), value, dtype=torch.float64), noise_std=1.0)


def test_only_a_noisy_average_gets_into_a_model(model):
    state = State(round=0, params_P=model.initial(0))
    units = torch.zeros(model.layout.total, dtype=torch.int64)
    private = [
        CohortSum(units_P=units, grid=1.0, weight=1.0, l2_bound=1.0),
        BoundedAverage(units_P=units, unit=1.0, sensitivity=1.0),
        torch.zeros(model.layout.total),
    ]
    for value in private:
        with pytest.raises(TypeError, match="NoisyAverage"):
            step(AddServer(), model, state, value)  # pyright: ignore[reportArgumentType]


def test_private_values_do_not_print_what_they_hold():
    units = torch.tensor([123456789])
    assert "123456789" not in repr(CohortSum(units_P=units, grid=1.0, weight=7.25, l2_bound=1.0))
    assert "7.25" not in repr(CohortSum(units_P=units, grid=1.0, weight=7.25, l2_bound=1.0))
    assert "123456789" not in repr(BoundedAverage(units_P=units, unit=1.0, sensitivity=1.0))


def test_the_papers_server_adds_and_projects_after_the_noise(model):
    model = replace(model, keep_norm=True)
    start = State(round=4, params_P=model.initial(0))
    after = step(AddServer(), model, start, noisy(model, 0.25))
    torch.testing.assert_close(after.params_P, model.project(start.params_P + 0.25))
    assert after.round == 5
    norms = model.layout.split(after.params_P)["embedding"].norm(dim=1)
    torch.testing.assert_close(norms, torch.ones_like(norms))


def directions(server, values):
    memory, seen = {}, []
    for value in values:
        direction, memory = server.direction(torch.tensor([value], dtype=torch.float64), memory)
        seen.append(direction.item())
    return seen


def test_momentum_by_hand():
    assert directions(MomentumServer(learning_rate=2.0, momentum=0.5), [1, 1, 0]) == pytest.approx([2.0, 3.0, 1.5])


def test_adam_by_hand_and_against_torch():
    server = AdamServer(learning_rate=0.1, beta1=0.9, beta2=0.99, epsilon=1e-8)
    values = [0.5, -0.2, 0.7, 0.1]
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    adam, places = torch.optim.Adam([weight], lr=0.1, betas=(0.9, 0.99), eps=1e-8), []
    for value in values:
        weight.grad = torch.tensor([-value], dtype=torch.float64)
        before = weight.item()
        adam.step()
        places.append(weight.item() - before)
    assert directions(server, values) == pytest.approx(places)
