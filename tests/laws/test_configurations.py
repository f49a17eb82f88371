"""A run continues only with the settings that it began with and with the state that it saved, bit for bit."""

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import tomli_w
import torch

import unheard
from unheard.engines.choice import EngineChoice
from unheard.errors import BudgetExceeded, CheckpointCorrupt, UnheardError
from unheard.mechanism.plan import KINDS
from unheard.privacy.budget import EARLIER_RUN, Budget, RunningEpsilon
from unheard.privacy.events import to_record
from unheard.privacy.ledger import Ledger
from unheard.privacy.population_ledger import PopulationLedger
from unheard.report.tables import _settings
from unheard.run_folder import RunFolder, configuration_hash
from unheard.training import loop
from unheard.training.checkpoint import (
    newest_checkpoint,
    parameters_digest,
    read_checkpoint,
    released_model,
    save_checkpoint,
    save_model,
)
from unheard.training.initialise import _inherited, ledger_header
from unheard.training.round import AdamServer, State
from unheard.training.run import MODELS, SERVERS, Corpus, Privacy, read_saved_run, run_hash, run_toml, tables_from_run

MAY_CHANGE = {
    *("training.rounds", "training.checkpoint_every", "training.keep_checkpoints"),
    *("corpus.path", "model.path", "privacy.ledger"),
}
"""Settings that may change when a run is resumed, besides the table [engine]."""


@pytest.fixture
def full(run) -> unheard.Run:
    """A run with a value for every setting that a run file can have in these parts."""
    plan = replace(
        run.plan,
        weights=unheard.CappedWeights(weight_cap=7, total_weight=51.0),
        estimator=unheard.ClippedDenominator(min_total_weight=33.0),
        schedule=(
            unheard.Change(from_round=1, clip_norm=1.1, noise_multiplier=0.7, learning_rate=0.9),
            unheard.Change(from_round=2, noise_std=0.123456789),
        ),
    )
    training = replace(run.training, reproducible_seed=5, init_from="runs/first", init_is_public=True)
    budget = Budget(epsilon=7.654321, delta=1.23456789e-3, accountant="moments")
    return replace(
        run, plan=plan, training=training, delta=budget.delta, budget=budget, ledger="l.jsonl", server=AdamServer()
    )


def flat(value, path=()):
    """Yield the path and the value of every setting."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path, value
    else:
        for key, item in items:
            yield from flat(item, (*path, key))


def changed(tables, path, value):
    """Return a copy of the tables with another value at one path."""
    copy = json.loads(json.dumps(tables))
    table = copy
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = value
    return copy


def another(value):
    """Return another value of the same type, with the smallest possible difference for numbers."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return math.nextafter(value, math.inf)
    return value + 1 if isinstance(value, int) else f"{value}x"


def test_each_setting_of_a_run_file_changes_its_hash_except_those_that_may_change(full):
    tables = tables_from_run(full)
    own, seen = configuration_hash(tables), set()
    for path, value in flat(tables):
        name = ".".join(map(str, path))
        is_free = name in MAY_CHANGE or path[0] == "engine"
        assert (configuration_hash(changed(tables, path, another(value))) == own) == is_free, name
        seen.add(name)
    assert {"noise.noise_multiplier", "clip.norm", "sampling.users_per_round", "privacy.population"} <= seen
    assert {"privacy.delta", "privacy.budget_epsilon", "privacy.budget_accountant", "schedule.1.noise_std"} <= seen
    fewer = {**tables, "schedule": tables["schedule"][:1]}
    assert configuration_hash(fewer) != own


NO_PLACES = {
    *("privacy.budget_accountant", "engine.kind", "engine.device", "engine.precision", "clip.norms"),
    *("model.module", "model.arguments", "model.lora_layers", "model.base_sha256", "model.weights_sha256"),
}
"""The texts of a run file that name no file or folder."""


