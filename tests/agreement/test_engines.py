"""All engines give the sum of the reference engine within stated rounding, with the same event."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import unheard
from unheard.engines.engine import Cohort, Drawn
from unheard.engines.reference import ReferenceEngine
from unheard.engines.stacked.engine import StackedEngine, Task
from unheard.engines.vectorised import ROWS_AT_ONCE, VectorisedEngine
from unheard.errors import InvalidValue
from unheard.mechanism.clipping import Ball, Clip
from unheard.models.model import loss_gradient
from unheard.parameters import Layout
from unheard.randomness import reproducible_generator
from unheard.updates.user_update import User

from ..conftest import ManyAtOnce, counting_user

LENGTHS = (90, 1, 0, 2, 33, 11, 57)
"""Tokens per user: more than a batch, a few windows, one target, one token, and none."""

FAST = [VectorisedEngine, ManyAtOnce, StackedEngine]
every_fast_engine = pytest.mark.parametrize("fast", FAST)

CLIPS = [unheard.FlatClip(norm=0.7), unheard.FlatClip(norm=50.0), unheard.PerLayerClip(norm=0.7), unheard.NoClip()]
UPDATES = [
    unheard.FedAvg(batch_size=3, unroll=4, learning_rate=0.9),
    unheard.FedAvg(batch_size=2, unroll=7, epochs=2, learning_rate=0.5, update_penalty=0.3),
    unheard.FedSGD(unroll=4, learning_rate=2.0),
    unheard.FedSGD(batch_size=2, unroll=4, learning_rate=2.0),
]


def users(features: int = 0) -> list[User]:
    rng = np.random.default_rng(5)
    about = [rng.standard_normal(features).astype("float32") if features else None for _ in LENGTHS]
    return [User(counting_user(rng, n), f, k) for k, (n, f) in enumerate(zip(LENGTHS, about, strict=True))]


def both(fast, model, update, clip, features=0, weights=None, users_at_once=3):
    noise = unheard.NoNoise() if isinstance(clip, unheard.NoClip) else unheard.GaussianNoise(noise_multiplier=1.0)
    plan = unheard.Plan(
        population=50, sampling=unheard.PoissonSampling(users_per_round=7), update=update, clip=clip, noise=noise,
        weights=weights or unheard.EqualWeights(),
    ).at(0, model.layout)  # fmt: skip
    # Word vectors that are not rescaled have grown.
    params = model.initial(1) * (1.0 if getattr(model, "keep_norm", True) else 3.0)
    plain = ReferenceEngine(model).sum_updates(params, users(features), plan, reproducible_generator(1))
    total = fast(model, users_at_once=users_at_once).sum_updates(
        params, users(features), plan, reproducible_generator(1)
    )
    assert total.weight == plain.weight
    assert total.l2_bound == plain.l2_bound
    error = (total.units_P - plain.units_P).double().norm() / plain.units_P.double().norm()
    return plain, error.item()


@pytest.mark.parametrize("clip", CLIPS, ids=str)
@pytest.mark.parametrize("update", UPDATES, ids=lambda u: f"{type(u).__name__}-{u.batch_size}-{u.unroll}")
@every_fast_engine
def test_every_engine_gives_the_sum_of_reference(fast, model, update, clip):
    plain, error = both(fast, model, update, clip)
    assert plain.units_P.any()
    assert error < 1e-4


@pytest.mark.parametrize("users_at_once", [1, 2, 7, 100, None])
@every_fast_engine
def test_the_size_of_a_chunk_does_not_matter(fast, model, users_at_once):
    assert both(fast, model, UPDATES[0], CLIPS[0], users_at_once=users_at_once)[1] < 1e-4


@pytest.mark.parametrize("rows", [2, 4, 16])
@pytest.mark.parametrize("update", UPDATES, ids=lambda u: f"{type(u).__name__}-{u.batch_size}-{u.unroll}")
def test_rows_for_nobody_change_nothing(model, update, rows, monkeypatch):
    """As on a GPU: the number of rows is a multiple of some number, and some rows belong to finished users or to no user."""
    monkeypatch.setitem(ROWS_AT_ONCE, "cpu", rows)
    assert both(ManyAtOnce, model, update, CLIPS[0])[1] < 1e-4
    assert both(ManyAtOnce, model, update, CLIPS[3])[1] < 1e-4
    with_features = replace(model, user_features=2)
    assert both(ManyAtOnce, with_features, update, CLIPS[0], features=2)[1] < 1e-4


@every_fast_engine
def test_unequal_weights_agree(fast, model):
    weights = unheard.CappedWeights(weight_cap=40, total_weight=25.0)
    plain, error = both(fast, model, UPDATES[0], CLIPS[0], weights=weights)
    assert plain.weight == pytest.approx((40 + 1 + 0 + 2 + 33 + 11 + 40) / 40, abs=1e-6)
    assert error < 1e-4


def largest_norm(model, params_P, user, update) -> float:
    """Return the largest norm of the delta over a user's local steps, without a clip."""
    theta_P, largest = params_P.clone(), 0.0
    for batch_BW in update.batches(user, 0):
        gradient_P = loss_gradient(model, theta_P, torch.as_tensor(batch_BW), None)
        theta_P = model.project_local(theta_P - update.learning_rate * gradient_P)
        largest = max(largest, float((theta_P - params_P).norm()))
    return largest


