"""The ledger of a population: every run on it is charged, several at once, and it can only grow."""

import json
import os
import shutil
import stat
import subprocess
import sys
import threading

import pytest

from unheard.errors import BudgetExceeded, InvalidValue, LedgerError
from unheard.privacy import ledger as chain
from unheard.privacy.accountants import epsilon
from unheard.privacy.budget import Budget
from unheard.privacy.events import Gaussian, NonPrivate, PoissonGaussian
from unheard.privacy.ledger import Ledger, new_run_id, run_id
from unheard.privacy.population_ledger import PopulationLedger, open_population_ledger
from unheard.privacy.population_statement import all_runs, render_all_runs
from unheard.privacy.run_ledger import JointLedger

ROUND = PoissonGaussian(sampling_prob=0.01, noise_multiplier=1.0)
DELTA = 1.23456789e-6


@pytest.fixture
def path(tmp_path):
    (tmp_path / "store").mkdir()
    return tmp_path / "store" / "ledger.jsonl"


def opened(path) -> PopulationLedger:
    return PopulationLedger.open(path, {"corpus": "c"})


def ledger(folder, name="r", run="one", events=(), **facts) -> Ledger:
    (folder / name).mkdir()
    made = Ledger.create(folder / name / "ledger.jsonl", {"delta": DELTA, "population": 1000, "run_id": run, **facts})
    for event in events:
        made.charge(event, 0)
    return made


def begun(folder, population, name="r", run="one", parent=None, past=(), **facts) -> JointLedger:
    made = ledger(folder, name, run, past, **facts)
    JointLedger.register(made, population, name, parent)
    return JointLedger(made, population)


def test_a_round_is_charged_to_the_population_before_the_runs_own_ledger(path, tmp_path, monkeypatch):
    account = begun(tmp_path, opened(path))

    def power_loss(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(Ledger, "charge", power_loss)
    with pytest.raises(KeyboardInterrupt):
        account.charge(ROUND, 0)
    assert PopulationLedger.read(path).events == [ROUND]
    assert len(account) == 0


def test_the_hash_that_a_checkpoint_holds_confirms_no_guess_about_the_text(path):
    population = PopulationLedger.open(path, {})
    before = population.position["head"]
    population.register("r", {"store": "the digest of the text"}, num_charged=0, is_new=True)
    guessed = {"began": {"run": "r", "facts": {"store": "the digest of the text"}, "held": 0}}
    line = path.read_bytes().splitlines()[-1]
    assert population.position["head"] not in (chain.seal(guessed, before)[1], before)
    secret = chain.unseal(line, before)[0]["once"]
    population.register("r", {"store": "the digest of the text"}, num_charged=0, is_new=True)
    assert len(secret) == 32  # 128 bits, new for each run
    assert secret.encode() not in path.read_bytes().splitlines()[-1]


def test_a_charge_is_synced_before_it_returns(path, tmp_path, monkeypatch):
    account, synced, real = begun(tmp_path, opened(path)), [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_ino), real(fd))[1])
    account.charge(ROUND, 0)
    assert synced == [os.stat(path).st_ino, os.stat(tmp_path / "r" / "ledger.jsonl").st_ino]


def test_runs_on_one_population_compose(path, tmp_path):
    population = opened(path)
    for run in ("one", "two"):
        account = begun(tmp_path, population, run, run)
        for round in range(50):
            account.charge(ROUND, round)
    told = all_runs(PopulationLedger.read(path))
    assert told["epsilon"]["rdp"] == pytest.approx(epsilon([(ROUND, 100)], DELTA, "rdp"))
    assert told["epsilon"]["rdp"] > told["runs"][0]["alone"]["epsilon"]
    assert [run["charges"] for run in told["runs"]] == [50, 50]
    assert "over all runs together" in render_all_runs(told)
    json.dumps(told, allow_nan=False)


def test_one_run_without_noise_voids_the_claim_over_all_runs_and_is_named(path, tmp_path):
    population = opened(path)
    begun(tmp_path, population, "private", "one").charge(ROUND, 0)
    begun(tmp_path, population, "plain", "two").charge(NonPrivate(reason="no noise is added"), 0)
    told = all_runs(population)
    assert told["claimed"]["epsilon"] == "infinity"
    assert "plain" in told["claim"]
    assert "private" not in told["claim"]


