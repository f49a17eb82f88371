"""Each figure and each fact of a statement stands in its own place, in the data, on the page and in every other form."""

import json
import math
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from unheard.privacy import statement, statement_formats
from unheard.privacy.accountants import (
    CLAIMED,
    best_epsilon,
    claim_rule,
    delta_at,
    epsilons,
    replace_one_epsilon,
    versions,
)
from unheard.privacy.budget import DECLARED, WHY, declaration
from unheard.privacy.events import (
    CorrelatedGaussian,
    DistributedGaussian,
    ExampleGaussian,
    FailureProbability,
    Gaussian,
    NonPrivate,
    PoissonGaussian,
    Selection,
    to_record,
)
from unheard.privacy.ledger import Entry
from unheard.privacy.statement import (
    ALONE,
    NOT_COVERED,
    NOT_DECLARED,
    RELEASED,
    compute_statement,
    plain,
    render_text,
    rounded_up,
)
from unheard.privacy.statement_formats import (
    FORMATS,
    SETTINGS,
    attacker_figures,
    claimed_events,
    composed_events,
    markdown_line,
    render,
    report_data,
)
from unheard.privacy.trade_off import figures, figures_of_pair

DELTA = 1.23456789e-3
ROUND = PoissonGaussian(sampling_prob=1.0, noise_multiplier=9.0)
VOCABULARY = [Gaussian(noise_multiplier=8.0), FailureProbability(delta=1e-4)]
SELECTION = Selection(sampling_prob=1.0, noise_multiplier=9.0, rounds=3, mean_trials=2, drawn_from="geometric")
TABLES = ("sampling", "weights", "estimator", "update", "vocabulary", "randomness", "software")
FACTS = {
    **{name: {"kind": f"the {name}", "number": 0.5 + i} for i, name in enumerate(TABLES)},
    "phases": [{"from_round": 77}],
    "correlated_noise": {"strategy": "blt"},
    "federated": {"secure_aggregation": True},
    "population": 123,
    "delta": DELTA,
    "run_id": "r",
    "start": {"from": "seed 0", "charges": len(VOCABULARY)},
    "declared": declaration(9, [(0, to_record(ROUND))], None),
}


def stopped() -> list[Entry]:
    """Return the entries of a run that was stopped after 5 of 9 rounds, with round 2 repeated."""
    charged = [(0, VOCABULARY[0]), (0, VOCABULARY[1]), *((number, ROUND) for number in (0, 1, 2, 2, 3, 4))]
    return [Entry(event=event, round=number, hash=f"hash {i}") for i, (number, event) in enumerate(charged)]


def test_every_figure_of_a_statement_is_that_of_its_own_events():
    content = compute_statement(FACTS, stopped(), epsilon=0.75)
    charged, claimed = [*VOCABULARY, (ROUND, 6)], [*VOCABULARY, (ROUND, 10)]
    best, two, alone = (
        best_epsilon(claimed, DELTA),
        replace_one_epsilon(claimed, DELTA),
        best_epsilon(VOCABULARY, DELTA),
    )
    assert content["delta"] == DELTA
    assert content["epsilon"] == epsilons(charged, DELTA)
    assert content["claimed"]["epsilon"] == best.epsilon
    assert content["claimed"]["accountant"].startswith(best.accountant)
    assert content["claimed"]["of"] == claim_rule()
    assert content["basis"]["of"] == DECLARED
    assert content["basis"]["why"] == WHY[DECLARED]
    assert content["replace_one"] == {"epsilon": two.epsilon, "accountant": two.accountant}
    assert content["rounds"] == {"charged": 6, "redone": 1}
    for where, times in ((content, 6), (content["basis"], 10)):
        of_vocabulary = [{**to_record(event), "times": 1} for event in VOCABULARY]
        assert sorted(where["composed"], key=repr) == sorted(
            [*of_vocabulary, {**to_record(ROUND), "times": times}], key=repr
        )
    expected = {"events": 2, "epsilon": alone.epsilon, "delta": DELTA, "accountant": alone.accountant}
    assert content["vocabulary_cost"] == expected
    assert (content["released"], content["not_covered"]) == (RELEASED, NOT_COVERED)
    assert content["versions"] == versions()
    assert content["ledger"] == {"charges": 8, "head": "hash 7"}
    assert content["unit"] == "user"
    asked = content["asked"]
    assert asked["epsilon"] == 0.75
    assert asked["delta"] == pytest.approx(min(delta_at(claimed, 0.75, name) for name in CLAIMED))
    assert "against_server" not in content
    assert content["claim"] == (
        f"({rounded_up(best.epsilon)}, 0.00124)-differential privacy for every user, by {content['claimed']['accountant']}"
    )
    curve = content["curve"]
    assert len(curve) == 12
    assert [p["epsilon"] for p in curve] == pytest.approx(np.linspace(best.epsilon / 4, 2 * best.epsilon, 12))
    for point in (curve[0], curve[5], curve[-1]):
        assert point["delta"] == pytest.approx(min(delta_at(claimed, point["epsilon"], name) for name in CLAIMED))


