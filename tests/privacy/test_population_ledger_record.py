"""The record of a store's ledgers: a recorded ledger must exist, and a newer store of the same users continues it."""

import contextlib
import errno
import json
import logging
import os
import re
import shutil
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import unheard
from tests.corpus.inputs import write_jsonl
from tests.stores import uncharged_copy
from unheard.cli.main import app
from unheard.corpus import pipeline
from unheard.corpus.store import TokenStore, write_digests
from unheard.corpus.transform import shrink_vocabulary
from unheard.errors import BudgetExceeded, InvalidValue, LedgerError, UnheardError, UnprovenCombination
from unheard.privacy import population_ledger
from unheard.privacy.accountants import FILTER_ORDERS
from unheard.privacy.budget import Budget
from unheard.privacy.events import PoissonGaussian
from unheard.privacy.population_ledger import (
    RECORD,
    PopulationLedger,
    check_one_ledger,
    continue_ledger,
    known_position,
    open_population_ledger,
    read_population_ledger,
    remember_position,
)
from unheard.privacy.population_statement import all_runs, find_population_ledger, store_statement
from unheard.training.initialise import population_ledger_of

ROUND = PoissonGaussian(sampling_prob=0.01, noise_multiplier=1.0)


@pytest.fixture
def own(run, store, tmp_path):
    """Return the run on a copy of the store without charges."""
    uncharged_copy(store.path, tmp_path / "store")
    return replace(run, corpus=tmp_path / "store", training=unheard.Training(rounds=1))


def test_a_new_run_never_begins_a_deleted_ledger_anew(own, tmp_path):
    list(unheard.train(own, tmp_path / "first"))
    ledger = tmp_path / "store" / "ledger.jsonl"
    kept = ledger.read_bytes()
    ledger.unlink()
    with pytest.raises(LedgerError, match="is missing"):
        list(unheard.train(own, tmp_path / "second"))
    with pytest.raises(LedgerError, match="is missing"):
        store_statement(tmp_path / "store")
    assert not ledger.exists()
    ledger.write_bytes(kept)
    list(unheard.train(own, tmp_path / "third"))
    assert len(PopulationLedger.read(ledger).runs) == 2


@pytest.mark.parametrize("how", ["cut", "swapped"])
def test_a_new_run_refuses_another_ledger_than_the_stores(own, tmp_path, how):
    list(unheard.train(own, tmp_path / "first"))
    ledger = tmp_path / "store" / "ledger.jsonl"
    population_ledger_of(own, TokenStore.open(own.corpus))
    if how == "cut":
        ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-1]))
    else:
        ledger.unlink()
        PopulationLedger.open(ledger, {"corpus": "c"})
    with pytest.raises(LedgerError, match="shortened or replaced"):
        list(unheard.train(own, tmp_path / "second"))


