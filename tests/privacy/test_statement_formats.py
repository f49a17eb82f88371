"""Formats of a statement: each has all of its items, the figures follow from the events, and nothing is private or executable."""

import doctest
import json
import math
import re
import shutil

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from tests.privacy.test_statement import FACTS, ROUND
from unheard.errors import InvalidValue, RunFolderError
from unheard.mechanism.clipping import AdaptiveClip
from unheard.mechanism.noise import GaussianNoise
from unheard.mechanism.plan import Plan
from unheard.mechanism.sampling import PoissonSampling
from unheard.parameters import Layout
from unheard.privacy import statement_formats
from unheard.privacy.accountants import best_epsilon
from unheard.privacy.budget import declaration
from unheard.privacy.events import (
    CorrelatedGaussian,
    DistributedGaussian,
    FailureProbability,
    Gaussian,
    NonPrivate,
    PoissonGaussian,
    Selection,
    to_record,
)
from unheard.privacy.ledger import Entry, Ledger
from unheard.privacy.statement import compute_statement, render_text
from unheard.privacy.statement_formats import FILL_IN, FORMATS, composed_events, read_audit, render, report_data
from unheard.privacy.trade_off import figures
from unheard.run_folder import record_digest
from unheard.updates.user_update import FedAvg

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
    return compute_statement(ledger.facts, ledger.entries)


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
    content = compute_statement(FACTS, [event for event, times in events for _ in range(times)])
    assert dict(composed_events(content)) == dict(events)


def test_assumptions_that_do_not_hold_are_named():
    def status(facts, events, word):
        rows = report_data(compute_statement(facts, events))["assumptions"]
        return next(row["status"] for row in rows if word in row["assumption"])

    seeded = {**FACTS, "randomness": {"mode": "reproducible", "generator": "AES"}}
    inherited = {**FACTS, "start": {"from": "an earlier run", "randomness": {"mode": "reproducible"}}}
    assert status(FACTS, [ROUND], "secret and fresh") == "held"
    assert status(seeded, [ROUND], "secret and fresh") == "NOT HELD"
    assert status(inherited, [ROUND], "secret and fresh") == "NOT HELD"
    assert status({"population": 100}, [ROUND], "secret and fresh") == "unknown"
    assert status({**FACTS, "sampling": {"kind": "fixed_size"}}, [ROUND], "independently") == "NOT HELD"
    for kind in ("poisson", "cyclic_poisson", "examples"):
        assert status({**FACTS, "sampling": {"kind": kind}}, [ROUND], "drawn independently") == "held"
    assert status(FACTS, [NonPrivate(reason="x")], "clip norm") == "NOT HELD"
    assert status({**FACTS, "start": {"from": "a model file of unknown cost"}}, [ROUND], "first model") == "unknown"
    assert status({**FACTS, "start": {"from": "a model declared public"}}, [ROUND], "first model") == "declared"


def test_a_selection_says_that_tuning_is_included():
    event = Selection(sampling_prob=0.01, noise_multiplier=1, rounds=7, mean_trials=4, drawn_from="geometric")
    page = render(compute_statement(FACTS, [event]), "report")
    assert "Hyperparameter tuning is included in the claim: the best of a random number of runs (4 on average)" in page


def test_a_claim_that_no_accountant_computed_uses_its_own_pair_alone(content):
    """A declared budget covers more events than were charged, so the profile of the charged events must not be used."""
    declared = {**content, "claimed": {**content["claimed"], "epsilon": 2.0, "accountant": "the declared budget"}}
    data = report_data(declared)
    assert data["mu"] is None
    assert data["true_positive_rates"][1]["at_most"] == pytest.approx(0.01 * math.exp(2) + 1e-5)
    assert "does not follow from the claim" in render(declared, "report")


def gaussian_rates(mu):
    """Return the true-positive rate of the best test of N(mu, 1) against N(0, 1), at each false-positive rate."""
    return {rate: float(norm.cdf(norm.ppf(rate) + mu)) for rate in (0.001, 0.01)}


def agree(shown, mu):
    assert mu <= shown["mu"] <= 1.01 * mu
    for row in shown["true_positive_rates"]:
        exact = gaussian_rates(mu)[row["false_positive_rate"]]
        assert exact <= row["at_most"] <= 1.002 * exact