def test_each_fact_of_a_ledger_has_its_own_place_and_its_absence_is_stated_there_alone():
    whole = compute_statement(FACTS, stopped())
    copied = [*TABLES, "phases", "population", "start", "correlated_noise", "federated"]
    for name in copied:
        assert whole[name] == FACTS[name]
    for name in copied:
        if name == "start":
            continue  # the claim needs it
        less = compute_statement({key: value for key, value in FACTS.items() if key != name}, stopped())
        if name in ("correlated_noise", "federated"):
            assert {*whole} - {*less} == {name}
        else:
            assert less == {**whole, name: NOT_DECLARED}


def test_an_epsilon_of_zero_may_be_asked_for_and_a_delta_replaces_the_declared_one():
    content = compute_statement(FACTS, stopped(), epsilon=0.0, delta=1e-2)
    assert content["delta"] == 1e-2
    assert content["asked"]["epsilon"] == 0.0
    assert 1e-2 < content["asked"]["delta"] < 1
    assert content["claimed"]["epsilon"] == best_epsilon([*VOCABULARY, (ROUND, 10)], 1e-2).epsilon
    assert content["vocabulary_cost"]["delta"] == 1e-2
    assert compute_statement(FACTS, stopped())["asked"] is None


@pytest.mark.parametrize("order", [(2, 5, 3), (5, 2), (3, 5)])
def test_the_warning_about_examples_has_the_largest_number_per_user(order):
    events = [ExampleGaussian(sampling_prob=1.0, examples_per_user=n, noise_multiplier=9.0) for n in order]
    (warning,) = statement.cautions({}, [ROUND, *events, ROUND], DELTA)
    assert "at most 5 examples of each user were used" in warning


def test_each_kind_of_event_has_its_own_warning():
    poisson = replace(SELECTION, drawn_from="poisson", mean_trials=7)
    warnings = statement.cautions({"population": 9}, [ROUND, SELECTION, *VOCABULARY, poisson], 0.1)
    assert [words in warning for warning in warnings for words in ("geometric, 2 on", "poisson, 7 on")] == [
        True,
        False,
        False,
        True,
    ]
    assert statement.cautions({"population": 9}, [ROUND, NonPrivate(reason="x"), ROUND], 0.1) == [
        "not every round was private: epsilon is infinite."
    ]
    assert statement.cautions({"population": 10}, [ROUND], 0.1)[0].startswith("delta 0.1 is not below 1/users = 0.1")
    for is_alone in (True, False):
        assert compute_statement({"delta": DELTA}, [ROUND], is_alone=is_alone)["warnings"] == [ALONE] * is_alone


