"""All posts of a user are grouped in order, and the split of a user depends only on salt and id."""

import hashlib
from dataclasses import replace
from types import SimpleNamespace

import duckdb
import pytest

from tests.corpus.inputs import FIELDS, prepared, words_of, write_csv, write_jsonl
from unheard.corpus import grouping as grouping_module
from unheard.corpus.grouping import DuckDBBackend, Grouping, SplitRule, sorted_rows, unit_hash
from unheard.corpus.sources import find_sources, make_batches
from unheard.errors import CorpusError, InvalidValue


def test_a_user_is_in_the_same_split_every_time_and_the_salt_changes_it():
    rule, other = SplitRule(held_out=0.5), SplitRule(held_out=0.5, salt="other")
    names = [f"user {i}" for i in range(200)]
    assert [rule.split_of(n) for n in names] == [rule.split_of(n) for n in names]
    assert 50 < sum(rule.split_of(n) != other.split_of(n) for n in names) < 150


def test_the_hash_is_the_same_on_every_machine():
    # by hand: each label after its length in eight bytes, SHA-256, the first six bytes as a fraction
    message = b"\7" + bytes(7) + b"unheard" + b"\5" + bytes(7) + b"split" + b"\3" + bytes(7) + b"ann"
    assert (
        unit_hash("unheard", "split", "ann") == int.from_bytes(hashlib.sha256(message).digest()[:6], "little") / 2**48
    )
    assert unit_hash("unheard", "split", "ann") == 0.21935344510945498  # the result must never change
    assert unit_hash("ab", "c") != unit_hash("a", "bc")


def test_fractions_come_out_as_asked():
    rule = SplitRule(held_out=0.2, public=0.1)
    found = [rule.split_of(str(i)) for i in range(20_000)]
    # 4 standard deviations of a binomial: 4 * sqrt(20000 * 0.2 * 0.8) = 226
    assert abs(found.count("held_out") - 4_000) < 226
    assert abs(found.count("public") - 2_000) < 170
    assert SplitRule(held_out=0).split_of("x") == "train"


@pytest.mark.parametrize("values", [{"held_out": 1.0}, {"held_out": -0.1}, {"held_out": 0.6, "public": 0.5}])
def test_fractions_that_leave_nobody_are_refused(values):
    with pytest.raises(InvalidValue):
        SplitRule(**values)


def test_without_a_time_the_order_of_the_input_stands(tmp_path):
    rows = [{"who": "ann", "what": w} for w in "cabcab"]
    done = prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", rows), fields=replace(FIELDS, time=None))
    assert words_of(done.store)[0].split()[1::3] == list("cabcab")


def test_ties_of_time_stand_in_the_order_of_the_input_across_files(tmp_path):
    for i, letters in enumerate(["ab", "ca", "bc"]):
        write_jsonl(tmp_path / f"{i}.jsonl", [{"who": "ann", "what": w, "when": "2002-11-18"} for w in letters])
    done = prepared(tmp_path, str(tmp_path / "*.jsonl"))
    assert words_of(done.store)[0].split()[1::3] == list("abcabc")


def test_users_are_split_by_their_ids_alone(tmp_path):
    rule = SplitRule(held_out=0.3, public=0.2)
    rows = [{"who": f"u{i}", "what": "a", "when": 0} for i in range(60)]
    done = prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", rows), splits=rule, shards=2)
    wanted = [rule.split_of(r["who"]) for r in rows]
    assert done.store.train.num_users == wanted.count("train")
    assert done.store.held_out.num_users == wanted.count("held_out")
    assert done.store.public.num_users == wanted.count("public")


def test_posts_under_several_users_are_counted_and_dropped_on_request(tmp_path):
    rows = [
        {"who": "ann", "what": "a b a b", "when": 0},
        {"who": "bob", "what": "a b a b", "when": 0},
        {"who": "bob", "what": "c c c c", "when": 1},
    ]
    rows += [{"who": "ann", "what": "c", "when": 2}, {"who": "bob", "what": "c", "when": 2}, rows[2]]
    file = write_jsonl(tmp_path / "x.jsonl", rows)
    kept = prepared(tmp_path, file, duplicate_chars=5)
    assert kept.counts["duplicate_posts"] == 2
    assert "a b a b" in words_of(kept.store)[0]
    dropped = prepared(tmp_path, file, out="dropped", duplicate_chars=5, drop_duplicates=True)
    # Posts that a user repeats are kept, and so are posts that are too short to count as copies.
    assert words_of(dropped.store) == ["<BOS> c <EOS>", "<BOS> c c c c <EOS> <BOS> c c c c <EOS> <BOS> c <EOS>"]
    assert dropped.store.info["drop_duplicates"] is True


