"""The commands verify, budget, statement --all-runs, audit and canaries on the command line."""

import json
import os
import sys

import pytest

from tests.stores import uncharged_copy
from unheard.cli.main import main
from unheard.corpus.store import write_store
from unheard.privacy.events import PoissonGaussian
from unheard.privacy.ledger import NO_LEDGERS, RECORD
from unheard.privacy.population_ledger import PopulationLedger, open_population_ledger
from unheard.training.run import run_toml


@pytest.fixture
def unheard(capsys, monkeypatch):
    def run_words(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["unheard", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return run_words


@pytest.fixture
def place(run, store, tmp_path):
    """Create a folder with a copy of the store and a run file for it."""
    uncharged_copy(store.path, tmp_path / "corpus")
    text = run_toml(run).replace(str(store.path), str(tmp_path / "corpus")).replace("rounds = 6", "rounds = 2")
    text = text.replace("users_per_round = 12", "users_per_round = 60")  # q = 1 is quick to account for
    assert "users_per_round = 60" in text
    (tmp_path / "run.toml").write_text(text)
    return tmp_path


def test_verify_says_what_fits_and_exits_with_2_if_something_does_not(unheard, place):
    assert unheard("train", place / "run.toml", "--out", place / "r")[0] == 0
    status, out, _ = unheard("verify", place / "r")
    assert status == 0
    assert "Everything that was checked fits" in out
    status, out, _ = unheard("verify", place / "r", "--json")
    told = json.loads(out)
    assert told["fits"] is True
    assert {f["name"] for f in told["findings"]} >= {
        "ledger",
        "configuration",
        "checkpoints",
        "model",
        "statement",
        "population",
    }
    ledger = place / "r" / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes().replace(b'"round":1', b'"round":7'))
    status, out, _ = unheard("verify", place / "r", "--json")
    assert status == 2
    assert json.loads(out)["fits"] is False
    status, out, _ = unheard("verify", place / "r")
    assert status == 2
    assert "cannot be trusted" in out


def test_two_runs_on_one_store_compose_by_either_name(unheard, place):
    for name in ("a", "b"):
        unheard("train", place / "run.toml", "--out", place / name)
    alone = json.loads(unheard("statement", place / "a", "--json")[1])
    told = json.loads(unheard("statement", place / "a", "--all-runs", "--json")[1])
    assert told == json.loads(unheard("statement", place / "corpus", "--json")[1])
    assert told["charges"] == 4
    assert [run["name"] for run in told["runs"]] == ["a", "b"]
    assert told["claimed"]["epsilon"] > alone["claimed"]["epsilon"]
    assert "over all runs together" in unheard("statement", place / "corpus")[1]


def test_a_budget_on_the_store_stops_the_run_that_would_exceed_it(unheard, place):
    assert unheard("budget", place / "corpus")[1].startswith("Nothing was charged")
    assert unheard("budget", place / "corpus", "--epsilon", "10")[0] == 2  # at which delta?
    assert unheard("budget", place / "corpus", "--delta", "1e-5")[0] == 2  # of what?
    unheard("train", place / "run.toml", "--out", place / "a")
    spent = json.loads(unheard("budget", place / "corpus", "--json")[1])["epsilon"]["rdp"]
    delta = json.loads(unheard("budget", place / "corpus", "--json")[1])["delta"]
    status, out, _ = unheard("budget", place / "corpus", "--epsilon", spent * 1.2, "--delta", delta)
    assert status == 0
    assert "spent at delta" in out
    status, _, err = unheard("train", place / "run.toml", "--out", place / "b", "--set", "training.rounds=100")
    assert status in (0, 2)  # stopped after some rounds, or before the first
    people = PopulationLedger.read(place / "corpus" / "ledger.jsonl")
    assert people.budget is not None
    assert people.running(delta).epsilon <= spent * 1.2
    status, _, err = unheard("resume", place / "b")
    assert status == 2
    assert "all runs on this population" in err


def test_stores_of_the_same_users_share_a_ledger(unheard, place, store):
    write_store(
        place / "other",
        train=[store.train.tokens(0)] * 3,
        held_out=[store.held_out.tokens(0)],
        vocabulary=store.vocabulary,
        info=store.info,
    )
    unheard("train", place / "run.toml", "--out", place / "a")
    unheard("train", place / "run.toml", "--out", place / "b", "--set", f'corpus.path="{place / "other"}"')
    assert unheard("budget", place / "corpus", "--same-users", place / "other")[0] == 0
    assert json.loads(unheard("statement", place / "b", "--all-runs", "--json")[1])["charges"] == 4
    assert unheard("resume", place / "b", "--rounds", 3)[0] == 0
    assert json.loads(unheard("statement", place / "a", "--all-runs", "--json")[1])["charges"] == 5
    assert unheard("verify", place / "b")[0] == 0


@pytest.mark.parametrize("number", [1, 2, 3])
def test_every_store_that_is_named_shares_the_ledger_and_keeps_what_it_has_spent(unheard, tmp_path, store, number):
    """The first, the middle and the last `--same-users`. What is charged through any of them counts for all."""
    stores = [uncharged_copy(store.path, tmp_path / f"store{i}") for i in range(number + 1)]
    event = PoissonGaussian(sampling_prob=1.0, noise_multiplier=9.0)

    def charge(i: int, name: str) -> PopulationLedger:
        population = open_population_ledger(stores[i], store.name, [])
        population.register(name, {"name": name, "delta": 1e-3, "population": 60}, 0)
        population.charge(name, 0, event, 0)
        return population

    for i in range(number + 1):
        charge(i, f"before{i}")
    words = [word for other in stores[1:] for word in ("--same-users", other)]
    status, _, err = unheard("budget", stores[0], *words, "--json")
    assert status == 0
    assert all(f"{other} and {stores[0]} are one population" in " ".join(err.split()) for other in stores[1:])
    assert {charge(i, f"after{i}").path for i in range(number + 1)} == {stores[0] / "ledger.jsonl"}
    for each in stores:
        told = json.loads(unheard("budget", each, "--json")[1])
        assert told["charges"] == 2 * (number + 1)
        assert {run["name"] for run in told["runs"]} == {
            f"{when}{i}" for when in ("before", "after") for i in range(number + 1)
        }


def test_a_store_that_cannot_be_written_gives_advice_that_works(unheard, place, monkeypatch):
    real = os.open

    def read_only(file, flags, *mode, **more):
        if flags & (os.O_WRONLY | os.O_RDWR) and str(file).startswith(str(place / "corpus")):
            raise OSError(30, "Read-only file system")
        return real(file, flags, *mode, **more)

    monkeypatch.setattr(os, "open", read_only)
    status, _, err = unheard("train", place / "run.toml", "--out", place / "a")
    assert status == 2
    assert "[privacy] ledger" in err
    assert not (place / "a").exists()
    elsewhere = f'privacy.ledger="{place / "ledgers" / "chat.jsonl"}"'
    assert unheard("train", place / "run.toml", "--out", place / "a", "--set", elsewhere)[0] == 0
    assert unheard("resume", place / "a", "--rounds", 3)[0] == 0
    assert len(PopulationLedger.read(place / "ledgers" / "chat.jsonl").events) == 3
    assert unheard("verify", place / "a")[0] == 0
    assert "over all runs together" in unheard("statement", place / "a", "--all-runs")[1]


@pytest.mark.parametrize("has_record", [True, False])
def test_a_shortened_store_ledger_is_refused_on_resume(unheard, place, has_record):
    """The store's record of its ledgers shows it; without the record, the run's checkpoints do."""
    unheard("train", place / "run.toml", "--out", place / "a")
    ledger = place / "corpus" / "ledger.jsonl"
    if not has_record:
        (place / "corpus" / RECORD).write_text(json.dumps(NO_LEDGERS))
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-1]))
    status, _, err = unheard("resume", place / "a", "--rounds", 3)
    assert status == 2
    assert "shortened" in err
    assert unheard("verify", place / "a")[0] == 2