@pytest.mark.parametrize("reasons", [[], ["b"], ["b", "a", "b"]])
def test_a_statement_without_a_guarantee_names_each_reason_once(reasons):
    events = [NonPrivate(reason=reason) for reason in reasons] or [FailureProbability(delta=0.5)]
    content = compute_statement({"delta": DELTA}, [ROUND, *events])
    why = "; ".join(sorted(set(reasons))) or "no epsilon holds at this delta for the noise that was added"
    assert content["claim"] == f"no guarantee: epsilon is infinite ({why})"
    assert content["claimed"]["epsilon"] == content["replace_one"]["epsilon"] == "infinity"
    assert content["curve"] == []


def test_values_become_strict_json_at_any_depth():
    given = {"a": (math.inf, [-math.inf, {"b": (1, 2.5, None, True)}]), 7: "x"}
    assert plain(given) == {"a": ["infinity", ["-infinity", {"b": [1, 2.5, None, True]}]], "7": "x"}
    assert json.loads(json.dumps(plain(given), allow_nan=False)) == plain(given)


def test_a_number_that_is_rounded_up_is_never_below_and_at_most_one_unit_above():
    rng = np.random.default_rng(5)
    bounds = [*(10 ** rng.uniform(-12, 6, size=2000)), 9.99949, 0.99995, 0.0099951, 999.95, 1.0, 1e-9, 0.3, 12344.999]
    for digits in (1, 3, 4):
        for bound in map(float, bounds):
            shown = float(rounded_up(bound, digits))
            unit = 10.0 ** (math.floor(math.log10(bound)) - digits + 1)
            assert bound <= shown <= bound + unit * 1.001
    assert [rounded_up(value) for value in (0.0, "infinity", 3, -1.0)] == ["0", "infinity", "3", "-1"]


PAGE = {
    "claim": "THE CLAIM",
    "warnings": ["first warning", "second warning"],
    "unit": "the unit",
    "adjacency": "the adjacency",
    "population": 1234,
    "sampling": {"kind": "s", "sampling_prob": 0.0123456, "nothing": None},
    "weights": {"kind": "w"},
    "estimator": {"kind": "e"},
    "update": {"kind": "u", "more": {"rate": 0.5}},
    "rounds": {"charged": 61, "redone": 7},
    "phases": [{"from_round": i} for i in range(8)],
    "correlated_noise": {
        "strategy": "banded", "rounds": 101, "separation": 102, "participations": 103, "sensitivity": 1.04, "block": 105,
        "sampling_prob": 0.106, "noise_multiplier": 1.07,
    },
    "vocabulary": {"kind": "v"},
    "vocabulary_cost": {"events": 2, "epsilon": 0.21, "delta": 0.0022, "accountant": "x"},
    "randomness": {"mode": "m"},
    "delta": 0.00031,
    "epsilon": {"moments": 3.1, "rdp": 2.1, "pld": 1.1},
    "claimed": {"epsilon": 4.1, "accountant": "the claim's accountant"},
    "basis": {"why": "the reason"},
    "replace_one": {"epsilon": 5.1, "accountant": "of two"},
    "against_server": {"epsilon": 6.1, "accountant": "of the server"},
    "asked": {"epsilon": 7.1, "delta": 0.0071},
    "curve": [{"epsilon": 8.0 + i / 100, "delta": 0.009 - i / 10000} for i in range(12)],
    "released": ["one", "two"],
    "not_covered": ["three", "four"],
    "versions": {"a": "1", "b": "2"},
}  # fmt: skip


def rows_of(page: str) -> dict[str, list[str]]:
    """Return the rows of a page by their names. A row without a name belongs to the one before it."""
    rows, name = {}, ""
    for line in page.splitlines():
        if line.startswith("  ") and len(line) > 20 and not line.startswith(("  !!", "  THE")):
            name = line[2:20].strip() or name
            rows.setdefault(name, []).append(line[20:])
    return rows


