"""The ledger only grows: charges are on disk, and every later change of the file is detected."""

import json
import os
import stat

import pytest

from unheard.errors import LedgerError
from unheard.privacy import ledger as chain
from unheard.privacy.events import Gaussian, NonPrivate, PoissonGaussian, to_record
from unheard.privacy.ledger import Ledger, corpus_name, new_run_id

ROUND = PoissonGaussian(sampling_prob=0.01, noise_multiplier=1.0)


@pytest.fixture
def path(tmp_path):
    """Write a ledger of five rounds, each with another z."""
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.create(path, {"population": 1000, "delta": 1e-4})
    for number in range(5):
        ledger.charge(PoissonGaussian(sampling_prob=0.01, noise_multiplier=1.0 + number), number)
    return path


def lines_of(path):
    return path.read_bytes().splitlines(keepends=True)


def test_a_charge_is_read_back(path):
    ledger = Ledger.open(path)
    assert len(ledger) == 5
    assert ledger.facts == {"population": 1000, "delta": 1e-4}
    assert [entry.round for entry in ledger.entries] == [0, 1, 2, 3, 4]
    assert [event.noise_multiplier for event in ledger.events] == [1, 2, 3, 4, 5]
    assert ledger.repaired is None


def test_many_charged_at_once_are_what_they_are_one_by_one_with_one_sync(path, tmp_path, monkeypatch):
    events, at_once = Ledger.read(path).events, Ledger.create(tmp_path / "other.jsonl", {"population": 1000})
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    at_once.charge_all(events, 0)
    at_once.charge(ROUND, 1)
    assert len(synced) == 2
    kept = Ledger.open(at_once.path)
    assert kept.events == [*events, ROUND]
    assert [entry.round for entry in kept.entries] == [0] * 5 + [1]


def test_a_round_done_again_is_charged_again(path):
    ledger = Ledger.open(path)
    ledger.charge(ROUND, 4)
    assert [entry.round for entry in Ledger.open(path).entries] == [0, 1, 2, 3, 4, 4]


def test_a_charge_is_synced_to_disk_before_it_returns(path, monkeypatch):
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (fsync(fd), synced.append(os.fstat(fd).st_size)))
    ledger = Ledger.open(path)
    ledger.charge(ROUND, 5)
    assert synced == [path.stat().st_size]
    assert len(Ledger.read(path)) == 6


def test_creating_syncs_the_file_and_its_folder(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(stat.S_ISDIR(os.fstat(fd).st_mode)))
    Ledger.create(tmp_path / "ledger.jsonl", {})
    assert synced == [False, True]


def test_only_the_owner_may_read_it(path):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_existing_ledger_is_never_written_over(path):
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="never overwritten"):
        Ledger.create(path, {})
    assert path.read_bytes() == before


def test_the_same_charges_give_the_same_bytes(path, tmp_path):
    again = Ledger.create(tmp_path / "again.jsonl", {"population": 1000, "delta": 1e-4})
    for number in range(5):
        again.charge(PoissonGaussian(sampling_prob=0.01, noise_multiplier=1.0 + number), number)
    assert again.path.read_bytes() == path.read_bytes()


def test_every_cut_in_the_last_line_loses_that_line_and_no_other(path):
    whole = path.read_bytes()
    start = whole[:-1].rindex(b"\n") + 1
    for cut in range(start + 1, len(whole) - 1):
        path.write_bytes(whole[:cut])
        ledger = Ledger.open(path)
        assert len(ledger) == 4
        assert "torn" in ledger.repaired
        assert path.read_bytes() == whole[:start]


def test_a_last_line_that_lacks_only_its_newline_is_kept(path):
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert len(Ledger.open(path)) == 5
    assert path.read_bytes() == whole


@pytest.mark.parametrize("tail", [b"\0" * 100, b"\0" * 100 + b"\n", b'{"round":5,"ev\n', b"\xff\xfe"])
def test_the_rest_of_a_power_loss_is_cut_off(path, tail):
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    ledger = Ledger.open(path)
    assert len(ledger) == 5
    assert ledger.repaired is not None
    assert path.read_bytes() == whole


