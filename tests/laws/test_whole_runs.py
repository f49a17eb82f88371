"""A chain of whole runs on one store: every output is computed from exactly the events that the test computes itself.

The chain: a store with a private vocabulary; a run whose S and sigma change; a run that starts from it, with an adaptive
clip whose z changes; and a private selection. The numbers have many digits, so that rounding any of them changes a figure.
"""

import json
import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import unheard
from unheard.audit.one_run import OneRunResult, audit_one_run
from unheard.audit.verification import verify
from unheard.cli.main import app
from unheard.corpus.store import write_store
from unheard.deployment.card import model_card
from unheard.deployment.export import export
from unheard.deployment.hugging_face_export import write_hub_folder
from unheard.deployment.model import open_model
from unheard.errors import BudgetExceeded
from unheard.mechanism.aggregation import Contribution
from unheard.mechanism.clipping import AdaptiveClip
from unheard.mechanism.noise import ExactNormalsAhead, GaussianNoise
from unheard.privacy.accountants import best_epsilon, collapse, delta_at, replace_one_epsilon
from unheard.privacy.budget import RunningEpsilon, odometer
from unheard.privacy.events import FailureProbability, Gaussian, PoissonGaussian, Selection, to_record
from unheard.privacy.ledger import Ledger
from unheard.privacy.population_ledger import PopulationLedger
from unheard.privacy.population_statement import all_runs
from unheard.privacy.statement import rounded_up
from unheard.privacy.statement_formats import composed_events, render, report_data
from unheard.randomness import SecureStreams
from unheard.report.comparison import Comparison
from unheard.report.run_record import RunRecord
from unheard.run_folder import RunFolder
from unheard.training.checkpoint import load_model, parameters_digest
from unheard.training.loop import train_together
from unheard.training.run import read_saved_run
from unheard.tuning.private_selection import TrialCount, select

POPULATION = 67  # declared; the store has 60 users
Q = 7.3 / POPULATION
WEIGHT = Q * POPULATION
DELTA = 1.23456789e-3
VOCABULARY = [Gaussian(noise_multiplier=7.1234567891), FailureProbability(delta=1.2345678e-5)]
SIGMAS = (0.31234567, 0.31234567, 0.51234567)
NORMS = (1.1234567, 0.7654321, 0.7654321)
ADAPTIVE_Z = (2.1234567, 3.1234567)
COUNT_STD = 4.7654321
SELECTED_Z = 2.3456789
MEAN_TRIALS = 1.7654321


def round_event(z: float) -> PoissonGaussian:
    return PoissonGaussian(sampling_prob=Q, noise_multiplier=z)


FIRST = [round_event(sigma / (S / WEIGHT)) for sigma, S in zip(SIGMAS, NORMS, strict=True)]
SECOND = [round_event(z) for z in ADAPTIVE_Z]
SELECTION = Selection(
    sampling_prob=Q, noise_multiplier=SELECTED_Z, rounds=2, mean_trials=MEAN_TRIALS, drawn_from="geometric"
)
EVENTS = {
    "first": [*VOCABULARY, *FIRST],
    "second": [*VOCABULARY, *VOCABULARY, *FIRST, *SECOND],
    "selected": [*VOCABULARY, SELECTION],
}
"""The events of each run's ledger. A run that starts from another run includes all events of that run."""


def claimed(name, delta):
    """Return the epsilon that a run must claim. The second run began from the first, so it must claim an odometer's."""
    if name == "second":
        return odometer(*collapse(EVENTS[name]), delta).epsilon
    return best_epsilon(EVENTS[name], delta).epsilon


ALL = [*VOCABULARY, *FIRST, *SECOND, SELECTION]
"""The events of the store's ledger, in which the vocabulary and the first run are charged once."""


class TwoTrials(TrialCount):
    """A number of trials that is charged as usual, but is always 2."""

    def draw(self, rng):
        super().draw(rng)
        return 2


@dataclass
class Chain:
    """The folders of the runs, and what was recorded about each round."""

    folder: Path
    store: Path
    candidate: unheard.Run
    reports: dict[str, list[unheard.RoundReport]]
    noises: list[tuple[float, float]]
    """The sensitivity and the standard deviation of the noise of each round of the first two runs."""
    bounds: list[float]
    """S of each contribution that was summed in the first two runs."""
    counts: list[float]
    """The standard deviation of the noise on each count."""