def test_each_row_of_the_page_has_the_figures_of_its_own_entry():
    page = render_text(PAGE)
    rows = rows_of(page)
    assert page.splitlines()[:5] == [
        "PRIVACY STATEMENT",
        "",
        "  THE CLAIM",
        "  !! first warning",
        "  !! second warning",
    ]
    expected = {
        "unit": ["the unit"],
        "adjacency": ["the adjacency"],
        "population": ["1234"],
        "sampling": ["kind s, sampling_prob 0.01235"],
        "weights": ["kind w"],
        "estimator": ["kind e"],
        "update": ["kind u, more rate 0.5"],
        "phases": [f"from_round {i}" for i in range(8)],
        "vocabulary": ["kind v"],
        "vocabulary cost": ["epsilon 0.21 at delta 0.0022 by itself, included below"],
        "randomness": ["mode m"],
        "delta": ["0.00031"],
        "epsilon, rdp": ["2.1"],
        "epsilon, pld": ["1.1"],
        "epsilon, claimed": ["4.1  (by the claim's accountant)"],
        "why this claim": ["the reason"],
        "replace one user": ["5.1 (by of two)"],
        "against server": ["6.1 (by of the server): it knows who was drawn"],
        "asked": ["delta 0.0071 at epsilon 7.1"],
        "delta(epsilon)": [f"{8 + i / 100:.4g}: {0.009 - i / 10000:.4g}" for i in range(12)],
        "covered": ["one", "two"],
        "not covered": ["three", "four"],
        "computed with": ["a 1, b 2"],
    }
    assert {name: rows.get(name) for name in expected} == expected
    assert {*rows} - {*expected} == {"rounds charged", "correlated noise", "epsilon, moments"}
    assert rows["rounds charged"][0].startswith("61, 7 of them for rounds charged before")
    assert rows["epsilon, moments"][0].startswith("3.1")
    noise = PAGE["correlated_noise"]
    letters = {"T": "rounds", "b": "separation", "k": "participations", "q": "sampling_prob", "z": "noise_multiplier"}
    for letter, name in letters.items():
        assert f", {letter} = {noise[name]}" in rows["correlated noise"][0]
    assert "sensitivity 1.04" in rows["correlated noise"][0]
    assert "each 105 rounds are one release" in rows["correlated noise"][0]
    other = render_text({**PAGE, "correlated_noise": {**noise, "strategy": "blt"}})
    assert "one release in all" in other
    assert "each 105 rounds" not in other


@pytest.mark.parametrize("claimed", ["moments", "rdp", "pld"])
def test_the_page_marks_the_accountant_that_is_claimed_and_no_other(claimed):
    rows = rows_of(render_text({**PAGE, "claimed": {"epsilon": 9.0, "accountant": claimed}}))
    assert [name for name, (value, *_) in rows.items() if "<- claimed" in value] == [f"epsilon, {claimed}"]
    assert "epsilon, claimed" not in rows


def test_a_page_of_version_0_1_or_without_some_entries_lacks_only_their_rows():
    whole = rows_of(render_text(PAGE))
    for name, row in (
        ("basis", "why this claim"),
        ("against_server", "against server"),
        ("correlated_noise", "correlated noise"),
    ):
        less = rows_of(render_text({key: value for key, value in PAGE.items() if key != name}))
        assert {key: whole[key] for key in whole if key != row} == less
    less = rows_of(render_text({**PAGE, "asked": None}))
    assert {key: whole[key] for key in whole if key != "asked"} == less
    free = rows_of(render_text({**PAGE, "vocabulary_cost": {"events": 0}, "rounds": {"charged": 61, "redone": 0}}))
    assert free["vocabulary cost"] == ["nothing was charged for it"]
    assert free["rounds charged"] == ["61"]


# The other forms

BOUNDS = [
    {"name": f"bound {i}", "epsilon_at_least": None if i == 1 else 0.11 + i, "assumptions": f"assumption {i}"}
    for i in range(4)
]
AUDIT = {
    "one_run": {
        "canaries": 4001, "rounds": 102, "epsilon_at_least": 1.48, "confidence": 0.93, "epsilon_claimed": 4.04,
        "delta": 0.00057, "holds": True, "bounds": BOUNDS,
    }
}  # fmt: skip