def test_a_seeded_run_is_a_warning_of_the_total(path, tmp_path):
    population = opened(path)
    begun(tmp_path, population, randomness={"mode": "reproducible"}).charge(ROUND, 0)
    assert "REPRODUCIBLE" in render_all_runs(all_runs(population))


def test_resuming_charges_nothing_twice_and_forgets_nothing(path, tmp_path):
    begun(tmp_path, opened(path)).charge(ROUND, 0)
    again = JointLedger(Ledger.open(tmp_path / "r" / "ledger.jsonl"), opened(path))
    assert len(again.population.events) == 1
    again.charge(ROUND, 1)
    assert len(PopulationLedger.read(path).events) == 2


def test_two_copies_of_one_run_are_charged_for_what_each_releases(path, tmp_path):
    begun(tmp_path, opened(path)).charge(ROUND, 0)
    shutil.copytree(tmp_path / "r", tmp_path / "copy")
    for name in ("r", "copy"):
        JointLedger(Ledger.open(tmp_path / name / "ledger.jsonl"), opened(path)).charge(ROUND, 1)
    assert len(PopulationLedger.read(path).events) == 3


def test_a_run_that_comes_to_a_store_without_its_ledger_brings_its_charges(path, tmp_path):
    made = ledger(tmp_path, events=[ROUND] * 3)
    account = JointLedger(made, opened(path))
    assert len(PopulationLedger.read(path).events) == 3
    account.charge(ROUND, 3)
    told = all_runs(PopulationLedger.read(path))
    assert told["charges"] == 4
    assert any("came here with 3 charges" in warning for warning in told["warnings"])


def test_the_cost_of_a_start_is_charged_once_on_its_own_store_and_copied_to_another(path, tmp_path):
    population = opened(path)
    parent = begun(tmp_path, population, "first", "one")
    parent.charge(ROUND, 0)
    parent.charge(ROUND, 1)
    first = Ledger.read(tmp_path / "first" / "ledger.jsonl")
    child = begun(tmp_path, population, "second", "two", parent=first, past=first.events)
    child.charge(ROUND, 0)
    assert len(population.events) == 3
    (tmp_path / "other").mkdir()
    elsewhere = opened(tmp_path / "other" / "ledger.jsonl")
    begun(tmp_path, elsewhere, "third", "three", parent=first, past=first.events).charge(ROUND, 0)
    assert len(elsewhere.events) == 3


