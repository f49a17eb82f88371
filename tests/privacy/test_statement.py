"""The statement says what the ledger says, and what the guarantee does not cover."""

import itertools
import json
import math
import re

import pytest

from unheard.errors import InvalidValue
from unheard.privacy.accountants import epsilons, replace_one_epsilon
from unheard.privacy.events import FailureProbability, Gaussian, NonPrivate, PoissonGaussian
from unheard.privacy.ledger import Ledger
from unheard.privacy.population_ledger import PopulationLedger
from unheard.privacy.population_statement import all_runs
from unheard.privacy.statement import compute_statement, render_text

ROUND = PoissonGaussian(sampling_prob=0.01, noise_multiplier=1)
FACTS = {
    "population": 10_000,
    "delta": 1e-5,
    "sampling": {"kind": "poisson", "sampling_prob": 0.01, "users_per_round": 100},
    "weights": {"kind": "capped", "weight_cap": 1600, "total_weight": 9000.0},
    "estimator": {"kind": "fixed_denominator"},
    "phases": [{"from_round": 0, "clip": "flat", "clip_norm": 15.0, "noise_multiplier": 1.0, "sensitivity": 0.15}],
    "update": {"kind": "fedavg", "learning_rate": 6.0},
    "randomness": {"mode": "secure", "generator": "AESCounter"},
    "vocabulary": {"kind": "public", "source": "wordfreq"},
}


def test_a_statement_is_strict_json_and_holds_every_part():
    told = compute_statement(FACTS, [ROUND] * 100)
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert told["unit"] == "user"
    assert told["adjacency"].startswith("add or remove one user")
    assert told["epsilon"] == epsilons([(ROUND, 100)], 1e-5)
    assert told["claimed"]["accountant"] == "pld"
    assert told["claimed"]["epsilon"] == told["epsilon"]["pld"]
    assert told["replace_one"]["epsilon"] == replace_one_epsilon([(ROUND, 100)], 1e-5).epsilon
    assert told["composed"] == [
        {"kind": "poisson_gaussian", "sampling_prob": 0.01, "noise_multiplier": 1.0, "times": 100}
    ]
    assert told["warnings"] == []
    assert "dp-accounting" in told["versions"]
    for name in ("sampling", "weights", "estimator", "phases", "randomness", "vocabulary", "update"):
        assert told[name] == FACTS[name]


def test_the_curve_has_a_dozen_points_that_fall():
    curve = compute_statement(FACTS, [ROUND] * 100)["curve"]
    assert len(curve) == 12
    assert all(a["epsilon"] < b["epsilon"] and a["delta"] > b["delta"] for a, b in itertools.pairwise(curve))


def test_the_page_says_what_a_reader_must_know():
    page = render_text(compute_statement(FACTS, [ROUND] * 100))
    for words in (
        "differential privacy for every user",
        "add or remove one user",
        "10000",
        "clip_norm 15",
        "<- claimed",
        "replace one user",
        "all intermediate models",
        "tuning",
        "evaluation",
        "secure",
        "dp-accounting",
    ):
        assert words in page
    assert "!!" not in page


def test_the_page_states_the_norm_of_a_flat_clip_once():
    def page(**phase):
        phases = [{"from_round": 0, **phase, "noise_multiplier": 1.0}]
        return render_text(compute_statement({**FACTS, "phases": phases}, [ROUND]))

    assert "clip flat, S = 15, noise_multiplier 1" in page(clip="flat, S = 15", clip_norm=15.0)
    assert "clip_norm 7.5" in page(clip="flat, S from 10 on following the 0.5 quantile", clip_norm=7.5)
    assert "clip_norm 15.5" in page(clip="flat, S = 15", clip_norm=15.5)


def test_a_run_without_noise_has_no_guarantee_and_says_why():
    told = compute_statement(FACTS, [ROUND, NonPrivate(reason="the run file asks for no noise")])
    assert told["claim"] == "no guarantee: epsilon is infinite (the run file asks for no noise)"
    assert told["epsilon"] == {"moments": "infinity", "rdp": "infinity", "pld": "infinity"}
    assert float(told["claimed"]["epsilon"]) == math.inf
    assert told["curve"] == []
    assert "no guarantee: epsilon is infinite" in render_text(told)