@pytest.fixture(scope="module")
def content():
    return compute_statement(
        {**FACTS, "sampling": {"kind": "poisson"}, "software": {"unheard": "7.8.9", "commit": "c0ffee"}}, stopped()
    )


def test_every_figure_of_an_audit_is_in_every_form(content):
    data = report_data(content, audit=AUDIT)["audit"]
    own = {key: value for key, value in AUDIT["one_run"].items() if key not in ("epsilon_at_least", "epsilon_claimed")}
    shown = [{**bound, "epsilon_at_least": bound["epsilon_at_least"] or "none"} for bound in BOUNDS]
    assert data == {**own, "claimed": 4.04, "bounds": shown}
    for format in FORMATS[1:]:
        page = render(content, format, audit=AUDIT)
        assert "4001 canary users" in page
        assert "93 %" in page
        for i, bound in enumerate(shown):
            assert f"bound {i}" in page
            assert f"assumption {i}" in page
            assert f"{bound['epsilon_at_least']}" in page
        assert "REFUTE" not in page
        assert "REFUTE" in render(content, format, audit={"one_run": {**AUDIT["one_run"], "holds": False}})
    assert "simulated 102 rounds" in render(content, "report", audit=AUDIT)
    for format in ("report", "nist"):
        assert "is 4.04 (both at δ = 0.00057)" in render(content, format, audit=AUDIT)
    assert "at delta 0.00057" in render(content, "registry", audit=AUDIT)
    assert render(PAGE, "text", audit=AUDIT) == render_text(PAGE)
    older = {"one_run": {key: value for key, value in AUDIT["one_run"].items() if key != "bounds"}}
    (bound,) = report_data(content, audit=older)["audit"]["bounds"]
    assert (bound["name"], bound["epsilon_at_least"]) == ("distribution-free", 1.48)
    assert report_data(content, audit={"one_run": None})["audit"] is report_data(content)["audit"] is None


def test_the_data_of_a_report_are_those_of_its_statement(content):
    data = report_data(content)
    attacker = figures([*VOCABULARY, (ROUND, 10)], DELTA)
    assert data["statement"] == content
    assert data["is_private"] is True
    assert {key: data[key] for key in attacker.record} == attacker.record
    assert data["attacker_method"] == attacker.method
    assert data["against_server"] is None
    assert data["ledger"] == {"charges": 8, "head": "hash 7"}
    computed = ", ".join(f"{name} {version}" for name, version in versions().items())
    assert data["software"] == {"version": "7.8.9", "commit": "c0ffee", "computed_with": computed}
    assert sorted((row["event"], row["times"]) for row in data["events"]) == [
        ("FailureProbability(delta 0.0001)", 1),
        ("Gaussian(noise_multiplier 8)", 1),
        ("PoissonGaussian(sampling_prob 1, noise_multiplier 9)", 6),
    ]
    assert dict(composed_events(content)) == {**dict.fromkeys(VOCABULARY, 1), ROUND: 6}
    assert dict(claimed_events(content) or []) == {**dict.fromkeys(VOCABULARY, 1), ROUND: 10}
    bare = report_data(compute_statement({"delta": DELTA}, [NonPrivate(reason="no noise")]))
    assert bare["is_private"] is False
    assert bare["software"]["version"] == bare["software"]["commit"] == NOT_DECLARED
    assert bare["ledger"] == {"charges": 1, "head": NOT_DECLARED}
    assert bare["events"] == [{"event": "NonPrivate(no noise)", "times": 1}]
    old = {key: value for key, value in content.items() if key not in ("ledger", "basis")}
    assert report_data(old)["ledger"] == {"charges": NOT_DECLARED, "head": NOT_DECLARED}
    assert claimed_events(old) is None  # a claim of declared rounds whose events are not stated
    assert attacker_figures(old) == figures_of_pair(content["claimed"]["epsilon"], DELTA)


