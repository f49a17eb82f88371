"""Each option is passed to the library as it was given, and changes nothing else: the arguments of calls are compared."""

import dataclasses
import importlib
import inspect
import itertools
import json
import signal
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.main import get_command
from typer.testing import CliRunner

import unheard
from unheard.audit.verification import Finding
from unheard.cli import processes
from unheard.cli.main import app
from unheard.corpus.store import write_store
from unheard.corpus.vocabulary import Vocabulary
from unheard.errors import CorpusCorrupt, PrivacyError
from unheard.privacy.accountants import FILTER_ORDERS
from unheard.privacy.budget import Budget
from unheard.privacy.events import PoissonGaussian
from unheard.privacy.ledger import Ledger
from unheard.privacy.population_ledger import open_population_ledger
from unheard.training.run import run_toml


class Asked(Exception):
    """Raised to end a command when it calls the library."""


def values(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the values in an argument of a call, each with its path, such as `preparation.splits.salt`."""
    if dataclasses.is_dataclass(value):
        yield name, type(value).__name__
        for field in dataclasses.fields(value):
            if field.compare:
                yield from values(getattr(value, field.name), f"{name}.{field.name}")
    elif isinstance(value, list | tuple) and any(map(dataclasses.is_dataclass, value)):
        for number, each in enumerate(value):
            yield from values(each, f"{name}.{number}")
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from values(each, f"{name}.{key}")
    elif not callable(value):
        yield name, value


@pytest.fixture
def asked_of(monkeypatch):
    """Return a function that runs a command line and returns the arguments with which it calls a function of the library."""

    def asked(path: str, words: list[str]) -> dict[str, Any]:
        module, _, name = path.rpartition(".")
        place = importlib.import_module(module)
        real, calls = getattr(place, name), []

        def stop(*positional, **named):
            calls.append(inspect.signature(real).bind(*positional, **named).arguments)
            raise Asked

        with monkeypatch.context() as patch:
            patch.setattr(place, name, stop)
            with pytest.raises(Asked):
                CliRunner().invoke(app, words, catch_exceptions=False)
        return dict(pair for key, value in calls[0].items() for pair in values(value, key))

    return asked


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the new values of the arguments that differ."""
    return {name: after.get(name) for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def as_text(named: dict[str, Any]) -> dict[str, str]:
    """Return the values as text, so that a path can be compared with a string."""
    return {name: str(value) for name, value in named.items()}


def options_of(command: str) -> set[str]:
    """Return the names of all options of a command."""
    parameters = get_command(app).commands[command].params  # pyright: ignore[reportAttributeAccessIssue]
    return {parameter.opts[0] for parameter in parameters if parameter.opts[0].startswith("--")}


PREPARE = {
    "--user-field who": {"fields.user": "who"},
    "--text-field what": {"fields.text": "what"},
    "--time-field when": {"fields.time": "when"},
    "--time-format %Y": {"fields.time_format": "%Y"},
    "--table posts": {"fields.table": "posts"},
    "--strip-quotes": {"encoding.strip_quotes": True},
    "--drop-duplicates": {"drop_duplicates": True},
    "--duplicate-chars 7": {"duplicate_chars": 7},
    "--tokens-per-user 7": {"encoding.tokens_per_user": 7, "encoding.min_tokens": 7},
    "--min-tokens 7": {"encoding.min_tokens": 7},
    "--held-out 0.25": {"splits.held_out": 0.25},
    "--public 0.125": {"splits.public": 0.125},
    "--salt x": {"splits.salt": "x"},
    "--test-tokens 7": {"test_tokens": 7},
    "--exclude-users out.txt": {"excluded": ("ann", "#bob")},
    "--punctuation drop": {"tokenizer.punctuation": "drop"},
    "--sequence sentence": {"encoding.sequence": "sentence"},
    "--vocab-size 7": {"vocabulary.size": 7},
    "--vocab-language de": {"vocabulary.language": "de"},
    "--shards 7": {"shards": 7},
}
"""The values of the `Preparation` that each option changes."""
PRIVATE = {
    "--vocab-epsilon 2.5": {"vocabulary.epsilon": 2.5},
    "--vocab-delta 3e-9": {"vocabulary.delta": 3e-9},
    "--vocab-words-per-user 7": {"vocabulary.words_per_user": 7},
    "--vocab-size 7": {"vocabulary.size": 7},
}
"""The values that each option changes, given together with `--vocab private`."""
BUILD = {
    "--memory 2": {"memory_bytes": 2 << 30},
    "--workers 7": {"backend.workers": 7},
    "--user-map map.csv": {"user_map": "map.csv"},
    "--continues earlier": {"continues": "earlier"},
}
"""The other arguments of `build_store` that each option changes."""
ELSEWHERE = {"--out", "--format", "--tokens", "--vocab", "--vocab-corpus", "--canaries", "--engine", "--master"}
ELSEWHERE |= {"--log-file"}
"""Options that other tests check."""


def test_each_option_of_prepare_decides_its_own_value_and_no_other(tmp_path, monkeypatch, asked_of):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "posts.jsonl").write_text('{"a": "ann", "b": "hello"}\n')
    (tmp_path / "out.txt").write_text("ann\n\n#bob\n")

    def asked(words: str) -> dict[str, Any]:
        line = f"prepare posts.jsonl --out store --user-field a --text-field b {words}"
        return asked_of("unheard.corpus.pipeline.build_store", line.split())

    private = "--vocab private --vocab-epsilon 1 --vocab-delta 1e-6"
    for beside, table, prefix in (("", PREPARE, "preparation."), (private, PRIVATE, "preparation."), ("", BUILD, "")):
        before = asked(beside)
        for words, expected in table.items():
            found = changes(before, asked(f"{beside} {words}"))
            assert as_text(found) == as_text({prefix + name: value for name, value in expected.items()}), words
    together = {**PREPARE, **BUILD}  # with all others, each option decides the same
    expected = {f"preparation.{name}": value for values in PREPARE.values() for name, value in values.items()}
    expected |= {name: value for values in BUILD.values() for name, value in values.items()}
    assert as_text(changes(asked(""), asked(" ".join(together)))) == as_text(expected)
    tried = {words.split()[0] for table in (PREPARE, PRIVATE, BUILD) for words in table}
    assert tried | ELSEWHERE == options_of("prepare")


SELECT = {
    "--trials 2.75": {"count.mean": 2.75},
    "--trials-from poisson": {"count.drawn_from": "poisson"},
    "--out other": {"out": "other"},
    "--set training.rounds=7": {f"candidates.{i}.training.rounds": 7 for i in range(2)},
    "--set noise.noise_multiplier=0.73": {f"candidates.{i}.plan.noise.noise_multiplier": 0.73 for i in range(2)},
    "--vary clip.norm=1,3": {"candidates.1.plan.clip.norm": 3.0},
}


def test_each_option_of_a_selection_decides_its_own_value_and_no_other(run, tmp_path, monkeypatch, asked_of):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(run_toml(replace(run, plan=replace(run.plan, clip=unheard.FlatClip(norm=1.0)))))

    def asked(words: str) -> dict[str, Any]:
        vary = "" if "--vary" in words else "--vary clip.norm=1,2"
        line = f"tune run.toml --out best --select {vary} {words}"
        return asked_of("unheard.tuning.private_selection.select", line.split())

    before = asked("")
    assert (before["count.mean"], before["count.drawn_from"]) == (5.0, "geometric")
    for words, expected in SELECT.items():
        assert as_text(changes(before, asked(words))) == as_text(expected), words


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_a_selection_is_an_exception_so_that_its_trials_are_deleted(run, tmp_path, monkeypatch, number):
    (tmp_path / "run.toml").write_text(run_toml(replace(run, plan=replace(run.plan, clip=unheard.FlatClip(norm=1.0)))))
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    seen = []

    def select(*_, **__):
        seen.append(processes._ends_at_once.is_set())
        signal.raise_signal(number)

    monkeypatch.setattr("unheard.tuning.private_selection.select", select)
    line = f"tune {tmp_path / 'run.toml'} --out {tmp_path / 'best'} --select --vary clip.norm=1,2"
    processes._ends_at_once.set()  # as in the command line: from its start, a signal ends the process at once
    try:
        done = CliRunner().invoke(app, line.split())
    finally:
        processes._ends_at_once.clear()
        for one, handler in before.items():
            signal.signal(one, handler)
    assert seen == [False]
    assert done.exit_code != 0


SWEEP = {
    "--norms 1,2.5": {"grid.norms": (1.0, 2.5)},
    "--noise-stds 0.25,0.5": {"grid.noise_stds": (0.25, 0.5)},
    "--users-per-round 7": {"grid.users_per_round": 7},
    "--seeds 7": {"grid.seeds": 7},
    "--rounds 7": {"run.training.rounds": 7},
    "--allow-clip-loss 0.75": {"allowance.clip_loss": 0.75},
    "--allow-loss 0.75": {"allowance.loss": 0.75},
}


def test_each_option_of_a_sweep_decides_its_own_value_and_no_other(run, tmp_path, monkeypatch, asked_of):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("unheard.tuning.output.check_can_be_private", lambda *_: None)
    (tmp_path / "run.toml").write_text(run_toml(run))

    def asked(words: str) -> dict[str, Any]:
        return asked_of("unheard.tuning.pipeline.run_stages", f"tune run.toml --out t --yes {words}".split())

    before = asked("")
    for words, expected in SWEEP.items():
        assert changes(before, asked(words)) == expected, words


TRAIN = {
    "--secure-aggregation": {"choice.secure_aggregation": True, "secure_aggregation": True},
    "--on flower": {"nodes.on": "flower"},
    "--supernodes 7": {"nodes.supernodes": 7},
    "--engine reference": {"choice.kind": "reference"},
    "--device cpu": {"choice.device": "cpu"},
    "--rank-timeout 7": {"choice.rank_timeout": 7.0},
    "--set noise.noise_multiplier=0.734567891": {"run.plan.noise.noise_multiplier": 0.734567891},
    "--set privacy.population=61": {"run.plan.population": 61},
    "--set privacy.delta=1.23456789e-7": {"run.delta": 1.23456789e-7},
    "--set clip.norm=0.123456789": {"run.plan.clip.norm": 0.123456789},
}


def test_each_option_of_train_decides_its_own_value_and_no_other(run, tmp_path, monkeypatch, asked_of):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(run_toml(run))
    before = asked_of("unheard.cli.train.nodes_of", ["train", "run.toml", "--out", "r"])
    assert before["secure_aggregation"] is False
    for words, expected in TRAIN.items():
        after = asked_of("unheard.cli.train.nodes_of", ["train", "run.toml", "--out", "r", *words.split()])
        assert changes(before, after) == expected, words


def test_a_statement_is_asked_for_at_the_point_that_was_given(tmp_path, asked_of):
    ledger = Ledger.create(tmp_path / "ledger.jsonl", {"population": 10_000, "delta": 1e-5})
    ledger.charge(PoissonGaussian(sampling_prob=0.01, noise_multiplier=1), 0)

    def asked(*words: str) -> dict[str, Any]:
        return asked_of("unheard.privacy.statement.compute_statement", ["statement", str(tmp_path), *words])

    before = asked()
    assert (before["delta"], before["epsilon"]) == (None, None)
    assert changes(before, asked("--delta", "1.2345678e-8")) == {"delta": 1.2345678e-8}
    assert changes(before, asked("--epsilon", "0.12345678")) == {"epsilon": 0.12345678}


@pytest.mark.parametrize(
    ("line", "function", "is_charged"),
    [("statement", "store_statement", False), ("statement", "all_runs", True), ("budget", "all_runs", True)],
)
def test_the_total_of_all_runs_is_asked_for_at_the_delta_that_was_given(tmp_path, asked_of, line, function, is_charged):
    store = write_store(tmp_path / "store", train=[], held_out=[], vocabulary=Vocabulary.of(["a"]))
    if is_charged:
        population = open_population_ledger(store.path, store.name, [])
        population.set_budget(Budget(epsilon=8.0, delta=1e-5))
        population.register("run", {"name": "first", "delta": 1e-5, "population": 10}, num_charged=0)
        population.charge("run", 0, PoissonGaussian(sampling_prob=0.01, noise_multiplier=1), round=0)

    def asked(*words: str) -> dict[str, Any]:
        return asked_of(f"unheard.privacy.population_statement.{function}", [line, str(store.path), *words])

    assert asked()["delta"] is None
    assert asked("--delta", "1.2345678e-8")["delta"] == 1.2345678e-8


def test_verify_looks_at_the_folder_and_the_store_that_were_given(tmp_path, asked_of):
    asked = asked_of("unheard.audit.verification.verify", ["verify", str(tmp_path), "--corpus", "moved"])
    assert as_text(asked) == {"path": str(tmp_path), "corpus": "moved"}
    assert asked_of("unheard.audit.verification.verify", ["verify", str(tmp_path)])["corpus"] is None


@pytest.mark.parametrize("faults", [0, 1, 2])
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_verify_ends_with_2_after_one_fault_or_more_in_words_and_in_json(tmp_path, monkeypatch, faults, form):
    fits = [True, None, *[False] * faults]
    findings = [Finding(name=f"check {i}", fits=each, words="") for i, each in enumerate(fits)]
    monkeypatch.setattr("unheard.audit.verification.verify", lambda folder, corpus: findings)
    done = CliRunner().invoke(app, ["verify", str(tmp_path), *form], catch_exceptions=False)
    assert done.exit_code == (2 if faults else 0)
    if form:
        told = json.loads(done.stdout)
        assert told["fits"] is (faults == 0)
        assert [finding["fits"] for finding in told["findings"]] == fits
    else:
        assert ("cannot be trusted" in done.output) is (faults > 0)


@pytest.fixture
def audited(run, tmp_path, monkeypatch):
    """Return a function that runs `audit` without computing anything, and returns the arguments and the exit status."""

    def audit(*words: str, holds: bool = True, noise: unheard.GaussianNoise | unheard.NoNoise | None = None):
        asked, own = {}, replace(run, plan=replace(run.plan, noise=noise or run.plan.noise))

        def audit_run(*_, **named):
            asked.update(named)
            record = {"verdict": ["A verdict."]}
            return SimpleNamespace(holds=holds, exposures=[], record=lambda: record, write=lambda *_: None)

        monkeypatch.setattr("unheard.audit.summary.audit_run", audit_run)
        monkeypatch.setattr("unheard.training.released.Released.open", lambda path: SimpleNamespace(run=own))
        done = CliRunner().invoke(app, ["audit", str(tmp_path / "r"), *words])
        return done, asked

    return audit


AUDIT = {
    "--canaries 7": {"canaries": 7},
    "--rounds 7": {"rounds": 7},
    "--candidates 700": {"candidates": 700},
    "--with-users": {"with_users": True},
    "--skip-one-run": {"skip_one_run": True},
}


def test_each_option_of_an_audit_decides_its_own_value_and_no_other(audited):
    _, before = audited()
    assert before["allow_no_privacy"] is False
    for words, expected in AUDIT.items():
        after = audited(*words.split())[1]
        assert {name: after[name] for name in after if after[name] != before[name] and name != "progress"} == expected


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_an_audit_that_refutes_the_claim_ends_with_2(audited, form):
    assert [audited(*form, holds=holds)[0].exit_code for holds in (True, False)] == [0, 2]


def test_users_take_part_in_an_audit_without_noise_only_if_that_was_allowed(audited):
    none = unheard.NoNoise()
    done, asked = audited("--with-users", noise=none)
    assert isinstance(done.exception, PrivacyError)
    assert not asked
    assert audited("--with-users", "--yes", noise=none)[1]["allow_no_privacy"] is True
    for words in ([], ["--yes"], ["--with-users", "--skip-one-run", "--yes"]):  # nobody takes part
        assert audited(*words, noise=none)[1]["allow_no_privacy"] is False


def test_phrases_to_plant_are_drawn_anew_each_time_and_kept_from_others(tmp_path):
    words = ("".join(letters) for letters in itertools.product("abcdefghij", repeat=3))
    Vocabulary.of(words).save(tmp_path / "vocabulary.txt")
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for file in files:
        words = ["canaries", str(tmp_path / "vocabulary.txt"), "--out", str(file)]
        assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
        assert file.stat().st_mode & 0o077 == 0
    first, second = ({json.loads(line)["text"] for line in file.read_text().splitlines()} for file in files)
    assert len(first) == len(second) == 12
    assert not first & second


def test_a_budget_is_set_as_it_was_given_and_keeps_its_delta(tmp_path, monkeypatch):
    words = Vocabulary.of(["a"])
    write_store(tmp_path / "store", train=[], held_out=[], vocabulary=words)
    given = []
    set_budget = unheard.privacy.population_ledger.PopulationLedger.set_budget
    monkeypatch.setattr(
        "unheard.privacy.population_ledger.PopulationLedger.set_budget",
        lambda ledger, budget: (given.append((ledger.path, budget)), set_budget(ledger, budget)),
    )
    for line in (
        "--epsilon 8.125 --delta 1.25e-7",
        "--epsilon 9.5",
        "--epsilon 9.5 --accountant moments",
        f"--epsilon 3 --delta 1e-9 --ledger {tmp_path / 'other.jsonl'}",
    ):
        done = CliRunner().invoke(app, ["budget", str(tmp_path / "store"), *line.split()], catch_exceptions=False)
        assert done.exit_code == 0
    own, other = tmp_path / "store" / "ledger.jsonl", tmp_path / "other.jsonl"
    filtered = {"accountant": "rdp", "orders": FILTER_ORDERS}
    assert given == [
        (own, Budget(epsilon=8.125, delta=1.25e-7, **filtered)),
        (own, Budget(epsilon=9.5, delta=1.25e-7, **filtered)),
        (own, Budget(epsilon=9.5, delta=1.25e-7, accountant="moments")),
        (other, Budget(epsilon=3.0, delta=1e-9, **filtered)),
    ]


def test_show_reads_every_file_before_it_shows_the_store(tmp_path):
    users = [np.array([0, 3, 1])] * 3
    store = write_store(tmp_path / "store", train=users, held_out=users, vocabulary=Vocabulary.of(["a"]))
    assert CliRunner().invoke(app, ["corpus", "show", str(store.path)]).exit_code == 0
    file = store.path / "train" / "00000.tokens"
    file.write_bytes(file.read_bytes()[:-2] + b"\x00\x00")
    done = CliRunner().invoke(app, ["corpus", "show", str(store.path)])
    assert isinstance(done.exception, CorpusCorrupt)
    assert "users" not in done.stdout
