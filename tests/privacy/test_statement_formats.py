"""The formats of a statement: every item that they promise, figures from the events, and nothing private or executable."""

import doctest
import json
import math
import re

import pytest

from tests.privacy.test_statement import FACTS, ROUND
from unheard.errors import InvalidValue, RunFolderError
from unheard.privacy import statement_formats
from unheard.privacy.events import FailureProbability, Gaussian, NonPrivate, PoissonGaussian, Selection
from unheard.privacy.ledger import Ledger
from unheard.privacy.statement import render as render_text
from unheard.privacy.statement import statement
from unheard.privacy.statement_formats import FILL_IN, FORMATS, composed_events, read_audit, render, report_data
from unheard.privacy.trade_off import figures

SOFTWARE = {"unheard": "0.2.0", "commit": "0123456789abcdef0123456789abcdef01234567"}
AUDIT = {
    "one_run": {
        "canaries": 4000,
        "rounds": 100,
        "epsilon_at_least": 1.48,
        "confidence": 0.95,
        "epsilon_claimed": 4.0,
        "delta": 1e-6,
        "holds": True,
    }
}
SECTIONS = {
    "basic": "name data_curators intended_use data_product_type data_product_region description publication_date "
    "data_product_sector",
    "dp_variant": "variant_name data_domain unprotected_quantities",
    "privacy_loss": "privacy_unit privacy_unit_details privacy_parameters privacy_parameters_details",
    "deployment_model": "model_name model_name_details actors release_type release_type_details data_source_type "
    "data_source_type_details access_type access_type_details",
    "accounting": "post_processing composition",
    "implementation": "preprocessing_and_hyperparameter_tuning mechanisms justification",
    "administrative": "sources notes registry_authors",
}
"""The keys of schemas/deployments-schema.yaml in opendp/deployments-registry-data, commit 3e9c812."""


@pytest.fixture(scope="module")
def ledger(tmp_path_factory):
    ledger = Ledger.create(tmp_path_factory.mktemp("run") / "ledger.jsonl", {**FACTS, "software": SOFTWARE})
    ledger.charge(Gaussian(noise_multiplier=20), 0)
    for number in range(30):
        ledger.charge(ROUND, number)
    return ledger


@pytest.fixture(scope="module")
def content(ledger):
    return statement(ledger.facts, ledger.entries)


def test_text_is_the_page_of_before(content):
    assert render(content, "text") == render_text(content)


@pytest.mark.parametrize("format", ["report", "nist", "registry"])
def test_every_format_has_the_figures_the_hash_the_commit_and_how_to_verify(content, ledger, format):
    shown = render(content, format, audit=AUDIT)
    found = figures([(ROUND, 30), Gaussian(noise_multiplier=20)], 1e-5)
    assert f"{math.ceil(found.mu * 1e4) / 1e4:.4g}" in shown
    for rate, bound in found.true_positive_rates.items():
        at_most = re.search(rf" {100 * rate:g} % false positives[ |:]+at most ([\d.]+) %", shown)
        assert at_most is not None
        assert 100 * bound <= float(at_most[1]) <= 100.1 * bound
    assert ledger.head in shown
    assert SOFTWARE["commit"] in shown
    assert "unheard verify RUN" in shown
    assert "1.48" in shown
    assert "distribution-free" in shown
    assert content["claim"] in shown


def test_the_report_has_the_items_of_how_to_dp_fy_ml(content):
    page = render(content, "report")
    for item in (
        "Setting: Central differential privacy",
        "Trust model:",
        "Data accesses covered:",
        "Output covered: every model after every round",
        "Unit of privacy: user",
        "Adjacency: add or remove one user",
        "assumption of the accounting | in this run",
        "Hyperparameter tuning is",
        "PoissonGaussian(sampling_prob 0.01, noise_multiplier 1) | 30",
        "Gaussian(noise_multiplier 20) | 1",
        "not audited",
    ):
        assert item in page
    assert page.startswith("## ")


def test_the_nist_format_has_every_block_of_the_pyramid_from_the_top_down(content):
    page = render(content, "nist")
    blocks = (
        "Privacy parameters",
        "Unit of privacy",
        "Algorithms and correctness",
        "Utility",
        "Bias",
        "Trust model",
        "Side channels",
        "Access control",
        "Data collection exposure",
    )
    positions = [page.index(f"### {block}\n") for block in blocks]
    assert positions == sorted(positions)


def test_the_registry_entry_has_the_fields_of_the_schema_and_no_others(content):
    entry = json.loads(render(content, "registry"))
    assert set(entry) == {"url_slug", "status", "tier", "deployment"}
    assert entry["status"] == "Draft"
    assert {name: set(part) for name, part in entry["deployment"].items()} == {
        name: set(keys.split()) for name, keys in SECTIONS.items()
    }
    assert entry["deployment"]["privacy_loss"]["privacy_parameters"] == {
        "epsilon": content["claimed"]["epsilon"],
        "delta": 1e-5,
    }
    for name in ("name", "intended_use", "publication_date", "data_product_region"):
        assert entry["deployment"]["basic"][name].startswith(FILL_IN)
    assert all(isinstance(text, str) and text for text in entry["deployment"]["accounting"].values())


