"""`unheard.prepare`: Python objects and paths give the same store as the command; defaults."""

import datetime
import json
import logging
import uuid
from dataclasses import replace
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import unheard
from tests.corpus.inputs import ANN, BOB, FIELDS, POSTS, word_list, words_of, write_jsonl
from unheard.cli.main import app
from unheard.corpus.encode import EncodingOptions
from unheard.corpus.prepare import CHITCHAT, choose_vocabulary, make_preparation
from unheard.corpus.private_vocabulary import CorpusVocabulary, PrivateVocabulary
from unheard.corpus.sources import Fields
from unheard.corpus.store import write_store
from unheard.corpus.tokenizers import WordTokenizer
from unheard.corpus.vocabulary import FileVocabulary, PublicVocabulary, TokenizerVocabulary, Vocabulary
from unheard.errors import CorpusError, InputError, InvalidValue

COLUMNS = {"user": "who", "text": "what", "time": "when"}


def prepared(tmp_path, source, **options):
    """Prepare a store from the test posts with all users in the training split."""
    return unheard.prepare(
        source, tmp_path / "store", **{**COLUMNS, "vocabulary": word_list(tmp_path), "held_out": 0.0, **options}
    )


def contents(store):
    """Return every file of a store, except for the input paths in counts.json and the digest of that file."""
    files = {str(p.relative_to(store.path)): p.read_bytes() for p in store.path.rglob("*") if p.is_file()}
    files["counts.json"] = json.dumps({k: v for k, v in store.counts.items() if k != "inputs"}).encode()
    files["digests.json"] = json.dumps({k: v for k, v in (store.digests or {}).items() if k != "counts.json"}).encode()
    return files


def test_prepare_in_python_gives_the_store_that_the_command_makes(tmp_path):
    rows = [
        {"who": f"u{i % 30}", "what": f"Good morning number {i}, how are you?" if i % 7 else None, "when": 1000 - i}
        for i in range(300)
    ]
    rows[5] = {"who": None, "what": "nobody", "when": 1}
    file = write_jsonl(tmp_path / "posts.jsonl", [*rows, "not a row"])
    out = tmp_path / "command" / "store"
    options = "--user-field who --text-field what --time-field when --tokens-per-user 40 --min-tokens 20 --held-out 0.2"
    done = CliRunner().invoke(app, ["prepare", str(file), *options.split(), "--out", str(out)])
    assert done.exit_code == 0, done.output
    wanted = contents(unheard.TokenStore.open(out))
    given = {"tokens_per_user": 40, "min_tokens": 20, "held_out": 0.2, **COLUMNS}
    for number, source in enumerate([iter([*rows, "not a row"]), str(file), [file]]):
        store = unheard.prepare(source, tmp_path / str(number) / "store", **given)
        assert contents(store) == wanted
        assert store.counts["rows"] == {
            "excluded": 0, "kept": 256, "malformed": 1, "no_text": 43, "no_time": 0, "no_user": 1, "rows": 301
        }  # fmt: skip
        assert [p.name for p in (tmp_path / str(number)).iterdir()] == ["store"]  # no rows are left behind


def pandas_rows():
    return pytest.importorskip("pandas").DataFrame([*POSTS, {"who": "ann", "what": None, "when": 1}])


def arrow_rows():
    return pytest.importorskip("pyarrow").Table.from_pylist([*POSTS, {"who": "ann", "what": None, "when": 1}])


def hugging_face_rows():
    datasets = pytest.importorskip("datasets", reason="the extra `hub` is not installed")
    datasets.disable_progress_bars()
    rows = [{"who": "eve", "what": "c c c c", "when": 0}, *POSTS, {"who": "ann", "what": None, "when": 1}]
    # A selection of rows, which the underlying Arrow table ignores.
    return datasets.Dataset.from_list(rows).select(range(1, 6))


@pytest.mark.parametrize("make", [pandas_rows, arrow_rows, hugging_face_rows])
def test_tables_are_read_and_rows_without_text_counted(tmp_path, make):
    store = prepared(tmp_path, make())
    assert words_of(store) == [ANN, BOB]
    assert (store.counts["rows"]["rows"], store.counts["rows"]["no_text"]) == (5, 1)