def texts_of_a_run_file() -> list[str]:
    """Every setting of any table and kind whose value may be a text."""
    tables = {"corpus": [Corpus], "privacy": [Privacy], "training": [unheard.Training], "engine": [EngineChoice]}
    tables |= {name: list(kinds.values()) for name, kinds in {**KINDS, "model": MODELS, "server": SERVERS}.items()}
    settings = [
        (f"{name}.{field.name}", str(field.type)) for name in tables for part in tables[name] for field in fields(part)
    ]
    return sorted({key for key, kind in settings if "str" in kind or "Path" in kind})


@pytest.mark.parametrize("key", sorted(set(texts_of_a_run_file()) - NO_PLACES))
def test_a_setting_that_may_name_a_place_is_not_published(tmp_path, key):
    """Trackers, cards and hub folders show the public settings, and a page shows the last part of a path."""
    table, name = key.split(".")
    tables = {table: {name: "/private-place/last"}}
    folder = RunFolder(tmp_path)
    folder.run_file.write_text(tomli_w.dumps(tables))
    assert folder.public_settings() == {}
    assert _settings(tables) == {key: "last"}


def test_a_run_file_says_everything_about_a_run_to_the_last_bit(full, tmp_path):
    (tmp_path / "run.toml").write_text(run_toml(full, EngineChoice(kind="reference")))
    run, engine = read_saved_run(tmp_path / "run.toml")
    assert run == replace(full, corpus=Path(full.corpus))
    assert engine == EngineChoice(kind="reference")
    assert run_hash(run) == run_hash(full)


def test_the_first_line_of_a_ledger_declares_the_run_as_it_is_configured(full, store, tmp_path):
    """The header has all facts on which a claim depends before the first round: numbers of each phase, budget, delta, streams."""
    first, population = State(round=0, params_P=full.model.initial(3)), PopulationLedger.open(tmp_path / "l", {})
    for seed in (None, 5):
        run = replace(full, training=replace(full.training, reproducible_seed=seed, rounds=11))
        facts, again = (ledger_header(run, store, first, population) for _ in range(2))
        assert facts["declared"] == {
            "rounds": 11,
            "phases": [
                {"from_round": number, "event": to_record(plan.event())}
                for number, plan in ((n, run.plan.at(n, run.model.layout)) for n in range(3))
            ],
            "budget": full.budget.record,
        }
        assert len({str(phase["event"]) for phase in facts["declared"]["phases"]}) == 3
        assert (facts["delta"], facts["population"]) == (1.23456789e-3, 60)
        assert (facts["corpus"], facts["run_hash"]) == (store.name, run_hash(run))
        assert facts["start"]["sha256"] == parameters_digest(first.params_P)
        assert facts["randomness"]["mode"] == ("secure" if seed is None else "reproducible")
        # Two runs with secret noise have different ids. A seeded run that is repeated releases the same models.
        assert (facts["run_id"] == again["run_id"]) == (seed is not None)
        assert facts["run_id"].startswith("reproducible-") == (seed is not None)


@pytest.mark.parametrize("drops", [True, False])
def test_the_first_line_of_a_ledger_says_whether_posts_were_dropped(run, store, monkeypatch, drops, tmp_path):
    monkeypatch.setitem(store.info, "drop_duplicates", drops)
    population = PopulationLedger.open(tmp_path / "l", {})
    facts = ledger_header(run, store, State(round=0, params_P=run.model.initial(3)), population)
    assert facts["drop_duplicates"] is drops


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"synthetic": True, "fitted_to": "posts"}, {"synthetic": "fitted to posts"}),
        ({"synthetic": True}, {}),  # the store of a benchmark, which no user's text was needed for
        ({"synthetic": False}, {}),
    ],
)
def test_the_first_line_of_a_ledger_says_whose_text_synthetic_text_was_made_from(
    run, store, monkeypatch, info, expected, tmp_path
):
    for key, value in info.items():
        monkeypatch.setitem(store.info, key, value)
    population = PopulationLedger.open(tmp_path / "l", {})
    facts = ledger_header(run, store, State(round=0, params_P=run.model.initial(3)), population)
    assert {key: value for key, value in facts.items() if key == "synthetic"} == expected