def test_a_known_seed_is_a_warning_of_the_statement():
    told = compute_statement({**FACTS, "randomness": {"mode": "reproducible", "generator": "AESCounter"}}, [ROUND])
    assert "DOES NOT HOLD against anyone who knows the seed" in told["warnings"][0]
    assert "!! REPRODUCIBLE NOISE" in render_text(told)


def test_dropped_duplicates_are_a_warning_of_the_statement():
    assert "several users were dropped" in compute_statement({**FACTS, "drop_duplicates": True}, [ROUND])["warnings"][0]


def test_a_large_delta_is_a_warning_of_the_statement():
    assert "not below 1/users" in compute_statement(FACTS, [ROUND], delta=1e-3)["warnings"][0]


def test_rounds_done_again_are_counted(tmp_path):
    ledger = Ledger.create(tmp_path / "ledger.jsonl", FACTS)
    ledger.charge(Gaussian(noise_multiplier=5), 0)
    for number in (0, 1, 2, 1, 2, 3):
        ledger.charge(ROUND, number)
    told = compute_statement(ledger.facts, ledger.entries)
    assert told["rounds"] == {"charged": 6, "redone": 2}
    assert "6, 2 of them for rounds charged before" in render_text(told)


def test_the_cost_of_the_vocabulary_is_stated_alone_and_included():
    paid = [Gaussian(noise_multiplier=5), FailureProbability(delta=1e-6)]
    told = compute_statement(FACTS, [*paid, ROUND])
    alone = epsilons(paid, 1e-5)["pld"]
    assert told["vocabulary_cost"]["epsilon"] == alone
    assert told["claimed"]["epsilon"] > alone
    assert "included below" in render_text(told)
    assert "nothing was charged" in render_text(compute_statement(FACTS, [ROUND]))


def test_missing_facts_are_named_as_missing():
    told = compute_statement({"population": 10_000}, [ROUND])
    assert told["delta"] == pytest.approx(10_000**-1.1)
    assert told["weights"] == told["phases"] == "not declared"
    assert render_text(told).count("not declared") >= 6


def test_without_a_delta_there_is_nothing_to_state():
    with pytest.raises(InvalidValue, match="--delta"):
        compute_statement({}, [ROUND])


def test_another_delta_and_another_epsilon_can_be_asked_for():
    told = compute_statement(FACTS, [ROUND] * 10, delta=1e-7, epsilon=1.0)
    assert told["delta"] == 1e-7
    assert 0 < told["asked"]["delta"] < 1
    assert "at epsilon 1" in render_text(told)


def test_a_long_schedule_is_cut_on_the_page_and_whole_in_the_data():
    phases = [{"from_round": i, "clip_norm": 1.0} for i in range(30)]
    told = compute_statement({**FACTS, "phases": phases}, [ROUND])
    assert len(told["phases"]) == 30
    assert "and 22 more" in render_text(told)


def test_nothing_charged_is_nothing_spent():
    told = compute_statement(FACTS, [])
    assert told["claimed"]["epsilon"] == 0.0
    assert told["rounds"] == {"charged": 0, "redone": 0}
    assert render_text(told)


@pytest.mark.parametrize("z", [0.7, 1.0, 1.3, 2.1, 5.0])
@pytest.mark.parametrize("delta", [1e-3, 1.23449e-5, 9.9994e-7])
def test_the_numbers_of_a_claim_are_rounded_up(tmp_path, z, delta):
    """A printed pair below the bound would claim more than was proved."""
    events = [PoissonGaussian(sampling_prob=0.03, noise_multiplier=z)] * 20
    population = PopulationLedger.open(tmp_path / "ledger.jsonl", {"corpus": "c"})
    population.register("r", {"name": "r", "delta": delta}, num_charged=0)
    for number, event in enumerate(events):
        population.charge("r", number, event, number)
    for content in (compute_statement({"delta": delta, "population": 500}, events), all_runs(population)):
        epsilon, printed = map(float, re.findall(r"\((.*?), (.*?)\)", content["claim"])[0])
        assert content["claimed"]["epsilon"] <= epsilon <= 1.001 * content["claimed"]["epsilon"]
        assert delta <= printed <= 1.01 * delta