def test_charging_continues_after_a_repair(path):
    path.write_bytes(path.read_bytes()[:-10])
    ledger = Ledger.open(path)
    ledger.charge(ROUND, 4)
    again = Ledger.open(path)
    assert [entry.round for entry in again.entries] == [0, 1, 2, 3, 4]
    assert again.head == ledger.head
    assert again.repaired is None


def test_reading_does_not_touch_a_torn_file(path):
    path.write_bytes(path.read_bytes()[:-10])
    before = path.read_bytes()
    assert len(Ledger.read(path)) == 4
    assert path.read_bytes() == before


def test_a_ledger_that_was_only_read_cannot_be_charged(path):
    with pytest.raises(LedgerError, match=r"Ledger\.open"):
        Ledger.read(path).charge(ROUND, 5)


def edited(lines):
    lines[3] = lines[3].replace(b'"noise_multiplier":3.0', b'"noise_multiplier":9.0')


def last_edited(lines):
    lines[-1] = lines[-1].replace(b'"noise_multiplier":5.0', b'"noise_multiplier":9.0')


def swapped(lines):
    lines[2], lines[3] = lines[3], lines[2]


def removed(lines):
    del lines[3]


def duplicated(lines):
    lines.insert(3, lines[3])


def spaced(lines):
    lines[3] = lines[3].replace(b'{"round"', b'{ "round"')


def blank(lines):
    lines.insert(3, b"\n")


@pytest.mark.parametrize("change", [edited, swapped, removed, duplicated, spaced, blank])
def test_a_changed_line_is_seen_and_named(path, change):
    lines = lines_of(path)
    change(lines)
    path.write_bytes(b"".join(lines))
    with pytest.raises(LedgerError, match=r"line [345]:.*untouched copy"):
        Ledger.open(path)
    assert path.read_bytes() == b"".join(lines)  # reading does not change the file


@pytest.mark.parametrize("bit", range(8))
def test_a_changed_bit_of_the_last_line_never_cuts_it_off(path, bit):
    """The line was written completely, so the charge was made. If it is not valid JSON it must not be taken for a torn line."""
    Ledger.open(path).charge(ROUND, round=7)
    whole = bytearray(path.read_bytes())
    for at in range(1, len(whole.splitlines(keepends=True)[-1]) + 1):
        damaged = bytearray(whole)
        damaged[-at] ^= 1 << bit
        path.write_bytes(damaged)
        with pytest.raises(LedgerError):
            Ledger.open(path)
        assert path.read_bytes() == bytes(damaged)


def test_an_edited_last_line_is_not_taken_for_a_torn_one(path):
    lines = lines_of(path)
    last_edited(lines)
    path.write_bytes(b"".join(lines))
    with pytest.raises(LedgerError, match="line 6"):
        Ledger.open(path)


def test_an_edited_header_is_seen(path):
    path.write_bytes(path.read_bytes().replace(b'"population":1000', b'"population":9000'))
    with pytest.raises(LedgerError, match="line 1"):
        Ledger.open(path)


def resealed(path, record, line=3):
    """Return the content with one line changed and all hashes recomputed, as an attacker could do."""
    head, written = "", []
    for number, one in enumerate(lines_of(path), start=1):
        body, _ = {**json.loads(one)}, None
        body.pop("hash")
        sealed, head = chain.seal(record if number == line else body, head)
        written.append(sealed)
    path.write_bytes(b"".join(written))


@pytest.mark.parametrize(
    "record",
    [
        {"round": 1, "event": to_record(ROUND), "discount": 0.5},
        {"round": 1},
        {"round": -1, "event": to_record(ROUND)},
        {"round": True, "event": to_record(ROUND)},
        {"round": 1, "event": {**to_record(ROUND), "discount": 0.5}},
        {"round": 1, "event": {"kind": "free"}},
    ],
)
def test_a_well_sealed_line_that_is_no_entry_is_refused(path, record):
    resealed(path, record)
    with pytest.raises(LedgerError, match="line 3"):
        Ledger.open(path)


