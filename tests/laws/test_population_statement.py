"""The statement about all runs: each figure is of the right events, and each warning names the right run."""

import json

import pytest

from unheard.errors import LedgerError
from unheard.privacy import population_statement
from unheard.privacy.accountants import FILTER_ORDERS, claim_rule, epsilon, epsilons, versions
from unheard.privacy.budget import Budget, odometer
from unheard.privacy.events import (
    ExampleGaussian,
    FailureProbability,
    Gaussian,
    NonPrivate,
    PoissonGaussian,
    Selection,
    to_record,
)
from unheard.privacy.population_ledger import FILE, PopulationLedger, open_population_ledger, vocabulary_run
from unheard.privacy.population_statement import (
    NOT_COVERED,
    all_runs,
    other_runs,
    render_all_runs,
    store_statement,
)
from unheard.privacy.statement import SYNTHETIC, rounded_up
from unheard.privacy.trade_off import figures, figures_of_pair

DELTA = 1.23456789e-3
ROUND = PoissonGaussian(sampling_prob=1.0, noise_multiplier=9.0)
OTHER = PoissonGaussian(sampling_prob=1.0, noise_multiplier=11.0)
VOCABULARY = [Gaussian(noise_multiplier=8.0), FailureProbability(delta=1e-4)]
SELECTION = Selection(sampling_prob=1.0, noise_multiplier=9.0, rounds=3, mean_trials=2, drawn_from="geometric")


@pytest.fixture
def population(tmp_path):
    """Return a ledger with a vocabulary and two runs, none of which has as many charges as another."""
    ledger = PopulationLedger.open(tmp_path / FILE, {"corpus": "c"})
    ledger.register("vocabulary", {"name": "the private vocabulary"}, num_charged=0)
    ledger.settle("vocabulary", VOCABULARY)
    # The first 4 and the first 2 entries of the runs' own ledgers are charged under other ids.
    for run, name, held, events in (("a", "first", 4, [ROUND] * 3), ("b", "second", 2, [OTHER] * 5)):
        ledger.register(run, {"name": name, "delta": DELTA * (1 + held)}, num_charged=held)
        for number, event in enumerate(events):
            ledger.charge(run, held + number, event, number)
    ledger.register("c", {}, num_charged=0)
    return ledger


@pytest.mark.parametrize("delta", [None, 0.07])
@pytest.mark.parametrize("budget", [None, 0.02])
def test_every_figure_of_a_total_is_that_of_its_own_events(population, delta, budget):
    if budget:
        population.set_budget(Budget(epsilon=5.0, delta=budget))
    content = all_runs(population, delta=delta)
    at = delta or budget or 3 * DELTA
    events = [*VOCABULARY, *[ROUND] * 3, *[OTHER] * 5]
    bound = odometer(((VOCABULARY[0], 1), (ROUND, 3), (OTHER, 5)), 1e-4, at)
    attacker = figures_of_pair(bound.epsilon, at)
    shares = [("vocabulary", "the private vocabulary", VOCABULARY), ("a", "first", [ROUND] * 3)]
    shares += [("b", "second", [OTHER] * 5), ("c", "not named", [])]
    assert set(content) == {
        *(
            "claim",
            "unit",
            "adjacency",
            "delta",
            "epsilon",
            "claimed",
            "basis",
            "attacker",
            "charges",
            "runs",
            "budget",
        ),
        *("warnings", "not_covered", "ledger", "versions"),
    }
    assert content["claim"] == (
        f"({rounded_up(bound.epsilon)}, {rounded_up(at, 3)})-differential privacy for every user over all runs together, "
        f"by {bound.accountant}"
    )
    assert content["delta"] == at
    assert content["epsilon"] == epsilons(events, at)
    assert content["claimed"] == {"epsilon": bound.epsilon, "accountant": bound.accountant, "of": claim_rule()}
    assert content["attacker"] == {**attacker.record, "method": attacker.method}
    assert content["charges"] == 10
    for shown, (run, name, own) in zip(content["runs"], shares, strict=True):
        alone = {"epsilon": epsilon(own, at, "rdp"), "accountant": "rdp"}
        assert shown == {"run": run, "name": name, "charges": len(own), "alone": alone, "came_with": 0}
    spent = Budget(epsilon=5.0, delta=budget or at).running(events).epsilon
    stated = {"epsilon": 5.0, "delta": budget, "accountant": "rdp", "spent": spent, "is_filter": False}
    assert content["budget"] == (stated if budget else None)
    assert content["not_covered"] == NOT_COVERED
    assert content["ledger"] == population.position
    assert content["versions"] == versions()
    assert json.loads(json.dumps(content, allow_nan=False)) == content