def declared(rounds, event, **more):
    record = declaration(rounds, [(0, to_record(event))], None)
    return {**FACTS, "run_id": "r", "start": {"from": "seed 0", "charges": 0}, "declared": record, **more}


def entries(rounds, event):
    return [Entry(event=event, round=i, hash="") for i in range(rounds)]


def test_mu_and_rates_with_correlated_noise_are_those_of_its_releases():
    """BLT: all rounds are one Gaussian release. Banded: one sampled release for each block, here 1 block of 4 rounds."""
    attempts = [CorrelatedGaussian(sampling_prob=1, noise_multiplier=2.5, block=12, index=i) for i in range(12)]
    facts = {**FACTS, "sampling": {"kind": "min_separation"}, "correlated_noise": {"strategy": "blt"}}
    data = report_data(compute_statement(facts, attempts))
    agree(data, 1 / 2.5)
    assert "correlated over rounds (blt)" in data["mechanism"]
    assert data["assumptions"][0]["status"] == "held"
    q, z = 0.3, 0.8
    attempts = [CorrelatedGaussian(sampling_prob=q, noise_multiplier=z, block=4, index=i) for i in range(4)]
    for row in report_data(compute_statement(FACTS, attempts))["true_positive_rates"]:
        rate = row["false_positive_rate"]
        low = brentq(lambda t, r=rate: (1 - q) * norm.cdf(t / z) + q * norm.cdf((t - 1) / z) - r, -20, 20)
        exact = max((1 - q) * rate + q * norm.sf(norm.isf(rate) - 1 / z), norm.cdf(low / z))
        assert exact <= row["at_most"] <= 1.01 * exact


def test_mu_of_an_adaptive_clip_is_that_of_update_and_count_together():
    clip = AdaptiveClip(initial_norm=1.0, count_noise_std=3.0)
    plan = Plan(
        population=50,
        sampling=PoissonSampling(sampling_prob=1.0),
        update=FedAvg(),
        clip=clip,
        noise=GaussianNoise(noise_multiplier=4.0),
    ).at(0, Layout((("weight", (3, 4)),)))
    of_update, of_count = plan.noise.multiplier(plan.sensitivity), 2 * clip.count_noise_std
    assert of_update > 4.0
    mu = math.sqrt(9 * (of_update**-2 + of_count**-2))
    agree(report_data(compute_statement(FACTS, [plan.event()] * 9)), mu)


def test_a_federated_run_with_distributed_noise_states_both_guarantees():
    event = DistributedGaussian(sampling_prob=0.1, noise_multiplier=4.0, min_parties=10)
    content = compute_statement({**FACTS, "federated": {"secure_aggregation": True}}, [event] * 9)
    data = report_data(content)
    agree(data["against_server"], 3 / 4.0)
    assert data["against_server"]["epsilon"] == best_epsilon([(Gaussian(noise_multiplier=4.0), 9)], 1e-5).epsilon
    assert data["mu"] < 0.2 * data["against_server"]["mu"]
    for format in ("report", "nist", "registry"):
        shown = render(content, format)
        assert "against the server" in shown.lower()
        assert f"{data['against_server']['epsilon']:.4g}" in shown
        assert "before secure aggregation" in shown
        assert "the operator of training reads the text" not in shown
    assert json.loads(render(content, "registry"))["deployment"]["deployment_model"]["model_name"] == "Federated"


@pytest.mark.parametrize(("is_secure", "words"), [(False, "clipped update of each user"), (True, "sum of the updates")])
def test_a_federated_run_says_what_its_server_is_trusted_with(is_secure, words):
    content = compute_statement({**FACTS, "federated": {"secure_aggregation": is_secure}}, [ROUND] * 3)
    for format in ("report", "nist", "registry"):
        assert words in render(content, format)
        assert "against the server" not in render(content, format).lower()