def test_another_format_is_refused(path):
    own = {"ledger": "unheard-ledger-1", "facts": {}}
    others = ({"ledger": "unheard-ledger-2"}, {"ledger": None}, {"facts": []}, {"facts": "x"}, {"budget": 1.0})
    for record in ({"facts": {}}, {"ledger": own["ledger"]}, *({**own, **other} for other in others)):
        resealed(path, record, line=1)
        with pytest.raises(LedgerError, match=r"line 1.*version"):
            Ledger.open(path)


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"no ledger\n", b'{"a": 1}\n', b'{"ledger":"unheard-ledger-1","facts":{}}\n', b"{"]
)
def test_a_file_that_is_no_ledger_is_refused(tmp_path, content):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(content)
    with pytest.raises(LedgerError):
        Ledger.open(path)
    assert path.read_bytes() == content


def test_a_missing_ledger_is_refused(tmp_path):
    with pytest.raises(LedgerError, match="No ledger"):
        Ledger.open(tmp_path / "ledger.jsonl")


def test_a_shortened_ledger_does_not_contain_what_a_checkpoint_remembers(path):
    ledger = Ledger.open(path)
    length, head = len(ledger), ledger.head
    ledger.charge(ROUND, 5)
    assert ledger.contains(length, head)
    assert Ledger.open(path).contains(length, head)
    path.write_bytes(b"".join(lines_of(path)[:-2]))  # cut at the end of a line: a valid chain that is too short
    shortened = Ledger.open(path)
    assert len(shortened) == 4
    assert not shortened.contains(length, head)


def test_a_ledger_of_the_same_length_but_another_history_is_not_contained(path, tmp_path):
    other = Ledger.create(tmp_path / "other.jsonl", {"population": 1000, "delta": 1e-4})
    for number in range(5):
        other.charge(ROUND, number)
    ledger = Ledger.open(path)
    assert not ledger.contains(len(other), other.head)
    assert not ledger.contains(-1, ledger.head)
    assert not ledger.contains(6, ledger.head)
    assert Ledger.create(tmp_path / "new.jsonl", {}).contains(0, Ledger.read(tmp_path / "new.jsonl").head)


def test_a_full_disk_refuses_the_round_and_leaves_a_whole_ledger(path, monkeypatch):
    ledger = Ledger.open(path)
    before = path.read_bytes()
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:20]))
    with pytest.raises(LedgerError, match=r"round 5.*Nothing of this round may be released"):
        ledger.charge(ROUND, 5)
    monkeypatch.undo()
    with pytest.raises(LedgerError, match="not open for charging"):
        ledger.charge(ROUND, 5)
    assert path.read_bytes() == before
    assert len(Ledger.open(path)) == 5


def test_a_failed_sync_refuses_the_round(path, monkeypatch):
    def broken(fd):
        raise OSError(5, "Input/output error")

    ledger = Ledger.open(path)
    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(LedgerError, match="Input/output error"):
        ledger.charge(ROUND, 5)


def test_a_second_writer_is_refused(path):
    first, second = Ledger.open(path), Ledger.open(path)
    first.charge(ROUND, 5)
    with pytest.raises(LedgerError, match="another process"):
        second.charge(ROUND, 5)
    assert len(Ledger.open(path)) == 6


def test_the_ledger_stays_where_it_was_opened(path, monkeypatch, tmp_path):
    monkeypatch.chdir(path.parent)
    ledger = Ledger.open("ledger.jsonl")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    ledger.charge(ROUND, 5)
    assert len(Ledger.open(path)) == 6


@pytest.mark.parametrize("number", [-1, 1.5, True, "1", None])
def test_a_round_that_is_no_whole_number_is_refused(path, number):
    with pytest.raises(LedgerError, match="whole number"):
        Ledger.open(path).charge(ROUND, number)