def test_all_splits_of_a_dataset_are_one_corpus(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the extra `hub` is not installed")
    parts = {"a": datasets.Dataset.from_list(POSTS[:2]), "b": datasets.Dataset.from_list(POSTS[2:])}
    assert words_of(prepared(tmp_path, datasets.DatasetDict(parts))) == [ANN, BOB]


def test_ids_and_times_of_any_type_are_read(tmp_path):
    noon = datetime.datetime(2018, 5, 2, 12, tzinfo=datetime.UTC)
    ann = uuid.UUID(int=7)
    rows = [
        {"who": ann, "what": "b", "when": noon},
        {"who": str(ann), "what": "a", "when": noon - datetime.timedelta(hours=1)},
        {"who": 5, "what": "c", "when": float("nan")},
        {"who": "5", "what": SimpleNamespace(), "when": 1},
    ]
    store = prepared(tmp_path, rows)
    assert sorted(words_of(store)) == ["<BOS> a <EOS> <BOS> b <EOS>", "<BOS> c <EOS>"]
    assert (store.counts["rows"]["no_text"], store.counts["rows"]["no_time"]) == (1, 1)


@pytest.mark.parametrize("make", [lambda: POSTS, pandas_rows, arrow_rows, hugging_face_rows])
def test_a_missing_column_is_named_with_the_nearest_one(tmp_path, make):
    with pytest.raises(InputError, match=r"no column 'whom' \(user=\).*Did you mean 'who'"):
        prepared(tmp_path, make(), user="whom")
    assert [p.name for p in tmp_path.iterdir()] == ["words.txt"]


def test_what_cannot_be_prepared_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(InputError, match="Cannot prepare a int"):
        prepared(tmp_path, 5)
    with pytest.raises(InputError, match="It is empty"):
        prepared(tmp_path, [])
    with pytest.raises(InputError, match="both the column 'who'"):
        prepared(tmp_path, POSTS, text="who")
    for columns in ({"user": ""}, {"text": ""}):
        with pytest.raises(InputError, match="Name the columns"):
            prepared(tmp_path, POSTS, **columns)
    for cost in ({}, {"vocabulary_epsilon": 1.0}, {"vocabulary_delta": 1e-6}):
        with pytest.raises(InvalidValue, match="needs its cost"):
            prepared(tmp_path, POSTS, vocabulary="private", **cost)
    for wrong in ({"vocabulary_epsilon": 1.0}, {"vocabulary": "pubic"}, {"held_out": 2.0}):
        with pytest.raises(InvalidValue):
            prepared(tmp_path, POSTS, **wrong)
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "something").touch()
    with pytest.raises(CorpusError, match="already exists"):
        prepared(tmp_path, POSTS)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["store", "words.txt"]


def test_tokenizers_and_vocabularies_can_be_named_or_given(tmp_path):
    words = word_list(tmp_path)
    characters = prepared(tmp_path, POSTS, tokenizer="characters", vocabulary=words.path)
    assert characters.info["tokens"]["kind"] == "characters"
    assert characters.info["vocabulary"]["kind"] == "file"
    other = unheard.prepare(POSTS, tmp_path / "other", **COLUMNS, vocabulary=characters.path, held_out=0)
    assert other.vocabulary == characters.vocabulary
    private = {"vocabulary": "private", "vocabulary_epsilon": 9.0, "vocabulary_delta": 0.1}
    rows = [{"who": f"u{i}", "what": "a b", "when": 0} for i in range(200)]
    paid = unheard.prepare(rows, tmp_path / "paid", **COLUMNS, **private)
    assert [event["kind"] for event in paid.vocabulary_events] == ["gaussian", "failure_probability"]
    given = FileVocabulary(path=words.path, size=4)
    assert unheard.prepare(POSTS, tmp_path / "given", **COLUMNS, vocabulary=given, held_out=0).vocabulary.words[3:] == (
        "a",
    )