SERVER = DistributedGaussian(sampling_prob=0.5, noise_multiplier=6.0, min_parties=3)


@pytest.mark.parametrize(
    ("facts", "event", "model", "mechanism"),
    [
        ({}, ROUND, "central", "bounded average (McMahan"),
        ({"federated": None}, ROUND, "central", "bounded average (McMahan"),
        ({"federated": {}}, ROUND, "federated", "bounded average (McMahan"),
        ({"federated": {"secure_aggregation": False}}, ROUND, "federated", "bounded average (McMahan"),
        ({"federated": {"secure_aggregation": True}}, ROUND, "secure aggregation", "bounded average (McMahan"),
        (
            {"federated": {"secure_aggregation": True}},
            SERVER,
            "distributed noise",
            "noise that the nodes add to the sum",
        ),
        ({}, SERVER, "distributed noise", "noise that the nodes add to the sum"),
        ({"correlated_noise": {"strategy": "banded"}}, ROUND, "central", "correlated over rounds (banded)"),
    ],
)
def test_each_kind_of_run_has_its_own_setting_trust_model_and_mechanism(facts, event, model, mechanism):
    data = report_data(compute_statement({"delta": DELTA, **facts}, [event]))
    assert (data["setting"], data["trust"]) == SETTINGS[model]
    assert data["is_federated"] is (model != "central")
    assert mechanism in data["mechanism"]
    assert (data["against_server"] is not None) == (event is SERVER)
    assert len({*SETTINGS.values()}) == len(SETTINGS) == 4


def test_no_upper_bound_is_printed_below_its_value(content):
    """Rounded to the nearest, each of these numbers would be too small in the fourth digit."""
    bounds = {"moments": 5.12343, "rdp": 4.23413, "pld": 3.34523}
    changed = {
        **{key: value for key, value in content.items() if key != "correlated_noise"},
        "delta": 1.45613e-4,
        "epsilon": bounds,
        "claimed": {**content["claimed"], "epsilon": bounds["pld"], "accountant": "pld"},
        "replace_one": {**content["replace_one"], "epsilon": 6.56723},
        "asked": {"epsilon": 2.0, "delta": 1.67834e-3},
        "curve": [{"epsilon": 1.0, "delta": 1.78942e-2}],
        "vocabulary_cost": {**content["vocabulary_cost"], "epsilon": 0.89141, "delta": 1.91243e-5},
    }
    everywhere = {"5.124", "4.235", "3.346", "6.568"}
    own = {
        "text": {"0.0001457", "0.001679", "0.0179", "0.8915", "1.913e-05"},
        "report": {"0.0001457"},
        "registry": set(),
    }
    for format, more in own.items():
        text = render(changed, format)
        assert all(number in text for number in everywhere | more), format
        below = ("5.123", "4.234", "3.345", "6.567", "0.0001456", "0.001678", "0.01789", "0.8914", "1.912e-05")
        assert not [number for number in below if re.search(rf"{re.escape(number)}(?!\d)", text)], format


@pytest.mark.parametrize("before", [[], VOCABULARY, [ROUND]])
@pytest.mark.parametrize("after", [[], VOCABULARY, [ROUND]])
def test_noise_of_the_nodes_decides_the_setting_wherever_it_stands_in_the_ledger(before, after):
    content = compute_statement({"delta": DELTA, "federated": {"secure_aggregation": True}}, [*before, SERVER, *after])
    data = report_data(content)
    assert (data["setting"], data["trust"]) == SETTINGS["distributed noise"]
    assert data["against_server"] is not None
    assert data["setting"] in render(content, "report")