def test_any_number_of_shards_and_workers_gives_the_same_users(tmp_path):
    """Two processes read the files and the shards. Excluded users and copied posts are removed in both cases."""
    rows = [{"who": f"u{i % 50}", "what": "a " * (i % 7 + 1), "when": i} for i in range(400)]
    files = [write_jsonl(tmp_path / "x.jsonl", rows[::2]), write_csv(tmp_path / "y.csv", rows[1::2])]
    choices = {"excluded": ("u4", "u7", "u11"), "duplicate_chars": 9, "drop_duplicates": True}
    one = prepared(tmp_path, files, out="one", shards=1, **choices)
    twelve = prepared(tmp_path, files, out="twelve", shards=12, backend=DuckDBBackend(workers=2), **choices)
    assert sorted(words_of(one.store)) == sorted(words_of(twelve.store))
    assert one.counts == twelve.counts
    assert one.counts["users"]["users_seen"] == 47
    assert one.counts["rows"]["excluded"] == 3 * 8
    assert one.counts["duplicate_posts"] > 0


def test_one_user_with_half_the_data_is_one_user(tmp_path, monkeypatch):
    monkeypatch.setattr("unheard.corpus.encode.BATCH_CHARS", 40)  # so that the user arrives in many pieces
    rows = [{"who": "giant", "what": "a b c", "when": i} for i in range(300)] + [
        {"who": f"u{i}", "what": "a", "when": 0} for i in range(20)
    ]
    done = prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", rows), shards=2)
    longest = max(words_of(done.store), key=len)
    assert longest == " ".join(["<BOS> a b c <EOS>"] * 300)
    assert done.store.train.num_users == 21


def test_thousands_of_users_with_one_word_each_are_all_kept(tmp_path):
    rows = [{"who": f"u{i}", "what": "a", "when": 0} for i in range(20_000)]
    done = prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", rows), shards=4)
    assert done.store.train.num_users == 20_000
    assert done.store.train.num_tokens == 60_000


@pytest.mark.parametrize("version", ["2.0.0", "2.0.1", "2.1.0", "3.0.0", "2.0.0.dev1"])
def test_workers_with_any_other_version_of_duckdb_are_refused(tmp_path, monkeypatch, version):
    """Another version could hash the id of a user differently, and put one user into two shards."""
    monkeypatch.setattr("duckdb.__version__", "2.0.0")
    grouping = Grouping(work=tmp_path, fields=FIELDS, shards=1, duckdb_version=version)
    if version == "2.0.0":
        grouping.check_version()
    else:
        with pytest.raises(CorpusError, match=f"DuckDB 2.0.0, the others {version}"):
            grouping.check_version()


def test_a_shard_that_cannot_be_sorted_to_its_end_is_an_error(tmp_path, monkeypatch):
    """Its rows are read in parts; if a later part fails, the store would lack the rest of the users."""

    class Failing:
        def execute(self, query):
            rows = iter([[("ann", "a")]])
            return SimpleNamespace(fetchmany=lambda number: next(rows, None) or self.fail())

        def fail(self):
            raise duckdb.Error("Out of Memory")

        def close(self):
            pass

    monkeypatch.setattr(grouping_module, "open_database", lambda *_: Failing())
    monkeypatch.setattr(Grouping, "shard_files", lambda *_: ["part"])
    rows = sorted_rows(Grouping(work=tmp_path, fields=FIELDS, shards=1), 0, 1)
    assert next(rows) == (("ann",), ("a",))
    with pytest.raises(CorpusError, match="Sorting a part of the corpus failed: Out of Memory"):
        next(rows)


def test_a_process_of_a_pool_opens_one_database_for_all_its_shards_and_none_after_a_broken_one(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "a.jsonl", [{"who": f"u{k}", "what": f"word{k}", "when": k} for k in range(40)])
    grouping = Grouping(work=tmp_path / "work", fields=FIELDS, shards=3, memory_bytes=1 << 28)
    DuckDBBackend(workers=1).scan(grouping, make_batches(find_sources([str(tmp_path / "a.jsonl")])), lambda *_: None)
    alone = [list(sorted_rows(grouping, shard, 1)) for shard in range(3)]
    assert all(alone)
    opened = []
    open_database = grouping_module.open_database
    monkeypatch.setattr(grouping_module, "open_database", lambda *a: opened.append(open_database(*a)) or opened[-1])
    monkeypatch.setattr(grouping_module, "_keeps_databases", True)
    monkeypatch.setattr(grouping_module, "_KEPT_DATABASES", {})
    assert [list(sorted_rows(grouping, shard, 1)) for shard in range(3)] == alone
    assert len(opened) == 1
    left = sorted_rows(grouping, 0, 1)
    next(left)
    left.close()  # a shard that is not complete
    assert grouping_module._KEPT_DATABASES == {}
    assert [list(sorted_rows(grouping, shard, 1)) for shard in range(3)] == alone
    assert len(opened) == 2