def test_audit_writes_a_verdict_data_and_a_picture(unheard, place):
    unheard("train", place / "run.toml", "--out", place / "r")
    status, out, _ = unheard("audit", place / "r", "--canaries", 40)
    assert status == 0
    assert "epsilon is at least" in out
    told = json.loads((place / "r" / "audit" / "audit.json").read_text())
    assert told["one_run"]["epsilon_at_least"] <= told["one_run"]["epsilon_claimed"]
    assert told["exposure"] is None
    assert (place / "r" / "audit" / "scores.svg").read_text().startswith("<svg")
    before = len(PopulationLedger.read(place / "corpus" / "ledger.jsonl").events)
    status, out, _ = unheard("audit", place / "r", "--canaries", 8, "--rounds", 1, "--with-users", "--json")
    assert status == 0
    assert json.loads(out)["holds"] is True
    assert len(PopulationLedger.read(place / "corpus" / "ledger.jsonl").events) == before + 1


def test_an_audit_that_refutes_the_claim_is_written_and_ends_with_status_2(unheard, place, monkeypatch):
    unheard("train", place / "run.toml", "--out", place / "r")
    monkeypatch.setattr("unheard.audit.summary.AuditResult.holds", property(lambda result: False))
    status, out, _ = unheard("audit", place / "r", "--canaries", 8, "--rounds", 1)
    assert status == 2
    assert f"Written to {place / 'r' / 'audit'}" in out
    assert sorted(file.name for file in (place / "r" / "audit").iterdir()) == ["audit.json", "scores.svg"]