def test_the_log_of_a_prepare_does_not_tell_how_many_users_posts_or_words_there_were(tmp_path, caplog):
    """Log files may be shared; the exact counts are for the owner alone."""
    told = []
    caplog.set_level(logging.DEBUG)
    for users in (3, 7):
        rows = [{"who": f"u{i}", "what": "hello world " * (i + users), "when": i} for i in range(users)]
        caplog.clear()
        (tmp_path / f"{users}").mkdir()
        store = prepared(tmp_path / f"{users}", rows)
        told.append([record.getMessage().replace(str(store.path), "") for record in caplog.records])
    assert told[0]
    assert told[0] == told[1]


def test_users_can_be_excluded(tmp_path):
    assert words_of(prepared(tmp_path, POSTS, exclude_users=["ann"])) == [BOB]


def test_the_demo_corpus_has_defaults_of_its_own_and_what_is_given_replaces_them(tmp_path, monkeypatch):
    """The store of the demo corpus is built in test_conversion.py; here only what would be built."""
    asked = []

    def build(sources, out, preparation, **_):
        asked.append(preparation)
        raise InputError("enough")

    monkeypatch.setattr("unheard.corpus.prepare.build_store", build)
    pytest.importorskip("chitchat_dataset", reason="the extra `demo` is not installed")
    for options in ({}, {"tokens_per_user": 200}):
        with pytest.raises(InputError, match="enough"):
            unheard.prepare("chitchat", tmp_path / "chat", **options)
    assert [p.name for p in asked] == ["chitchat", "chitchat"]
    assert [p.encoding.tokens_per_user for p in asked] == [1600, 200]


def test_words_for_a_vocabulary_name_its_source(tmp_path):
    words, tokenizer = word_list(tmp_path), WordTokenizer()
    store = write_store(tmp_path / "store", train=[], held_out=[], vocabulary=Vocabulary.of(["a"]))
    cost = {"epsilon": 1.0, "delta": 1e-6}
    assert choose_vocabulary("public", tokenizer, size=50, language="de") == PublicVocabulary(size=50, language="de")
    assert choose_vocabulary("private", tokenizer, **cost, words_per_user=7) == PrivateVocabulary(
        **cost, words_per_user=7
    )
    assert choose_vocabulary("tokenizer", tokenizer) == TokenizerVocabulary()
    assert choose_vocabulary(words.path, tokenizer, size=9) == FileVocabulary(path=words.path, size=9)
    assert choose_vocabulary(store.path, tokenizer) == CorpusVocabulary(path=str(store.path))
    assert choose_vocabulary("from-corpus", tokenizer, corpus="other.txt") == CorpusVocabulary(path="other.txt")
    assert choose_vocabulary(words, tokenizer) is words
    for given, others, message in (
        ("private", {"epsilon": 1.0}, "vocabulary_delta"),
        ("public", {"delta": 1e-6}, "costs nothing"),
        ("public", {"corpus": "other.txt"}, "go together"),
        ("from-corpus", {}, "go together"),
        ("privat", {}, "Did you mean 'private'"),
    ):
        with pytest.raises(InvalidValue, match=message):
            choose_vocabulary(given, tokenizer, **others)


def test_defaults_depend_on_each_other_and_the_demo_corpus_has_its_own():
    assert make_preparation(FIELDS).encoding == EncodingOptions()
    assert make_preparation(FIELDS, tokens_per_user=40).encoding.min_tokens == 40
    assert make_preparation(FIELDS, tokens_per_user=40, min_tokens=5).encoding.min_tokens == 5
    assert make_preparation(FIELDS).splits.held_out == 0.05
    assert make_preparation(FIELDS, held_out=0.0).splits.held_out == 0
    nothing = Fields(user="", text="")
    assert make_preparation(nothing, is_demo=True) == CHITCHAT
    assert make_preparation(nothing, is_demo=True, tokens_per_user=50).encoding.min_tokens == 50
    for wrong, message in ((nothing, "--user-field"), (replace(FIELDS, text="who"), "both the column 'who'")):
        with pytest.raises(InputError, match=message):
            make_preparation(wrong)