def test_facts_that_are_not_plain_json_are_refused_before_a_file_exists(tmp_path):
    for facts in ({"x": object()}, {"x": float("nan")}):
        with pytest.raises(LedgerError, match="JSON"):
            Ledger.create(tmp_path / "ledger.jsonl", facts)
    assert not (tmp_path / "ledger.jsonl").exists()


def test_the_facts_cannot_be_changed_from_outside(path):
    ledger = Ledger.open(path)
    ledger.facts["population"] = 1
    ledger.entries.clear()
    assert ledger.facts["population"] == 1000
    assert len(ledger) == 5


def test_every_kind_of_event_can_be_charged(path):
    ledger = Ledger.open(path)
    ledger.charge(Gaussian(noise_multiplier=3), 0)
    ledger.charge(NonPrivate(reason='a "quoted" reason\nof two lines, in Zürich'), 5)
    assert Ledger.open(path).events[-2:] == [
        Gaussian(noise_multiplier=3),
        NonPrivate(reason='a "quoted" reason\nof two lines, in Zürich'),
    ]


TABLES = ("sampling", "weights", "estimator", "update", "vocabulary", "start", "randomness", "software")
TABLES += ("selection", "declared", "correlated_noise", "federated")
FACTS = {
    **dict.fromkeys(TABLES, (True, "x", 7, 0.5, [1])),
    **dict.fromkeys(("run_id", "run_hash", "corpus"), (True, 7, 0.5, [1], {"a": 1})),
    **dict.fromkeys(("population", "parameters"), (True, "x", 0.5, [1], {"a": 1})),
    "delta": (True, "x", [1], {"a": 1}),
}
"""The facts on which later code relies, and values of other types than they have."""


@pytest.mark.parametrize("name", FACTS)
def test_a_fact_of_another_type_in_a_header_that_was_sealed_anew_is_refused(tmp_path, name):
    for i, wrong in enumerate(FACTS[name]):
        ledger = Ledger.create(tmp_path / f"{i}.jsonl", {name: wrong})
        with pytest.raises(LedgerError, match=rf"'{name}' is .* which no run declares"):
            Ledger.read(ledger.path)


@pytest.mark.parametrize("content", ["", "[", "[]", "7", "null", "[" * 100_000])
def test_damaged_facts_about_nodes_are_an_error(tmp_path, content):
    ledger = Ledger.create(tmp_path / "ledger.jsonl", {"population": 10})
    (tmp_path / "federated.json").write_text(content)
    with pytest.raises(LedgerError, match=r"federated\.json is damaged"):
        _ = ledger.facts


def test_the_file_beside_a_ledger_adds_what_the_server_sees_and_replaces_nothing(tmp_path):
    (tmp_path / "federated.json").write_text(json.dumps({"secure_aggregation": True}))
    for stated in ({}, {"federated": {"secure_aggregation": False}}):
        path = tmp_path / f"{len(stated)}.jsonl"
        facts = Ledger.create(path, {"delta": 1e-4, **stated}).facts
        assert facts == Ledger.read(path).facts == {"delta": 1e-4, "federated": {"secure_aggregation": not stated}}


def test_seeded_runs_of_two_configurations_have_two_ids():
    """In the population's ledger all charges with one id count as those of one run."""
    for place in range(16):
        own, other = ("".join("b" if i == changed else "a" for i in range(64)) for changed in (None, place))
        assert new_run_id(own) == new_run_id(own) != new_run_id(other)
    assert len({new_run_id() for _ in range(1000)}) == 1000


def test_any_change_of_the_record_of_a_corpus_gives_it_another_name():
    record = {"vocabulary": {"kind": "private", "events": [{"delta": 1e-6}]}, "splits": [0.1, 0.2], "salt": "a"}
    changed = [
        {**record, "salt": "b"},
        {**record, "splits": [0.1]},
        {**record, "vocabulary": {**record["vocabulary"], "events": []}},
        {key: value for key, value in record.items() if key != "salt"},
    ]
    assert len({corpus_name(one) for one in [record, *changed]}) == 5
    assert corpus_name(dict(reversed(record.items()))) == corpus_name(record)