def test_figures_of_a_run_that_was_stopped_are_those_of_its_declared_rounds():
    content = compute_statement(declared(30, ROUND), entries(7, ROUND))
    assert "declared rounds" in content["claimed"]["accountant"]
    for format in ("report", "nist"):
        assert "Why this claim: the length may have been chosen after a look at results" in render(content, format)
    data, whole = report_data(content), figures([(ROUND, 30)], 1e-5)
    assert data["mu"] == whole.mu > figures([(ROUND, 7)], 1e-5).mu
    assert [row["at_most"] for row in data["true_positive_rates"]] == list(whole.true_positive_rates.values())
    event = DistributedGaussian(sampling_prob=0.1, noise_multiplier=4.0, min_parties=10)
    content = compute_statement(declared(9, event), entries(2, event))
    assert content["against_server"]["epsilon"] == best_epsilon([(Gaussian(noise_multiplier=4.0), 9)], 1e-5).epsilon
    agree(report_data(content)["against_server"], 3 / 4.0)
    # The run is longer than declared: the claim is at a smaller delta, so there is no profile.
    longer = report_data(compute_statement(declared(4, ROUND), entries(7, ROUND)))
    assert longer["mu"] is None


def test_a_run_without_a_guarantee_is_not_registered():
    content = compute_statement(FACTS, [NonPrivate(reason="no noise")])
    assert "at most 100 %" in render(content, "report")
    with pytest.raises(InvalidValue, match="has none"):
        render(content, "registry")


def test_strings_of_a_ledger_become_neither_markup_nor_terminal_escapes():
    facts = {**FACTS, "vocabulary": {"kind": "file", "source": "\x1b[31m<script>|x\n# heading"}}
    for format in FORMATS[1:]:
        shown = render(compute_statement(facts, [ROUND]), format)
        assert "\x1b" not in shown
        assert "<script>" not in shown
        assert "\n# heading" not in shown


def test_an_unknown_format_is_refused(content):
    with pytest.raises(InvalidValue, match="registry"):
        render(content, "registri")


def test_a_missing_audit_is_none_and_a_damaged_one_an_error(tmp_path):
    assert read_audit(tmp_path, "mine") is None
    path = tmp_path / "audit" / "audit.json"
    path.parent.mkdir()
    path.write_text(json.dumps(AUDIT))
    assert read_audit(tmp_path, "mine") == AUDIT
    path.write_text(json.dumps({**AUDIT, "run": "mine"}))
    assert read_audit(tmp_path, "mine") == {**AUDIT, "run": "mine"}
    with pytest.raises(RunFolderError, match=r"of another run.*unheard audit"):
        read_audit(tmp_path, "yours")
    sealed = {**AUDIT, "run": "mine"}
    sealed["sha256"] = record_digest(sealed)
    path.write_text(json.dumps(sealed))
    assert read_audit(tmp_path, "mine") == sealed
    other = {**sealed, "one_run": {**AUDIT["one_run"], "epsilon_at_least": 0.01}}
    renamed = {"sha257" if key == "sha256" else key: value for key, value in other.items()}
    for damaged in ("", "[]", "{}", '{"one_run": {"canaries": 3}}', "[" * 100_000, *map(json.dumps, (other, renamed))):
        path.write_text(damaged)
        with pytest.raises(RunFolderError, match="unheard audit"):
            read_audit(tmp_path, "mine")


def test_a_link_to_an_audit_that_leads_nowhere_is_an_error(tmp_path):
    """The audit may have refuted the claim."""
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit" / "audit.json").symlink_to("nowhere")
    with pytest.raises(RunFolderError, match="not the record of an audit"):
        read_audit(tmp_path, "mine")
    shutil.rmtree(tmp_path / "audit")
    (tmp_path / "audit").symlink_to("nowhere")
    with pytest.raises(RunFolderError, match="not the record of an audit"):
        read_audit(tmp_path, "mine")


def test_an_audit_that_refutes_the_claim_is_prominent_in_every_format(content):
    refuted = {"one_run": {**AUDIT["one_run"], "holds": False}}
    assert "REFUTES THE CLAIM" in render(content, "report", audit=refuted)
    assert "REFUTED" in render(content, "nist", audit=refuted)
    assert "REFUTED" in render(content, "registry", audit=refuted)


def test_the_examples_in_the_docstring_are_true():
    assert doctest.testmod(statement_formats).failed == 0
