"""Databases, datasets and the demo corpus are converted into files that DuckDB reads."""

import sqlite3
from dataclasses import replace

import numpy as np
import pytest

import unheard
from tests.corpus.inputs import ANN, BOB, FIELDS, POSTS, prepared, word_list, words_of, write_sqlite
from unheard.corpus.vocabulary import BOS
from unheard.errors import InputError


def test_sqlite_text_that_is_no_utf8_is_counted(tmp_path):
    file = write_sqlite(tmp_path / "x.db", POSTS[1:2])
    connection = sqlite3.connect(file)
    connection.execute("INSERT INTO posts VALUES ('ann', CAST(x'fffe' AS TEXT), 1), ('ann', NULL, 2), (5, 'a', 3)")
    connection.commit()
    connection.close()
    done = prepared(tmp_path, file)
    assert done.counts["rows"]["malformed"] == 1
    assert done.counts["rows"]["no_text"] == 1
    assert done.store.train.num_users == 2


def test_a_database_with_several_tables_asks_which(tmp_path):
    file = write_sqlite(tmp_path / "x.db", POSTS)
    connection = sqlite3.connect(file)
    connection.execute("CREATE TABLE other (x)")
    connection.commit()
    connection.close()
    with pytest.raises(InputError, match=r"2 tables \(other, posts\): choose one with --table"):
        prepared(tmp_path, file)
    with pytest.raises(InputError, match="Did you mean 'posts'"):
        prepared(tmp_path, file, fields=replace(FIELDS, table="post"))
    assert prepared(tmp_path, file, fields=replace(FIELDS, table="posts")).store.train.num_users == 2


def test_a_local_hugging_face_dataset_is_an_input(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the extra `hub` is not installed")
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(POSTS).save_to_disk(str(tmp_path / "saved"))
    assert words_of(prepared(tmp_path, tmp_path / "saved").store) == [ANN, BOB]
    with pytest.raises(InputError, match="has no column"):
        prepared(tmp_path, tmp_path / "saved", out="x", fields=replace(FIELDS, text="body"))


@pytest.mark.system
def test_the_default_corpus_is_the_installed_package_through_the_same_pipeline(tmp_path):
    pytest.importorskip("chitchat_dataset", reason="the extra `demo` is not installed")
    store = unheard.prepare("chitchat", tmp_path / "chitchat")
    # the package: 1,315 senders; counted apart from this code with json and a dictionary
    assert store.counts["users"]["users_seen"] == 1315
    assert store.counts["rows"]["rows"] == 258145
    lengths = np.array([np.count_nonzero(store.train.tokens(k) != BOS) for k in range(store.train.num_users)])
    assert lengths.min() >= 100
    assert lengths.max() == 1600
    assert store.info["name"] == "chitchat"
    assert word_list(tmp_path).path  # the folder is still writable: nothing was left locked