PUBLIC, SEEDED = "a model declared public", {"mode": "reproducible"}
WEAK = {
    "randomness": ({"randomness": SEEDED}, lambda start: start["randomness"] == SEEDED),
    "drop_duplicates": ({"drop_duplicates": True}, lambda start: start["drop_duplicates"] is True),
    "synthetic": ({"synthetic": "fitted to a"}, lambda start: start.get("synthetic") == "fitted to a"),
    "start": ({"start": {"from": PUBLIC}}, lambda start: start["base"] == PUBLIC),
}


@pytest.mark.parametrize("weakness", WEAK)
def test_what_weakens_a_run_is_in_the_first_line_of_all_runs_after_it(weakness):
    facts, is_named = WEAK[weakness]
    strong = {"randomness": {"mode": "secure"}, "drop_duplicates": False, "start": {"from": "seed 0"}}
    start = _inherited({**strong, **facts})
    for _ in range(3):  # a run that began from it, a run that began from that run, and so on
        assert is_named(start)
        start = _inherited({**strong, "start": {"from": EARLIER_RUN, **start}})
    assert not any(named(_inherited(strong)) for _, named in WEAK.values() if named is not WEAK["start"][1])
    assert "base" not in _inherited(strong)


def test_a_budget_is_asked_for_the_event_of_the_phase_that_comes_next(run, tmp_path):
    """Later rounds cost more. Training stops before the first round whose own event exceeds the budget."""
    changes = (unheard.Change(from_round=1, noise_multiplier=0.45), unheard.Change(from_round=3, noise_multiplier=0.4))
    plan = replace(run.plan, schedule=changes)
    events = [plan.at(number, run.model.layout).event() for number in range(4)]
    for allowed in (1, 3):
        delta = run.claimed_delta
        cheap, dear = (
            RunningEpsilon(delta, events=[*events[:allowed], one]).epsilon for one in (events[0], events[allowed])
        )
        budget = Budget(epsilon=(cheap + dear) / 2, delta=delta)
        out = tmp_path / str(allowed)
        budgeted = replace(run, plan=plan, budget=budget, delta=delta, ledger=tmp_path / f"{allowed}.jsonl")
        reports = unheard.train(budgeted, out, engine=EngineChoice(kind="reference"))
        assert next(reports).round == 1
        reports.close()
        resumed = unheard.resume(out)  # the phases are those of the whole run, not of this process
        if allowed == 1:
            with pytest.raises(BudgetExceeded):
                next(resumed)
        else:
            assert [(report.round, report.stopped is None) for report in resumed] == [(2, True), (3, True), (3, False)]
        assert Ledger.read(out / "ledger.jsonl").events == events[:allowed]


def test_the_clip_and_the_noise_of_a_round_are_those_of_the_s_that_the_round_before_has_reached(
    run, tmp_path, monkeypatch
):
    """Also after a resume. A model that differs slightly from its checkpoint is not accepted as the released one."""
    plans, states, real = [], [], loop.run_rounds

    def seen(rounds, engine):
        plans.extend(one.plan for one in rounds)
        after = real(rounds, engine)
        states.extend(after)
        return after

    monkeypatch.setattr(loop, "run_rounds", seen)
    clip = unheard.AdaptiveClip(initial_norm=1.5, learning_rate=0.5)
    adaptive = replace(run, plan=replace(run.plan, clip=clip), training=replace(run.training, rounds=2))
    own = replace(adaptive, ledger=tmp_path / "ledger.jsonl")
    list(unheard.train(own, tmp_path / "r"))
    list(unheard.resume(tmp_path / "r", rounds=4))
    norms = [1.5, *(state.clip_norm for state in states)]
    assert [plan.contribution.l2_bound for plan in plans] == norms[:4]
    assert [plan.sensitivity for plan in plans] == [norm / 12 for norm in norms[:4]]
    assert len(set(norms)) > 2
    facts = {"round": 4, "ledger_length": 4, "ledger_head": Ledger.read(tmp_path / "r" / "ledger.jsonl").head}
    for moved in (0.0, 1e-3):
        save_model(tmp_path / "r" / "model.safetensors", run.model, states[-1].params_P + moved, facts)
        if moved:
            with pytest.raises(UnheardError):
                unheard.Released.open(tmp_path / "r")
        else:
            unheard.Released.open(tmp_path / "r")


