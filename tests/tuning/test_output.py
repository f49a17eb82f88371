"""The plan that `tune` writes: the paper's figures, and properties for any chosen S and sigma; its record."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import unheard
from unheard.errors import InvalidValue
from unheard.mechanism.aggregation import ClippedDenominator, TrueAverage
from unheard.mechanism.noise import NoNoise
from unheard.privacy.accountants import Bound
from unheard.privacy.events import PoissonGaussian
from unheard.tuning import output
from unheard.tuning.output import TuningCost, check_can_be_private, conclude, private_run, project_plan, users_for
from unheard.tuning.pipeline import Allowance, Choice, TuningResult
from unheard.tuning.trials import Grid, Margin, Result
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


def test_the_record_of_a_plan_has_z_and_sigma_to_the_last_digit(paper):
    record = (found := project_plan(paper, 15.4321, 0.00312345, 1.0456789)).record(None)
    assert record["noise_multiplier"] == found.run.plan.noise.noise_multiplier == 1.0456789
    assert record["noise_std"] == found.noise_std == pytest.approx(1.0456789 * 15.4321 / found.users_per_round)


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


def test_every_figure_of_the_record_and_every_remark_is_that_of_the_result(paper, tmp_path, monkeypatch):
    """The figures differ from each other, so that one in the place of another is noticed."""
    cost = TuningCost(
        corpus="c",
        is_proxy=True,
        runs=6,
        charges=70,
        without_noise=50,
        delta=1e-7,
        bound=Bound(epsilon=math.inf, accountant="rdp"),
        noised=Bound(epsilon=3.5, accountant="pld"),
    )
    monkeypatch.setattr(output, "tuning_cost", lambda trials, out, *, is_proxy: replace(cost, is_proxy=is_proxy))
    monkeypatch.setattr(output, "users_per_second", lambda out: 12.5)
    asked, quick = [], {"moments": 4.75, "rdp": 4.25, "pld": 4.5}
    monkeypatch.setattr(output, "epsilons", lambda *given: asked.append(given) or quick)
    settings = {  # stage, S, sigma, the last evaluations of each seed
        "baseline": ("baseline", math.inf, 0.0, ((0.50, 0.52), (0.54,))),
        "near": ("clip", 5.0, 0.0, ((0.51, 0.53, 0.49),)),
        "S": ("clip", 15.0, 0.0, ((0.40,),)),
        "sigma": ("noise", 15.0, 0.003, ((0.35, 0.37),)),
    }
    results = {
        name: Result(stage=stage, norm=norm, noise_std=std, name=name, last=last)
        for name, (stage, norm, std, last) in settings.items()
    }
    tuned = TuningResult(
        trials=(),
        results=tuple(results.values()),
        margin=Margin(points=3.0, of_seeds=True),
        norm=Choice(result=results["S"], loss=0.11, remarks=("about S", "and more")),
        noise=Choice(result=results["sigma"], loss=0.22, remarks=("about sigma",)),
    )
    allowance, engine = Allowance(clip_loss=0.3, loss=0.6), unheard.EngineChoice()
    conclusion = conclude(paper, tuned, allowance, 1.0, tmp_path, engine, is_proxy=True)
    record = json.loads((tmp_path / "tuning.json").read_text())
    assert record == conclusion.record
    rows = {row["stage"] + str(row["norm"]): row for row in record["trials"]}
    by_name = dict(zip(settings, rows.values(), strict=True))
    assert [(row["seeds"], row["evaluations"]) for row in by_name.values()] == [(2, 1), (1, 3), (1, 1), (1, 2)]
    assert [row["norm"] for row in by_name.values()] == ["infinity", 5.0, 15.0, 15.0]
    assert [row["noise_std"] for row in by_name.values()] == [0.0, 0.0, 0.0, 0.003]
    assert [row["accuracy_top1"] for row in by_name.values()] == pytest.approx([0.525, 0.51, 0.40, 0.36])
    assert by_name["baseline"]["accuracy_top1_of_seeds"] == pytest.approx([0.51, 0.54])
    assert [row["loss_points"] for row in by_name.values()] == pytest.approx([0.0, 1.5, 12.5, 16.5])
    assert [row["within_noise"] for row in by_name.values()] == [False, True, False, False]
    assert [row["chosen"] for row in by_name.values()] == [False, False, True, True]
    assert (record["margin_points"], record["margin_is_of_repeated_runs"]) == (3.0, True)
    assert record["allowed"] == {"clip_loss": 0.3, "loss": 0.6}
    remarks = ["about S", "and more", "about sigma"]
    assert record["chosen"] == {"norm": 15.0, "noise_std": 0.003, "loss_points": 0.22, "remarks": remarks}
    stated = {"corpus": "c", "is_proxy": True, "runs": 6, "charges": 70, "charges_without_noise": 50, "delta": 1e-7}
    assert record["tuning_cost"] == {**stated, "epsilon": "infinity", "accountant": "rdp", "epsilon_of_the_noised": 3.5}
    plan = record["plan"]
    event = PoissonGaussian(sampling_prob=5000 / 763_430, noise_multiplier=1.0)
    assert asked == [([(event, 5000)], 1e-9)]
    assert plan["epsilon"] == quick
    assert plan["claimed"] == {"epsilon": 4.25, "accountant": "rdp"}
    assert (plan["users_per_round"], plan["population"], plan["rounds"], plan["delta"]) == (5000, 763_430, 5000, 1e-9)
    assert (plan["sampling_prob"], plan["noise_multiplier"], plan["hypothetical"]) == (5000 / 763_430, 1.0, True)
    assert (plan["updates"], plan["users_per_second"], plan["seconds"]) == (25_000_000, 12.5, 2_000_000.0)
    sentences = " ".join(conclusion.cost.sentences)
    assert "ε = infinity at δ = 10⁻⁷" in sentences
    assert "composition of its 6 runs (70 charges, 50 of them without noise)" in sentences
    for is_proxy, words in ((True, "on proxy text."), (False, "over all runs they have no guarantee.")):
        conclude(paper, tuned, allowance, 1.0, tmp_path, engine, is_proxy=is_proxy)
        preface = (tmp_path / "chosen.toml").read_text()
        assert words in preface
        assert "epsilon 4.25 at delta 1e-09 (accountant rdp)" in preface