def test_the_mechanism_says_how_users_were_drawn():
    kinds = {"poisson": "users are drawn independently", "cyclic_poisson": "users of the group whose turn it is"}
    kinds |= {"examples": "examples are drawn independently", "min_separation": "the rounds of one user are b apart"}
    for kind, words in {**kinds, "another": "users take part in rounds"}.items():
        content = compute_statement({"delta": DELTA, "sampling": {"kind": kind}}, [ROUND])
        assert report_data(content)["mechanism"].startswith(words)
        first = report_data(content)["assumptions"][0]
        assert first["assumption"].startswith(words if kind != "another" else "users are drawn independently")
        assert (first["status"], kind in first["basis"]) == ("NOT HELD" if kind == "another" else "held", True)


ASSUMPTIONS = [
    ({}, [ROUND], "drawn independently", "unknown"),
    ({}, [ROUND], "clip norm", "held"),
    ({}, [ROUND, NonPrivate(reason="x")], "clip norm", "NOT HELD"),
    ({"randomness": {"mode": "secure", "generator": "G"}}, [ROUND], "secret and fresh", "held"),
    ({"randomness": {"mode": "another", "generator": "G"}}, [ROUND], "secret and fresh", "unknown"),
    ({}, [ROUND], "secret and fresh", "unknown"),
    ({"randomness": {"mode": "reproducible"}}, [ROUND], "secret and fresh", "NOT HELD"),
    ({"randomness": {"mode": "secure"}, "start": {"randomness": {"mode": "reproducible"}}}, [ROUND], "secret and fresh",
     "NOT HELD"),
    ({}, [ROUND], "finite-precision", "held"),
    ({}, [ROUND], "public numbers", "declared"),
    ({}, [ROUND], "vocabulary is public", "declared"),
    ({}, [*VOCABULARY, ROUND], "vocabulary is public", "held"),
    ({}, [ROUND], "words of its private vocabulary", None),
    ({}, [*VOCABULARY, ROUND], "words of its private vocabulary", "declared"),
    ({"start": {"from": "seed 0"}}, [ROUND], "first model", "held"),
    ({"start": {"from": "an earlier run"}}, [ROUND], "first model", "held"),
    ({"start": {"from": "a model declared public"}}, [ROUND], "first model", "declared"),
    ({"start": {"from": "something else"}}, [ROUND], "first model", "unknown"),
    ({}, [ROUND], "first model", "unknown"),
    ({}, [ROUND], "one person is one user", "declared"),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "events", "words", "status"), ASSUMPTIONS)
def test_an_assumption_is_held_only_where_the_ledger_shows_it(facts, events, words, status):
    rows = report_data(compute_statement({"delta": DELTA, "population": 71, **facts}, events))["assumptions"]
    (found,) = [row for row in rows if words in row["assumption"]] or [{"status": None}]
    assert found["status"] == status
    if words == "public numbers":
        assert "population 71," in found["basis"]
    if words == "secret and fresh" and status == "held":
        assert found["basis"] == "G"


@pytest.mark.parametrize("is_longer", [False, True])
@pytest.mark.parametrize("is_noisy", [False, True])
def test_the_figures_against_the_server_are_those_of_its_claim(is_longer, is_noisy):
    """A run that is longer than declared has a claim at another delta, so only the pair may be used."""
    events = [SERVER] * 3 if is_noisy else [SERVER, SERVER, NonPrivate(reason="x")]
    rounds = 2 if is_longer else 3
    declared = declaration(rounds, [(0, to_record(SERVER))], None)
    facts = {"delta": DELTA, "run_id": "r", "start": {"from": "seed 0", "charges": 0}, "declared": declared}
    content = compute_statement(facts, [Entry(event=event, round=i, hash="") for i, event in enumerate(events)])
    data, server = report_data(content)["against_server"], content["against_server"]
    assert (data["epsilon"], data["accountant"]) == (server["epsilon"], server["accountant"])
    if is_noisy and not is_longer:
        assert server["epsilon"] == best_epsilon([(Gaussian(noise_multiplier=6.0), 3)], DELTA).epsilon
        expected = figures([(Gaussian(noise_multiplier=6.0), 3)], DELTA)
    else:
        expected = figures_of_pair(float(server["epsilon"]), DELTA)
    assert {key: data[key] for key in expected.record} == expected.record
    assert float(server["epsilon"]) >= float(content["claimed"]["epsilon"])