def test_an_audit_whose_result_cannot_be_written_charges_nobody(unheard, place):
    unheard("train", place / "run.toml", "--out", place / "r")
    charged = len(PopulationLedger.read(place / "corpus" / "ledger.jsonl").events)
    words = ["audit", place / "r", "--canaries", 8, "--rounds", 1, "--with-users", "--out", place / "run.toml"]
    status, _, err = unheard(*words)
    assert status == 2
    assert "run.toml" in err
    assert len(PopulationLedger.read(place / "corpus" / "ledger.jsonl").events) == charged


def test_audit_ranks_planted_secrets_without_saying_them(unheard, place):
    unheard("train", place / "run.toml", "--out", place / "r")
    secret = {"text": "w1 w2 w3", "tokens": [0, 4, 5, 6, 1], "users": [3], "repeats": 1}
    (place / "corpus" / "canaries.json").write_text(json.dumps([secret]))
    status, out, _ = unheard("audit", place / "r", "--skip-one-run", "--candidates", 200)
    assert status == 0
    assert "canaries" in out
    written = (place / "r" / "audit" / "audit.json").read_text()
    assert json.loads(written)["exposure"][0]["users"] == 1
    assert "w1 w2" not in written + out


def test_canaries_are_drawn_from_the_vocabulary_and_never_over_a_file(unheard, tmp_path):
    words = [a + b for a in "abcdefgh" for b in "klmnop"]
    (tmp_path / "vocabulary.txt").write_text("<BOS>\n<EOS>\n<UNK>\n" + "\n".join(words) + "\n")
    status, _, err = unheard("canaries", tmp_path / "vocabulary.txt", "--out", tmp_path / "c.jsonl")
    assert status == 0, err
    drawn = [json.loads(line) for line in (tmp_path / "c.jsonl").read_text().splitlines()]
    assert sorted({one["users"] for one in drawn}) == [0, 1, 14, 200]
    assert all(set(one["text"].split()) <= set(words) for one in drawn)
    assert unheard("canaries", tmp_path / "vocabulary.txt", "--out", tmp_path / "c.jsonl")[0] == 2


def test_more_carriers_than_the_store_trains_on_are_refused_before_anything_is_prepared(unheard, place, tmp_path):
    status, _, err = unheard("canaries", place / "corpus", "--out", tmp_path / "c.jsonl")
    assert status == 2
    assert "--users 0 --users 1" in err
    assert not (tmp_path / "c.jsonl").exists()