def test_the_composed_events_are_those_of_the_ledger():
    events = [
        (ROUND, 3),
        (PoissonGaussian(sampling_prob=1 / 3, noise_multiplier=0.123456789), 2),
        (Gaussian(noise_multiplier=5), 1),
        (FailureProbability(delta=1e-7), 1),
        (Selection(sampling_prob=0.1, noise_multiplier=2, rounds=7, mean_trials=4, drawn_from="poisson"), 1),
        (NonPrivate(reason="no noise"), 1),
    ]
    content = statement(FACTS, [event for event, times in events for _ in range(times)])
    assert dict(composed_events(content)) == dict(events)


def test_assumptions_that_do_not_hold_are_named():
    def status(facts, events, word):
        rows = report_data(statement(facts, events))["assumptions"]
        return next(row["status"] for row in rows if word in row["assumption"])

    seeded = {**FACTS, "randomness": {"mode": "reproducible", "generator": "AES"}}
    inherited = {**FACTS, "start": {"from": "an earlier run", "randomness": {"mode": "reproducible"}}}
    assert status(FACTS, [ROUND], "secret and fresh") == "held"
    assert status(seeded, [ROUND], "secret and fresh") == "NOT HELD"
    assert status(inherited, [ROUND], "secret and fresh") == "NOT HELD"
    assert status({"population": 100}, [ROUND], "secret and fresh") == "unknown"
    assert status({**FACTS, "sampling": {"kind": "fixed_size"}}, [ROUND], "independently") == "NOT HELD"
    assert status(FACTS, [NonPrivate(reason="x")], "clip norm") == "NOT HELD"
    assert status({**FACTS, "start": {"from": "a model file of unknown cost"}}, [ROUND], "first model") == "unknown"
    assert status({**FACTS, "start": {"from": "a model declared public"}}, [ROUND], "first model") == "declared"


def test_a_selection_says_that_tuning_is_included():
    event = Selection(sampling_prob=0.01, noise_multiplier=1, rounds=7, mean_trials=4, drawn_from="geometric")
    page = render(statement(FACTS, [event]), "report")
    assert "Hyperparameter tuning is included in the claim: the best of a random number of runs (4 on average)" in page


def test_a_claim_that_no_accountant_computed_uses_its_own_pair_alone(content):
    """A declared budget covers more than was charged, so the profile of the charged events says too little about it."""
    declared = {**content, "claimed": {**content["claimed"], "epsilon": 2.0, "accountant": "the declared budget"}}
    data = report_data(declared)
    assert data["mu"] is None
    assert data["true_positive_rates"][1]["at_most"] == pytest.approx(0.01 * math.exp(2) + 1e-5)
    assert "does not follow from the claim" in render(declared, "report")


def test_a_run_without_a_guarantee_is_not_registered():
    content = statement(FACTS, [NonPrivate(reason="no noise")])
    assert "at most 100 %" in render(content, "report")
    with pytest.raises(InvalidValue, match="has none"):
        render(content, "registry")


def test_strings_of_a_ledger_become_neither_markup_nor_terminal_escapes():
    facts = {**FACTS, "vocabulary": {"kind": "file", "source": "\x1b[31m<script>|x\n# heading"}}
    for format in FORMATS[1:]:
        shown = render(statement(facts, [ROUND]), format)
        assert "\x1b" not in shown
        assert "<script>" not in shown
        assert "\n# heading" not in shown


def test_an_unknown_format_is_refused(content):
    with pytest.raises(InvalidValue, match="registry"):
        render(content, "registri")


def test_a_missing_audit_is_none_and_a_damaged_one_an_error(tmp_path):
    assert read_audit(tmp_path) is None
    path = tmp_path / "audit" / "audit.json"
    path.parent.mkdir()
    path.write_text(json.dumps(AUDIT))
    assert read_audit(tmp_path) == AUDIT
    for damaged in ("", "[]", "{}", '{"one_run": {"canaries": 3}}', "[" * 100_000):
        path.write_text(damaged)
        with pytest.raises(RunFolderError, match="unheard audit"):
            read_audit(tmp_path)


def test_an_audit_that_refutes_the_claim_is_said_loudly(content):
    refuted = {"one_run": {**AUDIT["one_run"], "holds": False}}
    assert "REFUTES THE CLAIM" in render(content, "report", audit=refuted)
    assert "REFUTED" in render(content, "nist", audit=refuted)
    assert "REFUTED" in render(content, "registry", audit=refuted)


def test_the_examples_in_the_docstring_are_true():
    assert doctest.testmod(statement_formats).failed == 0