@pytest.mark.parametrize("fast", [ReferenceEngine, *FAST])
def test_every_engine_counts_the_users_whom_a_clip_has_moved(fast, model):
    """The balance of an adaptive clip counts +1 for each user whose steps all stay within S, and -1 for each other user."""
    update, params_P = UPDATES[0], model.initial(1)
    norms = [largest_norm(model, params_P, user, update) for user in users()]
    steps = sorted(norm for norm in norms if norm)
    assert 2 <= len(steps) < len(norms)  # some users have no local step
    engine = fast(model) if fast is ReferenceEngine else fast(model, users_at_once=3)
    for S in (0.01 * steps[0], *((low + high) / 2 for low, high in pairwise(steps)), 100 * steps[-1]):
        plan = unheard.Plan(
            population=50, sampling=unheard.PoissonSampling(users_per_round=7), update=update,
            clip=unheard.AdaptiveClip(initial_norm=S), noise=unheard.GaussianNoise(noise_multiplier=0.5),
        ).at(0, model.layout)  # fmt: skip
        total = engine.sum_updates(params_P, users(), plan, reproducible_generator(1))
        assert total.balance == sum(1 if norm <= S else -1 for norm in norms)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tied": False},
        {"unit_norm": False},
        {"keep_norm": True},
        {"user_features": 3},
        {"tied": False, "unit_norm": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("cell", [unheard.TiedLSTM, unheard.TiedGRU])
@every_fast_engine
def test_every_kind_of_the_papers_model_agrees(fast, cell, options):
    model = cell(vocabulary_size=50, embedding_size=5, hidden_size=7, **options)
    clip, features = unheard.PerLayerClip(norm=0.5), options.get("user_features", 0)
    assert both(fast, model, UPDATES[0], clip, features=features)[1] < 1e-4


@pytest.mark.parametrize("fast", [VectorisedEngine, ManyAtOnce])
@pytest.mark.parametrize("tied", [True, False])
def test_a_projection_after_local_steps_agrees(fast, tied):
    """The projection comes before the clip, which most users reach. The result differs from that without projection."""
    model = unheard.TiedLSTM(
        vocabulary_size=50, embedding_size=5, hidden_size=7, tied=tied, step_norm=True, keep_norm=True
    )
    projected, error = both(fast, model, UPDATES[0], unheard.FlatClip(norm=0.5))
    assert error < 1e-4
    plain, _ = both(fast, replace(model, step_norm=False), UPDATES[0], unheard.FlatClip(norm=0.5))
    assert not torch.equal(plain.units_P, projected.units_P)


def test_one_local_step_without_a_clip_leaves_vectors_of_norm_1():
    model = unheard.TiedLSTM(vocabulary_size=50, embedding_size=5, hidden_size=7, step_norm=True)
    plan = unheard.Plan(
        population=50, sampling=unheard.PoissonSampling(users_per_round=7), update=UPDATES[0], clip=unheard.NoClip(),
        noise=unheard.NoNoise(),
    ).at(0, model.layout)  # fmt: skip
    theta0_P = model.initial(1)
    delta_P = ReferenceEngine(model).user_update(theta0_P, users()[0], plan, 0)
    norms = model.layout.split(theta0_P + delta_P)["embedding"].norm(dim=1)
    torch.testing.assert_close(norms, torch.ones(50))
    assert float(delta_P.norm()) > 0.01


def test_the_stacked_engine_refuses_a_projection_after_local_steps():
    model = unheard.TiedLSTM(vocabulary_size=50, embedding_size=5, hidden_size=7, step_norm=True)
    assert isinstance(unheard.EngineChoice(device="cpu").build(model), VectorisedEngine)
    with pytest.raises(InvalidValue, match="step_norm"):
        unheard.EngineChoice(kind="stacked", device="cpu").build(model)


class OwnModule(nn.Module):
    """A model of the bag of previous words, with a buffer and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.scores, self.scale = nn.Embedding(50, 4), nn.Linear(4, 50), nn.Parameter(torch.tensor(1.0))
        self.register_buffer("shrink", torch.tensor(0.5))

    def forward(self, tokens):
        return self.scores(self.words(tokens).cumsum(1) * self.shrink * self.scale)


def test_any_module_agrees():
    model = unheard.ModuleModel.wrap(OwnModule(), vocabulary_size=50)
    assert model.layout.names == ("scale", "words.weight", "scores.weight", "scores.bias")
    assert both(VectorisedEngine, model, UPDATES[0], unheard.PerLayerClip(norm=0.5))[1] < 1e-4


def test_an_empty_cohort_is_a_sum_of_nothing_in_all(model, plan):
    for engine in (ReferenceEngine(model), VectorisedEngine(model), StackedEngine(model)):
        total = engine.sum_updates(model.initial(1), [], plan.at(0, model.layout), reproducible_generator(1))
        assert total.units_P.tolist() == [0] * model.layout.total
        assert total.weight == 0.0


def test_fedavg_clips_after_every_step_and_not_only_at_the_end(model):
    """With a small S, a user who is clipped only at the end would compute later gradients at other parameters."""
    S, update, user = 0.05, unheard.FedAvg(batch_size=1, unroll=4, learning_rate=5.0), users()[:1]

    def delta(clip):
        noise = unheard.NoNoise()
        plan = unheard.Plan(
            population=50, sampling=unheard.PoissonSampling(users_per_round=7), update=update, clip=clip, noise=noise
        ).at(0, model.layout)
        engines = (ReferenceEngine(model), VectorisedEngine(model), StackedEngine(model))
        return [
            e.sum_updates(model.initial(1), user, plan, reproducible_generator(1)).units_P.double() for e in engines
        ]

    for every, free in zip(delta(unheard.FlatClip(norm=S)), delta(unheard.NoClip()), strict=True):
        at_the_end = free * (every.norm() / free.norm())
        assert (every - at_the_end).norm() / every.norm() > 0.1


@pytest.mark.parametrize("clip", CLIPS, ids=str)
@pytest.mark.parametrize("cell", [unheard.TiedLSTM, unheard.TiedGRU])
@every_fast_engine
def test_in_float64_the_engines_agree_to_the_last_unit_of_the_grid(fast, cell, clip):
    """Large learning rates amplify float32 rounding. In float64 only a real difference between engines is visible."""
    model = cell(vocabulary_size=50, embedding_size=6, hidden_size=8)
    noise = unheard.NoNoise() if isinstance(clip, unheard.NoClip) else unheard.GaussianNoise(noise_multiplier=1.0)
    plan = unheard.Plan(
        population=50,
        sampling=unheard.PoissonSampling(users_per_round=7),
        update=unheard.FedAvg(batch_size=2, unroll=5, learning_rate=6.0),
        clip=clip,
        noise=noise,
    ).at(0, model.layout)
    params = model.initial(1).double()
    plain = ReferenceEngine(model).sum_updates(params, users(), plan, reproducible_generator(1)).units_P
    total = fast(model, users_at_once=3).sum_updates(params, users(), plan, reproducible_generator(1)).units_P
    assert (total - plain).abs().max() <= len(LENGTHS)  # at most one unit per user, from the last bit
    assert (total - plain).double().norm() / plain.double().norm() < 1e-6


@pytest.mark.parametrize("engine", [ReferenceEngine, VectorisedEngine, StackedEngine])
@pytest.mark.parametrize("update", UPDATES, ids=lambda u: f"{type(u).__name__}-{u.batch_size}-{u.unroll}")
def test_a_users_update_does_not_depend_on_other_users(model, update, engine):
    """Bit for bit. Otherwise removing one user would change other users' updates, and the sum by more than S."""
    plan = unheard.Plan(
        population=50,
        sampling=unheard.PoissonSampling(users_per_round=7),
        update=update,
        clip=unheard.FlatClip(norm=0.7),
        noise=unheard.GaussianNoise(noise_multiplier=1.0),
    ).at(0, model.layout)

    def total(some):
        return engine(model).sum_updates(model.initial(1), some, plan, reproducible_generator(1)).units_P

    everybody = users()
    for gone in (0, 4, 6):
        rest = [user for user in everybody if user.number != gone]
        assert torch.equal(total(everybody), total(rest) + total([everybody[gone]]))


@pytest.mark.parametrize("engine", [ReferenceEngine, *FAST])
def test_an_engine_remembers_nobody_from_one_round_to_the_next(model, plan, engine):
    """Bit for bit. Data that stays in the memory of an engine must not affect the next cohort."""
    now, fresh, used = plan.at(0, model.layout), engine(model), engine(model)
    used.sum_updates(model.initial(1), users(), now, reproducible_generator(1))
    others = [User(user.tokens[::-1].copy(), None, user.number) for user in users()]
    again, first = (
        e.sum_updates(model.initial(2), others, now, reproducible_generator(2)).units_P for e in (used, fresh)
    )
    assert torch.equal(again, first)


def test_a_user_or_a_cohort_that_is_printed_shows_nothing_private(model, plan):
    now, drawn = plan.at(0, model.layout), Drawn(987_654_321)
    for rng in (reproducible_generator(1), drawn):
        cohort = Cohort(params_P=model.initial(0), users=users(), plan=now, rng=rng)
        assert repr(cohort) == f"Cohort(plan={now!r})"
    assert cohort.seed == drawn.seed
    assert repr(cohort) == f"Cohort(plan={now!r})"  # also when the seed has been asked for
    assert repr(users()[0]) == "User()"


@dataclass(frozen=True, kw_only=True)
class HalvesClip(Clip):
    """A clip that no engine has kernels for: each half of the vector has its own ball."""

    norm: float

    def balls(self, layout: Layout) -> list[Ball]:
        middle = layout.total // 2
        return [Ball(slice(0, middle), self.norm), Ball(slice(middle, layout.total), self.norm)]

    def l2_bound(self, layout: Layout) -> float:
        return self.norm * 1.5


@every_fast_engine
def test_a_clip_that_the_kernels_do_not_know_is_applied_after_local_steps_all_the_same(fast, model):
    assert both(fast, model, UPDATES[0], HalvesClip(norm=0.2))[1] < 1e-4


def test_a_chunk_refuses_a_clip_that_its_kernels_do_not_know(model):
    plan = unheard.Plan(
        population=50, sampling=unheard.PoissonSampling(users_per_round=7), update=UPDATES[0],
        clip=HalvesClip(norm=0.2), noise=unheard.GaussianNoise(noise_multiplier=1.0),
    ).at(0, model.layout)  # fmt: skip
    cohort = Cohort(params_P=model.initial(1), users=users(), plan=plan, rng=reproducible_generator(1))
    engine, work = StackedEngine(model), Task.of(0, cohort)
    chunk = engine._take_chunk([(work, 0)], torch.float32, 1)
    with pytest.raises(InvalidValue, match="cannot apply the clip"):
        chunk.fill([cohort], [(work, 0)])