def saved(tmp_path, model, **values) -> tuple[RunFolder, State]:
    """Write a run folder with one checkpoint, whose numbers use all bits, and return the folder and the state."""
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir(parents=True, exist_ok=True)
    params_P = torch.randn(model.layout.total, generator=torch.Generator().manual_seed(1))
    memory = {"first": params_P / 3, "steps": torch.tensor(7.0, dtype=torch.float64)}
    state = State(**{"round": 5, "params_P": params_P, "server_memory": memory, "clip_norm": 1 / 3, **values})
    if not folder.ledger.exists():
        Ledger.create(folder.ledger, {"run_id": "r"})
    save_checkpoint(folder, model, state, Ledger.open(folder.ledger), keep=2)
    return folder, state


def test_a_checkpoint_holds_the_whole_state_to_the_last_bit(tmp_path, model):
    folder, state = saved(tmp_path, model)
    read = newest_checkpoint(folder)
    assert (read.state.round, read.state.clip_norm) == (5, 1 / 3)
    assert torch.equal(read.state.params_P, state.params_P)
    assert read.state.server_memory.keys() == state.server_memory.keys()
    for name, tensor in state.server_memory.items():
        assert torch.equal(read.state.server_memory[name], tensor)
        assert read.state.server_memory[name].dtype == tensor.dtype
    ledger = Ledger.read(folder.ledger)
    assert (read.ledger_length, read.ledger_head) == (len(ledger), ledger.head)
    params_P, rounds = released_model(folder.model, model)
    assert rounds == 5
    assert torch.equal(params_P, state.params_P)


def test_the_newest_checkpoint_is_the_one_of_the_latest_round(tmp_path, model):
    for number in (9, 10, 99, 100, 101):
        folder, _ = saved(tmp_path, model, round=number)
        assert newest_checkpoint(folder).state.round == folder.saved_round == number
    assert [read_checkpoint(path).state.round for path in sorted(folder.checkpoints.iterdir())] == [100, 101]


def test_a_change_of_any_tensor_or_fact_of_a_checkpoint_is_noticed(tmp_path, model):
    folder, _ = saved(tmp_path, model)
    for path in (next(folder.checkpoints.iterdir()), folder.model):
        with safetensors.safe_open(path, framework="pt") as file:
            metadata, tensors = file.metadata(), {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        written = json.loads(metadata["unheard"])
        whole = path.read_bytes()

        def is_refused(path=path, metadata=metadata, **content):
            path.write_bytes(safetensors.torch.save(content["tensors"], metadata))
            with pytest.raises(CheckpointCorrupt, match="does not read back"):
                read_checkpoint(path) if path != folder.model else released_model(path, model)

        for name, tensor in tensors.items():
            other = tensor.clone()
            other.view(-1)[-1] += 1.0
            is_refused(tensors={**tensors, name: other})
            renamed = {key if key != name else f"{name}x": value for key, value in tensors.items()}
            is_refused(tensors=renamed)
        for fact, value in written["facts"].items():
            facts = {**written["facts"], fact: 77 if value != 77 else 78}
            is_refused(metadata={"unheard": json.dumps({**written, "facts": facts})}, tensors=tensors)
        path.write_bytes(whole)


def test_a_model_is_known_by_each_of_its_parameters():
    params_P = torch.arange(100, dtype=torch.float32)
    digests = {parameters_digest(params_P), parameters_digest(params_P.flip(0))}
    for i in range(100):
        other_P = params_P.clone()
        other_P[i] += 1e-4
        digests.add(parameters_digest(other_P))
    assert len(digests) == 102
    assert parameters_digest(params_P.double()) == parameters_digest(params_P)