def test_a_vocabulary_that_was_paid_for_is_charged_once_for_all_runs(tmp_path, monkeypatch):
    paid = [{"kind": "gaussian", "noise_multiplier": 3.0}, {"kind": "failure_probability", "delta": 1e-9}]
    monkeypatch.setattr(PopulationLedger, "settle", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # killed between two lines
        open_population_ledger(tmp_path, "corpus", paid)
    monkeypatch.undo()
    for _ in range(3):
        population = open_population_ledger(tmp_path, "corpus", paid)
    assert [type(e).__name__ for e in population.events] == ["Gaussian", "FailureProbability"]


def test_a_budget_on_the_population_stops_every_run_on_it(path, tmp_path):
    population = opened(path)
    population.set_budget(Budget(epsilon=epsilon([(ROUND, 10)], DELTA, "rdp") + 1e-9, delta=DELTA))
    one, two = begun(tmp_path, population, "a", "one"), begun(tmp_path, opened(path), "b", "two")
    for round in range(5):
        one.charge(ROUND, round)
        two.charge(ROUND, round)
    for account in (one, two):
        with pytest.raises(BudgetExceeded, match=r"all runs on this population.*larger budget with `unheard budget"):
            account.charge(ROUND, 5)
        assert len(account) == 5
    with pytest.raises(BudgetExceeded):
        begun(tmp_path, opened(path), "c", "three").charge(NonPrivate(reason="no noise is added"), 0)
    assert len(PopulationLedger.read(path).events) == 10
    population.set_budget(Budget(epsilon=100.0, delta=DELTA))
    two.charge(ROUND, 5)
    assert all_runs(population)["budget"]["epsilon"] == 100.0


def test_stores_declared_one_population_share_one_ledger_even_for_runs_under_way(path, tmp_path):
    (tmp_path / "other").mkdir()
    elsewhere = tmp_path / "other" / "ledger.jsonl"
    mine, theirs = begun(tmp_path, opened(path), "a", "one"), begun(tmp_path, opened(elsewhere), "b", "two")
    mine.charge(ROUND, 0)
    theirs.charge(ROUND, 0)
    before = theirs.position
    opened(path).join(opened(elsewhere))
    theirs.charge(ROUND, 1)
    mine.charge(ROUND, 1)
    for place in (path, elsewhere):
        assert len(PopulationLedger.read(place).events) == 4
    assert opened(elsewhere).path == path
    assert opened(elsewhere).contains(before) is True
    with pytest.raises(InvalidValue, match="already"):
        opened(path).join(opened(elsewhere))
    path.unlink()
    with pytest.raises(LedgerError, match="is not there"):
        opened(elsewhere)


def test_joining_a_copy_of_a_store_counts_what_they_share_once_and_the_rest_of_both(path, tmp_path):
    mine = begun(tmp_path, opened(path), "a", "one")
    mine.charge(ROUND, 0)
    shutil.copytree(path.parent, tmp_path / "copy")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    theirs = JointLedger(Ledger.open(tmp_path / "b" / "ledger.jsonl"), opened(tmp_path / "copy" / "ledger.jsonl"))
    theirs.charge(ROUND, 1)
    mine.charge(ROUND, 1)
    opened(path).join(opened(tmp_path / "copy" / "ledger.jsonl"))
    assert len(opened(path).events) == 3


WRITER = """
import sys
from unheard.privacy.run_ledger import JointLedger
from unheard.privacy.events import PoissonGaussian
from unheard.privacy.ledger import Ledger
from unheard.privacy.population_ledger import PopulationLedger
population = PopulationLedger.open(sys.argv[1], {"corpus": "c"})
made = Ledger.create(sys.argv[2], {"run_id": sys.argv[2]})
JointLedger.register(made, population, "x")
account = JointLedger(made, population)
for round in range(60):
    account.charge(PoissonGaussian(sampling_prob=0.01, noise_multiplier=1.0), round)
"""


@pytest.mark.system
def test_several_processes_charge_one_ledger_and_every_line_is_there(path, tmp_path):
    going = [subprocess.Popen([sys.executable, "-c", WRITER, path, tmp_path / f"{i}.jsonl"]) for i in range(3)]
    assert [process.wait() for process in going] == [0, 0, 0]
    population = PopulationLedger.read(path)
    assert [len(charged_run.events) for charged_run in population.runs.values()] == [60, 60, 60]


def test_a_charge_waits_for_the_lock_of_the_ledger(path, tmp_path):
    account = begun(tmp_path, opened(path))
    charging = threading.Thread(target=account.charge, args=(ROUND, 0))
    with opened(path)._file.locked():
        charging.start()
        charging.join(0.5)
        assert charging.is_alive()
    charging.join()
    assert len(opened(path).events) == 1


def test_every_cut_in_the_last_line_is_mended_and_the_rest_stays(path, tmp_path):
    account = begun(tmp_path, opened(path))
    account.charge(ROUND, 0)
    before = path.read_bytes()
    account.charge(ROUND, 1)
    whole = path.read_bytes()
    for cut in range(len(before) + 1, len(whole), 7):
        path.write_bytes(whole[:cut])
        assert len(PopulationLedger.read(path).events) == 1
        assert path.read_bytes() == whole[:cut]
        assert len(opened(path).events) == 1
        assert path.read_bytes() == before
    path.write_bytes(whole[:-1])
    assert len(PopulationLedger.read(path).events) == 2
    assert len(opened(path).events) == 2
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "content", [b"", b'{"ledger":"unheard-pop', b"my notes, without a newline", b"\0" * 70_000, b"notes\n"]
)
def test_a_file_that_is_no_ledger_is_refused_and_left_as_it_is(path, content):
    path.write_bytes(content)
    for look in (opened, PopulationLedger.read):
        with pytest.raises(LedgerError, match="line"):
            look(path)
    assert path.read_bytes() == content


