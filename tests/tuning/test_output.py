"""The plan that `tune` writes: the paper's figures, and properties for any chosen S and sigma."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import unheard
from unheard.errors import InvalidValue
from unheard.mechanism.aggregation import ClippedDenominator, TrueAverage
from unheard.mechanism.noise import NoNoise
from unheard.privacy.events import PoissonGaussian
from unheard.tuning.output import check_can_be_private, private_run, project_plan, users_for
from unheard.tuning.trials import Grid
from unheard.updates.user_update import CappedWeights


@pytest.fixture(scope="session")
def paper(model, plan):
    """The paper's population, delta and rounds with a small model: z and epsilon do not depend on the model."""
    return unheard.Run(
        corpus="nowhere",
        model=model,
        plan=replace(plan, population=763_430),
        delta=1e-9,
        training=unheard.Training(rounds=5000),
    )


@pytest.mark.parametrize(
    ("norm", "noise_std", "users", "epsilon"),
    [(15, 0.003, 5000, 4.634), (10, 0.006, 1667, 2.314), (15, 0.012, 1250, 2.038)],
)
def test_the_papers_choices_give_the_papers_users_and_epsilons(paper, norm, noise_std, users, epsilon):
    found = project_plan(paper, norm, noise_std, 1.0)
    assert found.users_per_round == users
    assert found.epsilon["moments"] == pytest.approx(epsilon, abs=6e-4)
    assert found.epsilon[found.claimed] < found.epsilon["moments"]
    assert found.updates == 5000 * users


@given(
    norm=st.floats(0.1, 100),
    noise_std=st.floats(1e-4, 1),
    z=st.floats(0.3, 3),
    clipped=st.booleans(),
    capped=st.booleans(),
)
def test_the_plan_has_the_asked_z_and_no_more_noise_than_was_tried(paper, norm, noise_std, z, clipped, capped):
    """z is exact for any estimator and weights. sigma is at most the chosen one, and lower by less than one part in C."""
    weights = CappedWeights(weight_cap=100, total_weight=500_000) if capped else paper.plan.weights
    estimator = ClippedDenominator(min_total_weight=400_000) if clipped else paper.plan.estimator
    run = replace(paper, plan=replace(paper.plan, weights=weights, estimator=estimator))
    users = users_for(run, norm, noise_std, z)
    if users > run.plan.population:
        return
    chosen = private_run(run, norm, users, z).plan.at(0, run.model.layout)
    assert chosen.event() == PoissonGaussian(sampling_prob=users / 763_430, noise_multiplier=z)
    std = chosen.noise.std(chosen.sensitivity)
    assert std <= noise_std * (1 + 1e-9)
    if users > 1:
        assert std >= noise_std * (1 - 1 / users) * (1 - 1e-4 * clipped) * (1 - 1e-9)


def test_a_population_too_small_for_the_noise_is_refused_with_the_largest_possible_z(paper):
    small = replace(paper, plan=replace(paper.plan, population=2500), delta=1e-5)
    with pytest.raises(InvalidValue, match=r"need 5,000 users per round.*z would be 0\.5"):
        project_plan(small, 15, 0.003, 1.0)


def test_correlated_noise_is_not_tuned(paper):
    correlated = replace(
        paper.plan,
        sampling=unheard.MinSeparationSampling(separation=2),
        noise=unheard.CorrelatedNoise(noise_multiplier=4.0, strategy="blt", buffers=2, rounds=5000),
    )
    with pytest.raises(InvalidValue, match="chooses S and sigma for independent noise"):
        check_can_be_private(replace(paper, plan=correlated), Grid(norms=(1.0,), noise_stds=(0.1,)), 1.0)


def test_a_run_without_clip_or_noise_is_planned_with_a_flat_clip_and_a_private_estimator(paper):
    plain = replace(
        paper.plan,
        sampling=unheard.FixedSizeSampling(users_per_round=10),
        clip=unheard.NoClip(),
        estimator=TrueAverage(),
        noise=NoNoise(),
    )
    chosen = project_plan(replace(paper, plan=plain), 15, 0.012, 1.0).run.plan
    assert chosen.clip == unheard.FlatClip(norm=15)
    assert chosen.estimator == unheard.FixedDenominator()
    assert chosen.sampling == unheard.PoissonSampling(users_per_round=1250)


def test_layers_keep_their_shares_at_another_s(paper, model):
    shares = {name: float(i + 1) for i, name in enumerate(model.layout.names)}
    run = replace(paper, plan=replace(paper.plan, clip=unheard.PerLayerClip(norms=shares)))
    chosen = private_run(run, 12.0, 1000, 1.0).plan.clip
    assert chosen.l2_bound(model.layout) == pytest.approx(12.0)
    assert chosen.norms["embedding"] * shares["projection_bias"] == pytest.approx(
        chosen.norms["projection_bias"] * shares["embedding"]
    )
