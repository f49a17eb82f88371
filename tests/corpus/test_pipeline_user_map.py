"""The map of user ids: written on request, outside the store, in the format of its file ending."""

import json
import os
import stat

import duckdb
import pytest

from tests.corpus.inputs import prepared, write_jsonl
from unheard.corpus.grouping import SplitRule
from unheard.corpus.pipeline import check_user_map
from unheard.errors import InputError, PrivacyError


def test_neither_ids_nor_text_are_in_the_store_and_the_map_is_apart_on_request(tmp_path):
    rows = [{"who": f"secret-id-{i}", "what": "unspeakable a", "when": 0} for i in range(40)]
    done = prepared(
        tmp_path,
        write_jsonl(tmp_path / "x.jsonl", rows),
        shards=3,
        splits=SplitRule(held_out=0.3),
        user_map=tmp_path / "map.json",
    )
    for file in done.store.path.rglob("*"):
        if file.is_file():
            assert b"secret-id" not in file.read_bytes()
            assert b"unspeakable" not in file.read_bytes()
    entries = json.loads((tmp_path / "map.json").read_text())
    assert stat.S_IMODE(os.stat(tmp_path / "map.json").st_mode) == 0o600
    assert sorted(e["user"] for e in entries) == sorted(r["who"] for r in rows)
    for split in ("train", "held_out"):
        assert [e["number"] for e in entries if e["split"] == split] == list(
            range(getattr(done.store, split).num_users)
        )


def test_the_map_names_the_user_that_has_the_tokens(tmp_path):
    rows = [{"who": f"u{i}", "what": "a " * (i + 1), "when": 0} for i in range(20)]
    done = prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", rows), shards=4, user_map=tmp_path / "map.json")
    for entry in json.loads((tmp_path / "map.json").read_text()):
        words = done.store.train.tokens(entry["number"])
        assert len(words) - 2 == int(entry["user"][1:]) + 1


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_the_map_has_the_format_that_its_name_says(tmp_path, suffix):
    users = ["plain", 'with "quotes", and a comma', "Zoë"]
    rows = [{"who": user, "what": "a b", "when": 0} for user in users]
    file = tmp_path / f"map{suffix}"
    prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", rows), splits=SplitRule(held_out=0.0), user_map=file)
    written = duckdb.sql(f"SELECT split, number, \"user\" FROM '{file}' ORDER BY number").fetchall()
    assert sorted(row[2] for row in written) == sorted(users)
    assert [row[:2] for row in written] == [("train", i) for i in range(3)]
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("name", ["store/map.csv", "link/map.csv", "other/../store/deep/map.csv"])
def test_a_map_in_the_store_is_refused_by_whatever_name(tmp_path, name):
    for folder in ("store", "other", "store/deep"):
        (tmp_path / folder).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "store")
    for out in (tmp_path / "store", tmp_path / "link"):
        with pytest.raises(PrivacyError, match="lies in the store"):
            check_user_map(tmp_path / name, out)
    check_user_map(tmp_path / "other" / "map.csv", tmp_path / "store")


def test_a_map_is_a_file_in_a_folder_that_is_there(tmp_path):
    (tmp_path / "map.csv").mkdir()
    for name in ("map.csv", "missing/map.csv"):
        with pytest.raises(InputError, match="is not a file in a folder that is there"):
            check_user_map(tmp_path / name, tmp_path / "store")


def test_a_map_in_an_unknown_format_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(InputError, match=r"\.csv, \.json, \.jsonl, \.parquet"):
        prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", []), user_map=tmp_path / "map.txt")
    assert not (tmp_path / "store.partial").exists()