@pytest.mark.parametrize("runs", [0, 1, 2])
@pytest.mark.parametrize("delta", [DELTA / 2, DELTA, 2 * DELTA])
def test_the_declared_budget_is_the_claim_at_its_delta_and_above_for_any_number_of_runs(tmp_path, runs, delta):
    population = PopulationLedger.open(tmp_path / FILE, {})
    population.set_budget(Budget(epsilon=7.0, delta=DELTA, orders=FILTER_ORDERS))
    for run in range(runs):
        population.charge(str(run), 0, ROUND, 0)
    content = all_runs(population, delta=delta)
    assert (content["claimed"]["epsilon"] == 7.0) == (delta >= DELTA)
    assert content["budget"]["is_filter"] is True
    if delta >= DELTA:
        pair = figures_of_pair(7.0, delta)
        assert content["attacker"] == {**pair.record, "method": pair.method}
        assert "the declared budget" in content["claim"]
        assert content["basis"]["why"].startswith("the budget was declared before the first round")
    elif runs < 2:
        own = figures([ROUND] * runs, delta)
        assert content["attacker"] == {**own.record, "method": own.method}


EXAMPLES = ExampleGaussian(sampling_prob=1.0, examples_per_user=2, noise_multiplier=9.0)
SEEDED = {"mode": "reproducible", "streams": 1}