@pytest.fixture(scope="module")
def chain(store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chain")
    own = write_store(
        folder / "store",
        train=[store.train.tokens(i)[:12] for i in range(60)],
        held_out=[store.held_out.tokens(i)[:20] for i in range(4)],
        vocabulary=store.vocabulary,
        info={
            "tokens": {"kind": "words"},
            "vocabulary": {"kind": "private", "delta": DELTA, "events": [to_record(event) for event in VOCABULARY]},
        },
    )
    plan = unheard.Plan(
        population=POPULATION,
        sampling=unheard.PoissonSampling(users_per_round=7.3),
        update=unheard.FedAvg(batch_size=2, unroll=5, learning_rate=1.0),
        clip=unheard.FlatClip(norm=NORMS[0]),
        noise=unheard.GaussianNoise(noise_std=SIGMAS[0]),
        schedule=(
            unheard.Change(from_round=1, clip_norm=NORMS[1]),
            unheard.Change(from_round=2, noise_std=SIGMAS[2]),
        ),
    )
    first = unheard.Run(
        corpus=own.path,
        model=unheard.TiedLSTM(vocabulary_size=len(store.vocabulary), embedding_size=3, hidden_size=4),
        plan=plan,
        delta=DELTA,
        training=unheard.Training(rounds=3, checkpoint_every=2),
        evaluation=unheard.Evaluation(every=1, max_tokens=20, unroll=10),
    )
    adaptive = replace(
        plan,
        clip=AdaptiveClip(initial_norm=0.87654321, count_noise_std=COUNT_STD),
        noise=unheard.GaussianNoise(noise_multiplier=ADAPTIVE_Z[0]),
        schedule=(unheard.Change(from_round=1, noise_multiplier=ADAPTIVE_Z[1]),),
    )
    second = replace(first, plan=adaptive, training=replace(first.training, rounds=2, init_from=str(folder / "first")))
    constant = replace(plan, schedule=(), noise=unheard.GaussianNoise(noise_multiplier=SELECTED_Z))
    candidate = replace(first, plan=constant, training=replace(first.training, rounds=2))
    seen = Chain(folder, own.path, candidate, {}, [], [], [])
    with pytest.MonkeyPatch.context() as patch:
        of_users, next_norm = Contribution.of_users, AdaptiveClip.next_norm

        def seen_users(self, *args):
            seen.bounds.append(self.l2_bound)
            return of_users(self, *args)

        def seen_count(self, norm, balance, expected, std, rng):
            seen.counts.append(std)
            assert expected == pytest.approx(WEIGHT, rel=1e-12)
            return next_norm(self, norm, balance, expected, std, rng)

        see_noise(patch, seen.noises)
        patch.setattr(Contribution, "of_users", seen_users)
        patch.setattr(AdaptiveClip, "next_norm", seen_count)
        seen.reports["first"] = list(unheard.train(first, folder / "first"))
        seen.reports["second"] = list(unheard.train(second, folder / "second"))
    select([candidate], folder / "selected", TwoTrials(mean=MEAN_TRIALS))
    return seen


def see_noise(patch, noises):
    """Record the sensitivity of each average that gets noise, and the standard deviation of the integers added to it."""
    add, take, scales = GaussianNoise.add, ExactNormalsAhead.take, []

    def seen_add(self, average, rng):
        noisy = add(self, average, rng)
        noises.append((average.sensitivity, scales.pop() * average.unit))
        return noisy

    patch.setattr(GaussianNoise, "add", seen_add)
    patch.setattr(
        ExactNormalsAhead, "take", lambda self, count, scale: scales.append(scale) or take(self, count, scale)
    )


def close(events):
    """Return events for a comparison in which numbers may differ in the last bits."""
    values = [{"kind": type(event).__name__, **vars(event)} for event in events]
    return [{key: v if isinstance(v, str) else pytest.approx(v, rel=1e-12) for key, v in row.items()} for row in values]


def written(events):
    return [{"kind": type(event).__name__, **vars(event)} for event in events]


def test_the_noise_of_each_round_is_that_of_its_phase_and_the_event_says_so(chain):
    assert len(chain.noises) == 5
    for (sensitivity, std), S, sigma in zip(chain.noises, NORMS, SIGMAS, strict=False):
        assert (sensitivity, std) == (pytest.approx(S / WEIGHT, rel=1e-12), pytest.approx(sigma, rel=1e-12))
    for (sensitivity, std), count, z in zip(chain.noises[3:], chain.counts, ADAPTIVE_Z, strict=True):
        assert count == COUNT_STD
        assert ((std / sensitivity) ** -2 + (2 * count) ** -2) ** -0.5 == pytest.approx(z, rel=1e-12)
    assert set(chain.bounds[: len(chain.bounds) // 2]) <= {*NORMS, 0.87654321}


def test_an_audit_has_the_event_and_the_noise_of_the_phase_of_each_round(chain, monkeypatch):
    seen = []
    see_noise(monkeypatch, seen)
    run, _ = read_saved_run(chain.folder / "first" / "run.toml")
    *_, result = audit_one_run(run, SecureStreams(), canaries=4)
    assert isinstance(result, OneRunResult)
    assert [std for _, std in seen] == pytest.approx(SIGMAS, rel=1e-12)
    assert written(result.events) == close(FIRST)
    assert result.claimed == pytest.approx(best_epsilon(FIRST, result.delta).epsilon, rel=1e-9)


def test_the_facts_of_a_ledger_state_the_numbers_of_each_phase(chain):
    first, second = (Ledger.read(chain.folder / name / "ledger.jsonl").facts for name in ("first", "second"))
    for facts in (first, second):
        assert facts["population"] == POPULATION
        assert facts["sampling"]["sampling_prob"] == pytest.approx(Q, rel=1e-12)
    for number, (phase, S, sigma) in enumerate(zip(first["phases"], NORMS, SIGMAS, strict=True)):
        assert (phase["from_round"], phase["clip_norm"]) == (number, S)
        stated = [phase[key] for key in ("noise_std", "sensitivity", "expected_weight", "noise_multiplier")]
        assert stated == pytest.approx([sigma, S / WEIGHT, WEIGHT, sigma / (S / WEIGHT)], rel=1e-12)
    for number, (phase, z) in enumerate(zip(second["phases"], ADAPTIVE_Z, strict=True)):
        assert (phase["from_round"], phase["count_noise_std"]) == (number, COUNT_STD)
        assert (phase["noise_multiplier"] ** -2 + (2 * COUNT_STD) ** -2) ** -0.5 == pytest.approx(z, rel=1e-12)


@pytest.mark.parametrize("name", EVENTS)
def test_the_ledger_of_a_run_holds_exactly_its_events(chain, name):
    ledger = Ledger.read(chain.folder / name / "ledger.jsonl")
    assert written(ledger.events) == close(EVENTS[name])
    assert ledger.facts["delta"] == DELTA
    before = len(EVENTS[name]) - {"first": 3, "second": 2, "selected": 0}[name]
    assert ledger.facts["start"]["charges"] == before
    if name != "first":  # each verification recomputes the statement
        assert all(finding.fits for finding in verify(chain.folder / name))


@pytest.mark.parametrize("name", EVENTS)
def test_every_figure_of_a_run_is_that_of_all_its_events_at_its_delta(chain, name):
    events, folder = EVENTS[name], chain.folder / name
    content = json.loads((folder / "statement.json").read_text())
    assert content["delta"] == DELTA
    assert content["claimed"]["epsilon"] == pytest.approx(claimed(name, DELTA), rel=1e-9)
    replaced = replace_one_epsilon(events, DELTA).epsilon
    if name == "second":
        replaced = odometer(*collapse(events), DELTA, of_two=True).epsilon
    assert content["replace_one"]["epsilon"] == pytest.approx(replaced, rel=1e-9)
    assert sum(row["times"] for row in content["composed"]) == len(events)
    for point in (content["curve"][0], content["curve"][-1]):
        if name == "second":
            assert point["delta"] == 1 or claimed(name, point["delta"]) <= point["epsilon"]
            assert claimed(name, point["delta"] / 1.01) > point["epsilon"]
            continue
        exact = min(delta_at(events, point["epsilon"], accountant) for accountant in ("pld", "rdp"))
        assert point["delta"] == pytest.approx(exact, rel=1e-9)
    composed = [event for event, times in composed_events(content) for _ in range(times)]
    assert written(sorted(composed, key=repr)) == close(sorted(events, key=repr))


def test_every_format_shows_the_claim_of_all_events(chain):
    content = json.loads((chain.folder / "selected" / "statement.json").read_text())
    epsilon = content["claimed"]["epsilon"]
    report = report_data(content)
    assert report["statement"]["claimed"]["epsilon"] == epsilon
    assert sum(row["times"] for row in report["events"]) == len(EVENTS["selected"])
    entry = json.loads(render(content, "registry"))
    assert entry["deployment"]["privacy_loss"]["privacy_parameters"] == {"epsilon": epsilon, "delta": DELTA}
    assert all(rounded_up(epsilon) in render(content, format) for format in ("text", "report", "nist"))


def test_the_command_states_what_the_run_folder_keeps(chain):
    done = CliRunner().invoke(app, ["statement", str(chain.folder / "selected"), "--json"])
    assert json.loads(done.stdout) == json.loads((chain.folder / "selected" / "statement.json").read_text())


def test_the_running_epsilon_of_a_run_is_that_of_the_events_so_far(chain):
    for name, rounds in (("first", 3), ("second", 2)):
        events = EVENTS[name]
        rows = [json.loads(line) for line in (chain.folder / name / "metrics.jsonl").read_text().splitlines()]
        for number, (row, report) in enumerate(zip(rows, chain.reports[name], strict=True), start=1):
            exact = RunningEpsilon(DELTA, events=events[: len(events) - rounds + number]).epsilon
            assert (row["round"], report.round, report.delta) == (number, number, DELTA)
            assert row["epsilon"] == report.epsilon == pytest.approx(exact, rel=1e-9)
    rows = [json.loads(line) for line in (chain.folder / "selected" / "metrics.jsonl").read_text().splitlines()]
    whole = best_epsilon(EVENTS["selected"], DELTA).epsilon
    assert [row["epsilon"] for row in rows] == [pytest.approx(whole, rel=1e-9)] * 2


def test_a_comparison_shows_the_epsilon_of_all_events_of_each_run(chain):
    comparison = Comparison.read([chain.folder / name for name in EVENTS])
    for record, events in zip(comparison.records, EVENTS.values(), strict=True):
        assert written(entry.event for entry in record.entries) == close(events)
        saved = json.loads((chain.folder / record.name / "statement.json").read_text())
        record.__dict__["statement"] = saved  # instead of recomputing it
    for row, events in zip(comparison.as_json()["runs"], EVENTS.values(), strict=True):
        assert row["epsilon"] == pytest.approx(claimed(row["run"], DELTA), rel=1e-9)
        assert row["delta"] == DELTA
        running = RunningEpsilon(DELTA, events=events).epsilon
        assert row["epsilon_by_round"][-1]["epsilon"] == pytest.approx(running, rel=1e-9)


@pytest.mark.parametrize("name", EVENTS)
def test_a_card_and_a_page_state_the_claim_of_a_run_and_that_of_all_runs(chain, name, monkeypatch):
    """Also for the second run: it began from the first, so it has more charges than those of its own rounds."""
    total = all_runs(PopulationLedger.read(chain.store / "ledger.jsonl"))
    own = json.loads((chain.folder / name / "statement.json").read_text())
    card = model_card(chain.folder / name)
    assert f"Over all runs on the same users: {total['claim']}" in card
    assert card.count(own["claim"]) >= 2
    monkeypatch.setattr("unheard.report.run_record.all_runs", lambda population: total)  # not computed again
    record = RunRecord.read(chain.folder / name)
    assert sorted(record.other_runs) == sorted(EVENTS.keys() - {name})
    assert record.all_runs == total


def test_no_output_takes_the_saved_statement_at_its_word(chain, tmp_path, monkeypatch):
    """All outputs with a model are computed from the ledger, whose length and hash are in the checkpoints."""
    folder = RunFolder(shutil.copytree(chain.folder / "first", tmp_path / "first"))
    own = json.loads(folder.statement.read_text())
    forged = own | {"claim": "(0.0123, 1e-09)-differential privacy", "claimed": own["claimed"] | {"epsilon": 0.0123}}
    folder.statement.write_text(json.dumps(forged))
    monkeypatch.setattr("unheard.deployment.export.TEXTS", 1)  # compare one text with the model instead of 256
    write_hub_folder(folder.path, tmp_path / "hub")
    monkeypatch.setattr(
        "unheard.deployment.hugging_face_export._device_files", lambda *_: {}
    )  # as for a model that has no export
    write_hub_folder(folder.path, tmp_path / "plain")
    stated = [json.loads((tmp_path / name / "statement.json").read_text()) for name in ("hub", "plain")]
    stated += [open_model(folder.path).statement]
    stated += [export(folder.path, tmp_path / "exported").statement, open_model(tmp_path / "exported").statement]
    stated += [RunRecord.read(folder.path).statement]
    for content in stated:
        assert (content["claim"], content["claimed"]) == (own["claim"], own["claimed"])
    for card in (model_card(folder.path), (tmp_path / "hub" / "README.md").read_text()):
        assert own["claim"] in card
        assert forged["claim"] not in card


def test_the_total_of_all_runs_is_that_of_every_event_once(chain):
    population = PopulationLedger.read(chain.store / "ledger.jsonl")
    assert written(sorted(population.events, key=repr)) == close(sorted(ALL, key=repr))
    for asked in ([str(chain.folder / "first"), "--all-runs"], [str(chain.store)]):
        content = json.loads(CliRunner().invoke(app, ["statement", *asked, "--json"]).stdout)
        assert content["delta"] == DELTA
        assert content["charges"] == len(ALL)
        assert sorted(run["charges"] for run in content["runs"]) == [1, 2, 2, 3]
        counts, failure = collapse(ALL)
        assert content["claimed"]["epsilon"] == pytest.approx(odometer(counts, failure, DELTA).epsilon, rel=1e-9)
        assert math.isfinite(content["claimed"]["epsilon"])


def test_a_budget_counts_what_was_spent_before_the_first_round(chain, tmp_path):
    """The selection, or the first round, alone is within each budget, but together with the vocabulary it is not."""
    store = Path(shutil.copytree(chain.store, tmp_path / "store"))  # a run that is refused is registered in the store
    charges = len(PopulationLedger.read(store / "ledger.jsonl").events)
    for event, start in (
        (SELECTION, lambda run: select([run], tmp_path / "over", TwoTrials(mean=MEAN_TRIALS))),
        (round_event(SELECTED_Z), lambda run: list(unheard.train(run, tmp_path / "over"))),
    ):
        alone, after = (RunningEpsilon(DELTA, events=[*past, event]).epsilon for past in ([], VOCABULARY))
        budget = unheard.Budget(epsilon=(alone + after) / 2, delta=DELTA)
        with pytest.raises(BudgetExceeded):
            start(replace(chain.candidate, corpus=store, budget=budget))
    assert len(PopulationLedger.read(store / "ledger.jsonl").events) == charges


@pytest.mark.parametrize("length", ["as declared", "stopped", "longer", "within a budget"])
def test_the_total_of_the_only_run_on_a_store_claims_what_the_run_claims(run, tmp_path, length):
    """Both claims follow from the declaration, which each of the two ledgers contains."""
    training = replace(run.training, rounds=2 if length == "longer" else 3)
    budget = unheard.Budget(epsilon=40.0, delta=DELTA) if length == "within a budget" else None
    plan = replace(run.plan, noise=unheard.GaussianNoise(noise_multiplier=2.0))
    only = replace(run, plan=plan, training=training, delta=DELTA, budget=budget, ledger=tmp_path / "ledger.jsonl")
    for report in unheard.train(only, tmp_path / "run"):
        if length in ("stopped", "within a budget") and report.round == 2:
            break
    if length == "longer":
        list(unheard.resume(tmp_path / "run", rounds=3))
    own = json.loads((tmp_path / "run" / "statement.json").read_text())
    charged = Ledger.read(tmp_path / "run" / "ledger.jsonl").events
    assert (own["claimed"]["epsilon"] > best_epsilon(charged, DELTA).epsilon) == (length != "as declared")
    total = all_runs(PopulationLedger.read(tmp_path / "ledger.jsonl"))
    assert (total["delta"], total["claimed"]["epsilon"]) == (DELTA, own["claimed"]["epsilon"])
    assert total["basis"]["why"] == own["basis"]["why"]


@pytest.mark.parametrize("how", ["train", "train_together", "select"])
def test_a_population_is_charged_for_the_run_that_another_begins_from_whoever_starts_it(run, tmp_path, how):
    """The users of another ledger may be the same people, so they are charged for the first run too."""
    brief = replace(run, training=replace(run.training, rounds=1), ledger=tmp_path / "first.jsonl")
    list(unheard.train(brief, tmp_path / "first"))
    before = Ledger.read(tmp_path / "first" / "ledger.jsonl").events
    again = replace(brief.training, init_from=str(tmp_path / "first"))
    second = replace(brief, training=again, ledger=tmp_path / "second.jsonl")
    if how == "train":
        list(unheard.train(second, tmp_path / "second"))
    elif how == "train_together":
        list(train_together([(second, tmp_path / "second")]))
    else:
        select([second], tmp_path / "second", TwoTrials(mean=MEAN_TRIALS))
    own = Ledger.read(tmp_path / "second" / "ledger.jsonl").events
    assert own[: len(before)] == before
    assert len(own) == len(before) + 1
    population = PopulationLedger.read(tmp_path / "second.jsonl")
    assert population.events == own
    assert [len(charged_run.events) for charged_run in population.runs.values()] == [len(before), 1]
    digest = parameters_digest(load_model(tmp_path / "second" / "model.safetensors", second.model))
    assert digest in population.released  # so that no copy of the model is accepted as public