def test_a_ledger_without_line_breaks_is_refused_and_left_as_it_is(path, tmp_path):
    begun(tmp_path, opened(path)).charge(ROUND, 0)
    joined = path.read_bytes().replace(b"\n", b" ")
    path.write_bytes(joined)
    with pytest.raises(LedgerError, match="no complete first line"):
        opened(path)
    assert path.read_bytes() == joined


def test_a_crash_while_a_ledger_is_created_leaves_no_half_of_it(path, monkeypatch):
    def power_loss(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", power_loss)
    with pytest.raises(KeyboardInterrupt):
        opened(path)
    monkeypatch.undo()
    assert not path.exists()
    assert opened(path).events == []


@pytest.mark.parametrize("change", ["edit", "swap", "drop", "repeat"])
def test_a_changed_line_is_refused_and_named(path, tmp_path, change):
    account = begun(tmp_path, opened(path))
    for round in range(4):
        account.charge(ROUND, round)
    lines = path.read_bytes().splitlines(keepends=True)
    spoil = {
        "edit": [*lines[:3], lines[3].replace(b"1.0", b"9.0"), *lines[4:]],
        "swap": [*lines[:2], lines[3], lines[2], *lines[4:]],
        "drop": [*lines[:2], *lines[3:]],
        "repeat": [*lines[:3], lines[2], *lines[3:]],
    }[change]
    path.write_bytes(b"".join(spoil))
    for look in (opened, PopulationLedger.read):
        with pytest.raises(LedgerError, match=r"line [34]"):
            look(path)


def test_a_shortened_ledger_does_not_hold_what_a_checkpoint_remembers(path, tmp_path):
    account = begun(tmp_path, opened(path))
    account.charge(ROUND, 0)
    account.charge(ROUND, 1)
    remembered = account.position
    assert opened(path).contains(remembered) is True
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    assert PopulationLedger.read(path).contains(remembered) is False
    path.unlink()
    assert opened(path).contains(remembered) is None


def test_a_ledger_that_shrinks_under_a_run_stops_it(path, tmp_path):
    account = begun(tmp_path, opened(path))
    account.charge(ROUND, 0)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(LedgerError, match="shorter"):
        account.charge(ROUND, 1)
    assert len(account) == 1


def test_a_store_that_cannot_be_written_is_refused_with_advice(path, monkeypatch):
    real = os.open

    def read_only(file, flags, *mode, **more):
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(30, "Read-only file system")
        return real(file, flags, *mode, **more)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(LedgerError, match=r"Read-only file system.*\[privacy\] ledger"):
        opened(path)


def test_a_full_disk_refuses_the_charge_and_leaves_a_whole_ledger(path, tmp_path, monkeypatch):
    account = begun(tmp_path, opened(path))
    account.charge(ROUND, 0)
    before, real = path.read_bytes(), os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[: len(data) // 2]))
    with pytest.raises(LedgerError, match="only part of the content"):
        account.charge(ROUND, 1)
    assert path.read_bytes() == before
    assert len(account) == 1


@pytest.mark.parametrize(
    "record",
    [
        {"run": "x"},
        {"run": "x", "position": 0, "event": {"kind": "free"}},
        {"began": 3},
        {"budget": {"epsilon": -1}},
    ],
)
def test_a_sealed_line_of_no_known_kind_is_refused(path, record):
    population = opened(path)
    line, _ = chain.seal(record, population.position["head"])
    with open(path, "ab") as file:
        file.write(line)
    with pytest.raises(LedgerError):
        opened(path)


def test_another_format_is_refused(path):
    line, _ = chain.seal({"ledger": "something-else", "facts": {}}, "")
    path.write_bytes(line)
    with pytest.raises(LedgerError, match="not the header"):
        opened(path)


def test_the_ledger_is_for_its_owner_alone(path):
    opened(path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_names_of_runs_never_repeat_unless_the_run_does(tmp_path):
    assert len({new_run_id() for _ in range(50)}) == 50
    assert new_run_id("ab" * 32) == new_run_id("ab" * 32)
    assert run_id(ledger(tmp_path, "named", "abc")) == "abc"
    assert run_id(ledger(tmp_path, "old", None)).startswith("unnamed-")


def test_a_run_that_has_released_something_to_everybody_counts_too(path, tmp_path):
    population = opened(path)
    begun(tmp_path, population).charge(Gaussian(noise_multiplier=5.0), 0)
    assert all_runs(population)["charges"] == 1