@pytest.mark.parametrize(
    ("facts", "events", "begun", "expected"),
    [
        ({}, [ROUND], 1, []),
        ({"randomness": {"mode": "secure"}}, [ROUND], 1, []),
        ({"randomness": None}, [ROUND], 1, []),
        ({"randomness": SEEDED}, [ROUND], 1, ["REPRODUCIBLE NOISE in"]),
        ({"randomness": SEEDED}, [ROUND], 2, ["REPRODUCIBLE NOISE in", "was repeated"]),
        ({"randomness": {"mode": "reproducible"}}, [ROUND], 1, ["REPRODUCIBLE NOISE in", "begun by an older version"]),
        (
            {"randomness": {"mode": "reproducible"}},
            [ROUND],
            2,
            ["REPRODUCIBLE NOISE in", "was repeated", "begun by an older version"],
        ),
        ({}, [ROUND, NonPrivate(reason="x"), ROUND], 1, ["added no noise"]),
        ({}, [SELECTION], 1, ["is the best of a secret number of runs"]),
        ({}, [SELECTION, ROUND], 1, ["is the best of a secret number of runs"]),
        ({"came_with": 17}, [ROUND], 1, ["came here with 17 charges from another ledger"]),
        ({"came_with": 0}, [ROUND], 1, []),
        ({"drop_duplicates": True}, [ROUND], 1, ["were dropped before training"]),
        ({"drop_duplicates": False}, [ROUND], 1, []),
        ({"synthetic": "fitted to a"}, [ROUND], 1, ["SYNTHETIC TEXT: the users of this store are not people"]),
        ({"start": {"synthetic": "fitted to a"}}, [ROUND], 1, ["SYNTHETIC TEXT: the run that this one began from"]),
        ({"start": {"from": "a model declared public"}}, [ROUND], 1, ["declared public"]),
        ({"start": {"base": "a model declared public"}}, [ROUND], 1, ["declared public"]),
        ({"start": {"from": "seed 0"}}, [ROUND], 1, []),
        ({"population": int(1 / DELTA) + 1}, [ROUND], 1, ["is not below 1/users"]),
        ({"population": int(1 / DELTA)}, [ROUND], 1, []),
        ({}, [EXAMPLES], 1, ["examples were drawn, not users, and at most 2 examples"]),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_each_weakness_of_one_run_is_a_warning_that_names_it(tmp_path, facts, events, begun, expected, is_first):
    population = PopulationLedger.open(tmp_path / FILE, {})
    for name in ("reproducible-x", "another")[:: 1 if is_first else -1]:
        own = facts if name != "another" else {}
        for _ in range(begun if name != "another" else 1):
            population.register(name, {"name": f"the {name}", **own}, num_charged=0, is_new=True)
        population.settle(name, events if name != "another" else [ROUND])
    content = all_runs(population, delta=DELTA)
    assert len(content["warnings"]) == len(expected)
    for warning, words in zip(content["warnings"], expected, strict=True):
        assert words in warning
        assert "run 'the reproducible-x'" in warning
    assert ("for every user except those" in content["claim"]) == ("synthetic" in str(facts))
    lines = render_all_runs(content).splitlines()
    assert [line for line in lines if "!!" in line] == [f"  !! {warning}" for warning in content["warnings"]]


def test_a_claim_without_a_guarantee_names_the_runs_without_noise_and_no_others(tmp_path):
    population = PopulationLedger.open(tmp_path / FILE, {})
    population.settle("z", [NonPrivate(reason="x")])
    population.settle("b", [ROUND])
    population.settle("a", [NonPrivate(reason="y"), ROUND])
    assert all_runs(population, delta=DELTA)["claim"] == (
        "no guarantee over all runs: epsilon is infinite (without noise: a, z)"
    )
    failed = PopulationLedger.open(tmp_path / "failed.jsonl", {})
    failed.settle("a", [FailureProbability(delta=0.5), ROUND])
    assert all_runs(failed, delta=DELTA)["claim"] == (
        "no guarantee over all runs: epsilon is infinite (no epsilon holds at this delta)"
    )


def test_each_run_has_the_epsilon_of_its_own_events_by_an_accountant_that_has_a_bound(tmp_path, monkeypatch):
    population = PopulationLedger.open(tmp_path / FILE, {})
    event = ExampleGaussian(sampling_prob=1.0, examples_per_user=2, noise_multiplier=9.0)
    population.settle("a", [event, ROUND])
    population.settle("b", [ROUND])
    monkeypatch.setattr(population_statement, "epsilon", lambda *args: args)
    for run, events, accountant in (("a", [event, ROUND], "pld"), ("b", [ROUND], "rdp")):
        alone = population_statement._run_share(population.runs[run], DELTA)["alone"]
        assert alone == {"epsilon": (events, DELTA, accountant), "accountant": accountant}


def test_the_other_runs_are_those_that_were_charged_under_other_ids(population):
    """A run that began and was charged for nothing is none, and a run without a name is named by its id."""
    population.settle(vocabulary_run("c" * 64), [ROUND])
    population.settle("unnamed", [ROUND])
    everything = ["the private vocabulary", "first", "second", vocabulary_run("c" * 64), "unnamed"]
    for own, corpus, left_out in (
        ("a", "d" * 64, ["first"]),
        ("b", "c" * 64, ["second", vocabulary_run("c" * 64)]),
        ("c", "d" * 64, []),
        ("unnamed", "d" * 64, ["unnamed"]),
    ):
        assert other_runs(population, own, corpus) == [name for name in everything if name not in left_out]


def store_of(folder, **vocabulary):
    folder.mkdir(parents=True)
    (folder / "corpus.json").write_text(json.dumps({"vocabulary": {"kind": "drawn", **vocabulary}}))
    return folder


@pytest.mark.parametrize("delta", [None, 0.02])
def test_a_store_without_runs_has_the_cost_of_its_vocabulary_at_the_delta_that_is_asked_for(tmp_path, delta):
    records = [to_record(event) for event in VOCABULARY]
    content = store_statement(store_of(tmp_path / "s", events=records, delta=0.01), delta=delta)
    at = delta or 0.01
    assert (content["delta"], content["charges"]) == (at, 2)
    assert content["epsilon"] == epsilons(VOCABULARY, at)
    assert content["claimed"]["epsilon"] == min(content["epsilon"]["rdp"], content["epsilon"]["pld"])
    assert [(run["name"], run["charges"]) for run in content["runs"]] == [("the private vocabulary", 2)]
    assert [warning[:26] for warning in content["warnings"]] == ["this store has no ledger y"]
    assert content["budget"] is None
    assert "this store has no ledger yet" in render_all_runs(content)
    public = store_statement(store_of(tmp_path / "p"), delta=delta)
    assert (public["charges"], public["runs"]) == (0, [])
    assert "its vocabulary (drawn) is declared public" in public["claim"]
    assert public["warnings"] == content["warnings"]
    assert render_all_runs(public).count("\n") == 4  # without figures


@pytest.mark.parametrize("events", [[], [to_record(event) for event in VOCABULARY]], ids=["public", "private"])
def test_a_store_of_synthetic_text_warns_first_of_those_from_whose_text_it_was_made(tmp_path, events):
    """Also if a version that did not warn has written the ledger."""
    store = store_of(tmp_path / "s", events=events, delta=0.01)
    record = json.loads((store / "corpus.json").read_text())
    (store / "corpus.json").write_text(json.dumps({**record, "synthetic": True, "fitted_to": "posts"}))
    content = store_statement(store)
    assert content["warnings"][0] == SYNTHETIC
    assert len(content["warnings"]) == 2
    population = open_population_ledger(store, "c", [])
    population.settle("a run of an older version", [ROUND])
    total = all_runs(PopulationLedger.read(store / FILE), delta=DELTA)
    for stated in (total, content)[: 2 if events else 1]:
        assert stated["warnings"][0] == SYNTHETIC
        assert "for every user except those to whom the synthetic text was fitted over all runs" in stated["claim"]


@pytest.mark.parametrize("what", ["a part", "a lost ledger", "another kind of event", "no kind", "a list"])
def test_a_store_whose_charges_are_not_known_has_no_statement(tmp_path, what):
    store = store_of(tmp_path / "s", events=[{"kind": "free"}] if what == "another kind of event" else [])
    if what == "a part":
        (store / "part.json").write_text("{}")
    if what == "a lost ledger":
        open_population_ledger(store, "c", [])
        (store / FILE).unlink()
    if what in ("no kind", "a list"):
        (store / "corpus.json").write_text(json.dumps({"vocabulary": {"events": []} if what == "no kind" else []}))
    with pytest.raises(LedgerError):
        store_statement(store)


PAGE = {
    "claim": "THE CLAIM",
    "warnings": ["first", "second"],
    "charges": 9,
    "delta": 0.00031,
    "epsilon": {"moments": 3.1, "rdp": 2.1, "pld": 1.1},
    "claimed": {"epsilon": 4.1, "accountant": "an odometer"},
    "basis": {"why": "the reason"},
    "attacker": {
        "mu": 0.51234,
        "true_positive_rates": [
            {"false_positive_rate": 0.001, "at_most": 0.0123411},
            {"false_positive_rate": 0.01, "at_most": 0.25},
        ],
    },
    "budget": {"epsilon": 6.1, "delta": 0.0071, "accountant": "rdp", "spent": 5.1},
    "runs": [
        {"name": "one", "charges": 1, "alone": {"epsilon": 0.11, "accountant": "pld"}},
        {"name": "two", "charges": 2345, "alone": {"epsilon": 0.22, "accountant": "rdp"}},
    ],
    "not_covered": ["three", "four"],
}  # fmt: skip


def test_each_row_of_the_page_of_a_total_has_the_figures_of_its_own_entry():
    lines = render_all_runs(PAGE).splitlines()
    assert lines[2:5] == ["  THE CLAIM", "  !! first", "  !! second"]
    rows = [(line[2:20].strip(), line[20:]) for line in lines[5:] if line]
    assert rows == [
        ("delta", "0.00031"),
        ("epsilon, moments", "3.1"),
        ("epsilon, rdp", "2.1"),
        ("epsilon, pld", "1.1"),
        ("epsilon, claimed", "4.1  (by an odometer)"),
        ("why this claim", "the reason"),
        ("mu-GDP", "0.5124 for all deltas from 0.00031 up"),
        ("attacker", "at most 1.235 % true positives at 0.1 % false positives"),
        ("attacker", "at most 25 % true positives at 1 % false positives"),
        ("budget", "5.1 of 6.1 spent at delta 0.0071, by rdp"),
        ("runs", "one: 1 charge, epsilon 0.11 alone by pld"),
        ("", "two: 2,345 charges, epsilon 0.22 alone by rdp"),
        ("not covered", "three"),
        ("", "four"),
    ]
    other = {**PAGE, "budget": None, "claimed": {"epsilon": 2.1, "accountant": "rdp"}}
    other["attacker"] = {**PAGE["attacker"], "mu": None}
    page = render_all_runs(other)
    assert "mu-GDP" not in page
    assert "epsilon, claimed" not in page
    assert [line for line in page.splitlines() if "claimed" in line] == ["  epsilon, rdp      2.1  <- claimed"]
    assert "none set for all runs" in page