def test_a_link_in_the_place_of_a_stores_ledger_is_compared_with_the_record_of_that_ledger(own, tmp_path):
    """The ledger of another store has fewer charges. The store's own ledger may be moved, with a link to it."""
    list(unheard.train(own, tmp_path / "first"))
    ledger, moved = tmp_path / "store" / "ledger.jsonl", tmp_path / "moved.jsonl"
    ledger.rename(moved)
    PopulationLedger.open(tmp_path / "other" / "ledger.jsonl", {"corpus": "c"})
    ledger.symlink_to(tmp_path / "other" / "ledger.jsonl")
    for use in (
        lambda: find_population_ledger(ledger, wanted=True),
        lambda: list(unheard.train(own, tmp_path / "second")),
    ):
        with pytest.raises(LedgerError, match="shortened or replaced"):
            use()
    ledger.unlink()
    ledger.symlink_to("nowhere")
    with pytest.raises(LedgerError, match="is missing"):
        store_statement(tmp_path / "store")
    ledger.unlink()
    ledger.symlink_to(moved)
    list(unheard.train(own, tmp_path / "third"))
    assert len(PopulationLedger.read(ledger).runs) == 2
    record = json.loads((tmp_path / "store" / RECORD).read_text())
    assert list(record["known"]) == ["ledger.jsonl"]
    # As earlier versions recorded it.
    (tmp_path / "store" / RECORD).write_text(
        json.dumps({**record, "known": {str(moved): record["known"]["ledger.jsonl"]}})
    )
    moved.write_bytes(b"".join(moved.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(LedgerError, match="shortened or replaced"):
        find_population_ledger(ledger, wanted=True)


DAMAGED_RECORDS = [
    "",
    "[]",
    "{}",
    '{"known": {"ledger.jsonl": 1}}',
    "[" * 200_000,
    '{"known": []}',
    '{"known": {"ledger.jsonl": {"ledger": "x", "length": 1}}}',
    '{"known": {"ledger.jsonl": {}}}',
    '{"known": {}, "continues": {"ledger": "x", "joined": 1}}',
    '{"known": {}, "continues": {"ledger": 1, "joined": true}}',
]


@pytest.mark.parametrize("content", DAMAGED_RECORDS)
def test_a_damaged_record_of_the_ledgers_is_an_error(own, tmp_path, content):
    list(unheard.train(own, tmp_path / "first"))
    (tmp_path / "store" / RECORD).write_text(content)
    with pytest.raises(LedgerError, match="Put back"):
        list(unheard.train(own, tmp_path / "second"))


def test_a_store_that_lost_the_record_of_its_ledgers_is_refused(own, tmp_path):
    list(unheard.train(own, tmp_path / "first"))
    for name in (RECORD, "ledger.jsonl"):
        (tmp_path / "store" / name).unlink()
        with pytest.raises(LedgerError, match=r"ledgers\.json is missing"):
            list(unheard.train(own, tmp_path / "second"))
    with pytest.raises(LedgerError, match=r"ledgers\.json is missing"):
        store_statement(tmp_path / "store")


def test_a_store_that_lost_its_digests_too_is_refused(own, tmp_path):
    list(unheard.train(own, tmp_path / "first"))
    for name in ("ledger.jsonl", RECORD, "digests.json"):
        (tmp_path / "store" / name).unlink()
    with pytest.raises(LedgerError, match=r"digests\.json is missing.*Put it back"):
        store_statement(tmp_path / "store")
    with pytest.raises(UnheardError, match=r"digests\.json"):
        list(unheard.train(own, tmp_path / "second"))


def test_a_copy_of_a_store_needs_its_ledger(own, tmp_path):
    """A copy has the same users. If it began its own ledger, earlier charges to them would be lost."""
    list(unheard.train(own, tmp_path / "first"))
    copy = shutil.copytree(tmp_path / "store", tmp_path / "copy", ignore=shutil.ignore_patterns("ledger.jsonl"))
    with pytest.raises(LedgerError, match="is missing"):
        list(unheard.train(replace(own, corpus=copy), tmp_path / "second"))
    with pytest.raises(LedgerError, match="is missing"):
        store_statement(copy)
    shutil.copy(tmp_path / "store" / "ledger.jsonl", copy)
    list(unheard.train(replace(own, corpus=copy), tmp_path / "second"))
    assert len(PopulationLedger.read(copy / "ledger.jsonl").runs) == 2


def test_a_ledger_that_was_cut_to_the_start_of_the_last_run_is_an_error(own, tmp_path):
    """The store records the ledger's position when a checkpoint is saved, not only when a run begins."""
    list(unheard.train(own, tmp_path / "first"))
    ledger = tmp_path / "store" / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    began = next(i for i, line in enumerate(lines) if b'"began"' in line)
    ledger.write_bytes(b"".join(lines[: began + 1]))
    with pytest.raises(LedgerError, match="shortened or replaced"):
        list(unheard.train(own, tmp_path / "second"))
    with pytest.raises(LedgerError, match="shortened or replaced"):
        find_population_ledger(ledger, True)


def test_a_store_never_remembers_an_earlier_position_again(own, tmp_path):
    list(unheard.train(own, tmp_path / "first"))
    store, ledger = tmp_path / "store", tmp_path / "store" / "ledger.jsonl"
    later = known_position(store, ledger)
    remember_position(store, ledger, {**later, "length": later["length"] - 1, "head": "earlier"})
    assert known_position(store, ledger) == later


@pytest.mark.parametrize(("before", "after"), [(b'"events"', b'"evenus"'), (b'"digests"', b'"digestr"')])
def test_a_damaged_record_of_the_corpus_is_an_error(own, tmp_path, before, after):
    """Without the events a private vocabulary would cost nothing; without the digests the store would not be checked."""
    path = tmp_path / "store" / "corpus.json"
    record = json.loads(path.read_bytes())
    record["vocabulary"]["events"] = []
    path.write_bytes(json.dumps(record).encode())
    write_digests(tmp_path / "store")
    TokenStore.open(tmp_path / "store")
    path.write_bytes(path.read_bytes().replace(before, after))
    with pytest.raises(UnheardError, match=r"corpus\.json"):
        TokenStore.open(tmp_path / "store")
    with pytest.raises(LedgerError, match=r"corpus\.json"):
        store_statement(tmp_path / "store")


def test_a_record_of_the_corpus_without_a_digest_is_an_error(own, tmp_path):
    store = tmp_path / "store"
    store_statement(store)
    content = json.loads((store / "digests.json").read_text())
    files = {name: entry for name, entry in content["files"].items() if name != "corpus.json"}
    (store / "digests.json").write_text(json.dumps({**content, "files": files}))
    with pytest.raises(LedgerError, match=r"corpus\.json"):
        store_statement(store)


def test_a_named_ledger_that_was_used_before_must_be_there_too(own, tmp_path):
    named = replace(own, ledger=tmp_path / "elsewhere" / "ledger.jsonl")
    list(unheard.train(named, tmp_path / "first"))
    (tmp_path / "elsewhere" / "ledger.jsonl").unlink()
    with pytest.raises(LedgerError, match="is missing"):
        list(unheard.train(named, tmp_path / "second"))


def test_a_budget_does_not_compose_runs_with_shared_cohorts(tmp_path):
    population = PopulationLedger.open(tmp_path / "ledger.jsonl", {"corpus": "c"})
    facts = {"randomness": {"mode": "reproducible", "cohorts": "shared"}}
    population.register("one", {"name": "one", **facts}, num_charged=0)
    population.set_budget(Budget(epsilon=8.0, delta=1e-6))
    population.charge("one", 0, ROUND, 0)
    population.register("two", {"name": "two", **facts}, num_charged=0)
    with pytest.raises(UnprovenCombination, match="one, two"):
        population.charge("two", 0, ROUND, 0)
    assert len(population.events) == 1
    with pytest.raises(UnprovenCombination, match="no budget can hold"):
        population.set_budget(Budget(epsilon=9.0, delta=1e-6))


def posts(tmp_path, name, users):
    rows = [{"user": f"user {i}", "text": "good morning to you all"} for i in users]
    return write_jsonl(tmp_path / f"{name}.jsonl", rows)


def ledger_of(store: TokenStore) -> PopulationLedger:
    return open_population_ledger(store.path, store.name, store.vocabulary_events)


def test_a_newer_store_continues_the_charges_and_the_budget(tmp_path):
    october = unheard.prepare(posts(tmp_path, "october", range(60)), tmp_path / "october", held_out=0.1)
    first = ledger_of(october)
    first.set_budget(Budget(epsilon=3.0, delta=1e-6, orders=FILTER_ORDERS))
    first.charge("a run in October", 0, ROUND, 0)
    november = unheard.prepare(
        posts(tmp_path, "november", range(20, 90)), tmp_path / "november", held_out=0.1, continues=tmp_path / "october"
    )
    second = PopulationLedger.read(november.path / "ledger.jsonl")
    assert second.path == november.path / "ledger.jsonl"
    assert second.events == [ROUND]
    assert second.budget == first.budget
    ledger_of(october).charge("another run on the store of October", 0, ROUND, 0)
    assert len(all_runs(PopulationLedger.read(second.path))["runs"]) == 2
    population = ledger_of(november)
    assert population.is_filter
    with pytest.raises(BudgetExceeded):
        population.charge("a run in November", 0, PoissonGaussian(sampling_prob=1.0, noise_multiplier=0.5), 0)
    shutil.rmtree(october.path)  # users may have asked for the deletion
    assert len(ledger_of(november).events) == 2


@pytest.mark.parametrize("how", ["continued", "same users"])
def test_a_ledger_that_is_put_back_to_before_it_was_joined_is_refused(tmp_path, how):
    october = unheard.prepare(posts(tmp_path, "october", range(60)), tmp_path / "october", held_out=0.1)
    first = ledger_of(october)
    first.charge("a run", 0, ROUND, 0)
    first.remember()
    before = first.path.read_bytes()
    earlier = october.path if how == "continued" else None
    november = unheard.prepare(
        posts(tmp_path, "november", range(20, 90)), tmp_path / "november", held_out=0.1, continues=earlier
    )
    second = ledger_of(november)
    if how == "same users":
        second.join(first)
    assert second.events == [ROUND]
    (october.path / "ledger.jsonl").write_bytes(before)
    for read in (
        lambda: ledger_of(october),
        lambda: read_population_ledger(october.path, october.path / "ledger.jsonl"),
    ):
        with pytest.raises(LedgerError, match="shortened or replaced"):
            read()


@pytest.fixture
def shortened(tmp_path):
    """Return a store whose ledger lost the last two of three charges after the store recorded it, and a second store."""
    first = unheard.prepare(posts(tmp_path, "october", range(60)), tmp_path / "october", held_out=0.1)
    population = ledger_of(first)
    for number in range(3):
        population.charge("a run", number, ROUND, number)
    population.remember()
    lines = population.path.read_bytes().splitlines(keepends=True)
    population.path.write_bytes(b"".join(lines[:-2]))
    second = unheard.prepare(posts(tmp_path, "november", range(20, 90)), tmp_path / "november", held_out=0.1)
    return first, second


def test_a_named_ledger_is_compared_with_the_store_that_it_lies_in(shortened):
    first, second = shortened
    ledger, record = first.path / "ledger.jsonl", (first.path / RECORD).read_bytes()
    for read in (
        lambda: open_population_ledger(second.path, second.name, [], ledger),
        lambda: read_population_ledger(second.path, ledger),
    ):
        with pytest.raises(LedgerError, match="shortened or replaced"):
            read()
    assert (first.path / RECORD).read_bytes() == record


def test_the_position_of_a_shortened_ledger_is_not_recorded_when_it_has_grown_again(shortened):
    first, _ = shortened
    record = (first.path / RECORD).read_bytes()
    population = PopulationLedger.open(first.path / "ledger.jsonl", {})
    population.remember()  # shorter than recorded: the record stays
    for number in range(1, 5):
        population.charge("a run", number, ROUND, number)
    with pytest.raises(LedgerError, match="shortened or replaced"):
        population.remember()
    assert (first.path / RECORD).read_bytes() == record


def test_both_stores_remember_the_position_of_a_ledger_that_lies_in_one_of_them(tmp_path):
    first, second = (
        unheard.prepare(posts(tmp_path, name, range(30)), tmp_path / name, held_out=0.1) for name in ("first", "second")
    )
    ledger_of(first)
    ledger = first.path / "ledger.jsonl"
    population = open_population_ledger(second.path, second.name, [], ledger)
    for number in range(3):
        population.charge("a run", number, ROUND, number)
    population.remember()
    for store in (first.path, second.path):
        assert known_position(store, ledger) == population.position_at(ledger)


def test_a_shortened_ledger_is_not_taken_over(shortened):
    first, second = shortened
    continue_ledger(second.path, first.path / "ledger.jsonl")
    with pytest.raises(LedgerError, match="shortened or replaced"):
        ledger_of(second)


def test_a_ledger_that_took_over_charges_and_was_lost_is_not_begun_anew(tmp_path):
    october = unheard.prepare(posts(tmp_path, "october", range(60)), tmp_path / "october", held_out=0.1)
    ledger_of(october).charge("a run", 0, ROUND, 0)
    november = unheard.prepare(
        posts(tmp_path, "november", range(20, 90)), tmp_path / "november", held_out=0.1, continues=october.path
    )
    (november.path / "ledger.jsonl").unlink()
    continues = {"ledger": str(october.path / "ledger.jsonl"), "joined": False}
    (november.path / RECORD).write_text(json.dumps({"known": {}, "continues": continues}))
    with pytest.raises(LedgerError, match="not copied yet"):
        store_statement(november.path)
    for _ in range(2):
        with pytest.raises(LedgerError, match="is not there"):
            ledger_of(november)
    assert not (november.path / "ledger.jsonl").exists()
    PopulationLedger.open(november.path / "ledger.jsonl", {})  # as earlier versions began it anew
    for _ in range(2):
        with pytest.raises(LedgerError, match="lost the charges"):
            ledger_of(november)


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_store_that_lacks_the_charges_of_an_earlier_one_has_no_statement(tmp_path, is_begun):
    """Also if its own ledger was begun already, by an earlier version or before a crash."""
    october = unheard.prepare(posts(tmp_path, "october", range(60)), tmp_path / "october", held_out=0.1)
    ledger_of(october).charge("a run", 0, ROUND, 0)
    november = unheard.prepare(posts(tmp_path, "november", range(60)), tmp_path / "november", held_out=0.1)
    continue_ledger(november.path, tmp_path / "moved" / "ledger.jsonl")
    ledger = november.path / "ledger.jsonl"
    if is_begun:
        PopulationLedger.open(ledger, {})
    for _ in range(2):
        with pytest.raises(LedgerError, match="is missing"):
            ledger_of(november)
        assert ledger.exists() == is_begun
    reads = [lambda: find_population_ledger(ledger, False), lambda: read_population_ledger(november.path, ledger)]
    for read in reads if is_begun else [lambda: store_statement(november.path)]:
        with pytest.raises(LedgerError, match="not copied yet"):
            read()
    continue_ledger(november.path, october.path / "ledger.jsonl")
    assert ledger_of(november).events == [ROUND]
    assert all_runs(find_population_ledger(ledger, False), delta=1e-3)["charges"] == 1


def test_charges_in_another_ledger_are_neither_denied_nor_left_out_of_a_total_in_silence(tmp_path):
    store = unheard.prepare(posts(tmp_path, "posts", range(60)), tmp_path / "store", held_out=0.1)
    other, own = tmp_path / "shared" / "ledger.jsonl", store.path / "ledger.jsonl"
    population = open_population_ledger(store.path, store.name, [], other)
    population.charge("a run", 0, ROUND, 0)
    population.remember()
    with pytest.raises(LedgerError, match=re.escape(f"unheard statement {other}")):
        store_statement(store.path)
    assert all_runs(find_population_ledger(other, False), delta=1e-3)["warnings"] == []
    assert all_runs(population, delta=1e-3)["warnings"] == []
    for derive in (
        lambda: unheard.prepare(posts(tmp_path, "n", range(60)), tmp_path / "n", held_out=0.1, continues=store.path),
        lambda: shrink_vocabulary(store, tmp_path / "n", vocabulary_size=9),
    ):
        with pytest.raises(LedgerError, match=re.escape(f"were charged in {other}")):
            derive()
        assert not own.exists()
        assert not (tmp_path / "n").exists()
    ledger_of(store)  # without charges
    assert all_runs(population, delta=1e-3)["charges"] == 1
    ledger_of(store).charge("another run", 0, ROUND, 0)
    for total, left_out in ((population, own), (ledger_of(store), other)):
        (warning,) = all_runs(total, delta=1e-3)["warnings"]  # on pages and cards
        assert warning.startswith("NOT COUNTED HERE")
        assert str(tmp_path) not in warning
        with pytest.raises(LedgerError, match="in one ledger: unheard budget") as raised:
            check_one_ledger(store.path, total.path, total)
        assert f"were charged in {left_out}, and" in str(raised.value)
    for asked in (["statement", str(store.path)], ["budget", str(store.path), "--delta", "1e-3"]):
        assert "were charged in" in str(CliRunner().invoke(app, asked).exception)
    hidden = other.rename(tmp_path / "hidden")
    with pytest.raises(LedgerError, match="is missing"):
        find_population_ledger(own, False)
    hidden.rename(other)
    elsewhere = unheard.prepare(posts(tmp_path, "m", range(60)), tmp_path / "m", held_out=0.1)
    joined = CliRunner().invoke(
        app, ["budget", str(elsewhere.path), "--same-users", str(store.path), "--delta", "1e-3"]
    )
    assert "in one ledger" in str(joined.exception)
    advice = str(raised.value).partition("ledger: unheard ")[2].removesuffix(".").split()
    assert CliRunner().invoke(app, [*advice, "--delta", "1e-3"]).exit_code == 0
    for path in (own, other):
        content = all_runs(find_population_ledger(path, False), delta=1e-3)
        assert (content["charges"], content["warnings"]) == (2, [])


def test_a_store_that_was_stopped_before_the_ledgers_were_joined_joins_them_when_it_is_opened(tmp_path, monkeypatch):
    october = unheard.prepare(posts(tmp_path, "october", range(60)), tmp_path / "october", held_out=0.1)
    ledger_of(october).charge("a run", 0, ROUND, 0)
    opened = pipeline._ledger_of

    def stopped(store):
        if store.path.name == "november":
            raise KeyboardInterrupt
        return opened(store)

    monkeypatch.setattr(pipeline, "_ledger_of", stopped)
    source = posts(tmp_path, "november", range(60))
    with pytest.raises(KeyboardInterrupt):
        unheard.prepare(source, tmp_path / "november", held_out=0.1, continues=tmp_path / "october")
    november = TokenStore.open(tmp_path / "november")
    assert ledger_of(november).events == [ROUND]
    assert ledger_of(november).events == [ROUND]  # once
    assert json.loads((november.path / RECORD).read_text())["continues"]["joined"]


def test_a_store_whose_earlier_ledger_is_gone_is_not_charged(tmp_path):
    october = unheard.prepare(posts(tmp_path, "october", range(60)), tmp_path / "october", held_out=0.1)
    ledger_of(october).charge("a run", 0, ROUND, 0)
    (october.path / "ledger.jsonl").unlink()
    with pytest.raises(LedgerError, match="is missing"):
        unheard.prepare(posts(tmp_path, "n", range(60)), tmp_path / "november", held_out=0.1, continues=october.path)
    assert not (tmp_path / "november").exists()


def test_a_population_below_the_number_of_users_is_warned_of_without_the_number(own, tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="unheard")
    list(unheard.train(own, tmp_path / "fits"))
    assert caplog.messages == []
    sampling = unheard.PoissonSampling(users_per_round=3)
    list(unheard.train(replace(own, plan=replace(own.plan, population=17, sampling=sampling)), tmp_path / "below"))
    (message,) = caplog.messages
    assert "privacy.population = 17) is smaller" in message
    assert "60" not in message.replace(str(tmp_path), "")


def test_an_earlier_ledger_stays_to_be_joined_until_its_charges_are_copied(tmp_path, monkeypatch):
    earlier, store = tmp_path / "earlier.jsonl", tmp_path / "store"
    store.mkdir()
    PopulationLedger.open(earlier, {}).charge("a run", 0, ROUND, 0)
    continue_ledger(store, earlier)

    def fails(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(PopulationLedger, "take_over", fails)
        with pytest.raises(KeyboardInterrupt):
            open_population_ledger(store, "c", [])
    assert open_population_ledger(store, "c", []).events == [ROUND]


def test_a_store_remembers_where_its_ledger_stood_when_it_was_last_opened(tmp_path):
    """Also after the store was moved, and after any number of earlier openings."""
    store = tmp_path / "store"
    store.mkdir()
    lengths = []
    for position in range(3):
        open_population_ledger(store, "c", []).charge("r", position, ROUND, position)
        lengths.append(len((store / "ledger.jsonl").read_bytes()))
    open_population_ledger(store, "c", [])
    whole = (store / "ledger.jsonl").read_bytes()
    moved = store.rename(tmp_path / "moved")
    for length in lengths[:-1]:
        (moved / "ledger.jsonl").write_bytes(whole[:length])
        with pytest.raises(LedgerError, match="shortened or replaced"):
            open_population_ledger(moved, "c", [])
    (moved / "ledger.jsonl").unlink()
    with pytest.raises(LedgerError, match="is missing"):
        open_population_ledger(moved, "c", [])


@pytest.mark.parametrize(
    ("number", "is_inside", "passes"),
    [
        (errno.EROFS, False, True),
        (errno.EACCES, False, True),
        (errno.EPERM, False, True),
        (errno.EROFS, True, False),
        (errno.EACCES, True, False),
        (errno.ENOSPC, False, False),
        (errno.EIO, False, False),
    ],
)
def test_a_position_that_cannot_be_remembered_is_an_error_unless_the_ledger_is_elsewhere(
    own, tmp_path, monkeypatch, number, is_inside, passes
):
    """A read-only store has its ledger elsewhere. In all other cases a record that cannot be updated is an error."""
    ledger = tmp_path / "store" / "ledger.jsonl" if is_inside else tmp_path / "people.jsonl"

    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(population_ledger, "_change_record", fail)
    with contextlib.nullcontext() if passes else pytest.raises(OSError, match=os.strerror(number)):
        remember_position(tmp_path / "store", ledger, {"ledger": "x", "length": 1, "head": "h"})


def test_a_population_whose_runs_declare_no_delta_has_no_statement_without_one(tmp_path):
    ledger = PopulationLedger.open(tmp_path / "ledger.jsonl", {"corpus": "c"})
    with pytest.raises(InvalidValue, match="give one with --delta"):
        all_runs(ledger)
    all_runs(ledger, delta=1e-6)


@pytest.mark.parametrize(("ledger", "length", "is_kept"), [("x", 4, True), ("x", 6, False), ("y", 4, False)])
def test_a_store_remembers_the_later_position_of_a_ledger_and_every_position_of_another(
    own, tmp_path, ledger, length, is_kept
):
    store, path = tmp_path / "store", tmp_path / "people.jsonl"
    first, second = {"ledger": "x", "length": 5, "head": "h"}, {"ledger": ledger, "length": length, "head": "i"}
    remember_position(store, path, first)
    remember_position(store, path, second)
    assert known_position(store, path) == (first if is_kept else second)