def test_each_text_of_a_registry_entry_is_about_its_own_field(content):
    parts = json.loads(render(content, "registry", audit=AUDIT))["deployment"]
    texts = {
        (part, name): text for part, table in parts.items() for name, text in table.items() if isinstance(text, str)
    }
    assert len({*texts.values()}) == len(texts)
    words = {
        ("basic", "description"): content["claim"],
        ("dp_variant", "data_domain"): "123 users",
        ("dp_variant", "unprotected_quantities"): content["not_covered"][1],
        ("privacy_loss", "privacy_unit"): "user",
        ("privacy_loss", "privacy_unit_details"): rounded_up(content["replace_one"]["epsilon"]),
        ("privacy_loss", "privacy_parameters_details"): f"rdp {rounded_up(content['epsilon']['rdp'])}",
        ("deployment_model", "model_name"): "Federated",
        ("deployment_model", "model_name_details"): SETTINGS["secure aggregation"][0],
        ("deployment_model", "actors"): SETTINGS["secure aggregation"][1],
        ("deployment_model", "release_type_details"): RELEASED[1],
        ("deployment_model", "data_source_type_details"): "during a run",
        ("deployment_model", "access_type_details"): "queries",
        ("accounting", "post_processing"): "quantisation",
        ("accounting", "composition"): "6 times PoissonGaussian",
        ("implementation", "preprocessing_and_hyperparameter_tuning"): "Hyperparameter tuning is",
        ("implementation", "mechanisms"): "commit c0ffee",
        ("administrative", "sources"): "hash of the last one hash 7",
        ("administrative", "notes"): "4001 canary users",
    }
    for place, expected in words.items():
        assert expected in texts[place], place
    pair = parts["privacy_loss"]["privacy_parameters"]
    assert pair == {"epsilon": content["claimed"]["epsilon"], "delta": DELTA}
    central = {key: value for key, value in content.items() if key != "federated"}
    assert json.loads(render(central, "registry"))["deployment"]["deployment_model"]["model_name"] == "Central"


def test_a_text_of_a_ledger_is_one_line_without_markup():
    for character in map(chr, [*range(0x20), 0x7F, 0x85, 0x2028, 0x202E, 0x200B]):
        assert markdown_line(f"a{character}b") == "a b"
    assert markdown_line("a|b|<c><d") == "a\\|b\\|&lt;c>&lt;d"
    assert markdown_line(0.25) == 0.25
    assert statement_formats._value_in_words({"a": [1, {"b": 0.123456, "c": None}], "d": None, "e": "x"}) == (
        "a 1; b 0.1235, e x"
    )


def test_rounds_of_correlated_noise_are_composed_once_for_each_block():
    attempts = [CorrelatedGaussian(sampling_prob=1, noise_multiplier=5.0, block=4, index=i) for i in range(9)]
    content = compute_statement({"delta": DELTA}, [*VOCABULARY[:1], *attempts])
    assert content["rounds"]["charged"] == 9
    assert dict(composed_events(content)) == {VOCABULARY[0]: 1, Gaussian(noise_multiplier=5.0): 3}
    assert all(first["epsilon"] < second["epsilon"] for first, second in pairwise(content["curve"]))


@pytest.mark.parametrize("where", ["of the run", "of the run before it"])
def test_each_weakness_of_a_seeded_run_has_its_own_warning(where):
    source = {"randomness": {"mode": "reproducible"}, "drop_duplicates": True}
    facts = source if where == "of the run" else {"start": source}
    seeded, dropped = statement.cautions(facts, [ROUND], 1e-9)
    assert seeded.startswith("REPRODUCIBLE NOISE")
    assert "were dropped before training" in dropped
