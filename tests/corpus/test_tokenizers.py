"""Tokenizers split text of any script into what a reader sees as words or characters."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unheard.corpus.tokenizers import (
    CharacterTokenizer,
    HuggingFaceTokenizer,
    WordTokenizer,
    tokenizer_from_table,
    tokenizer_to_table,
)
from unheard.errors import InputError, UnheardError


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello, World!", ["hello", ",", "world", "!"]),
        ("don't DON’T", ["don't", "don't"]),
        ("'quoted' “so”", ["'", "quoted", "'", '"', "so", '"']),
        ("x_y 3.14 $5", ["x", "_", "y", "3", ".", "14", "$", "5"]),
        ("cafe\u0301 CAFÉ", ["café", "café"]),
        ("a\0b\x1cc", ["a", "b", "c"]),
        ("\u202bשלום\u202c עולם", ["שלום", "עולם"]),
        ("می\u200cخواهم", ["می\u200cخواهم"]),
        ("👩\u200d👧\u200d👦❤️", ["👩\u200d👧\u200d👦", "❤️"]),
        ("शांति", ["शांति"]),
        ("soft\u00adhyphen zero\u200bwidth", ["softhyphen", "zerowidth"]),
        (" \t\n\u3000", []),
    ],
)
def test_words_are_what_a_reader_sees(text, words):
    assert WordTokenizer().split(text) == words


def test_keeping_case_and_marks_is_an_option():
    assert WordTokenizer(lowercase=False).split("Oh No!") == ["Oh", "No", "!"]
    assert WordTokenizer(punctuation="drop").split("Oh, no! 👍 it's 5") == ["oh", "no", "it's", "5"]


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(min_codepoint=1, max_codepoint=127), max_size=30), st.booleans())
def test_the_short_way_for_ascii_is_the_rules(text, lowercase):
    tokens = WordTokenizer(lowercase=lowercase)
    for chunk in text.split():
        assert tokens.split_chunk(chunk) == tokens.split_by_rules(chunk)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_splitting_its_own_words_changes_nothing(text):
    for word in WordTokenizer().split(text):
        assert WordTokenizer().split(word) == [word]
        assert word
        assert not any(c.isspace() for c in word)


def test_joining_reads_like_typing():
    assert WordTokenizer().join(["hello", ",", "(", "world", ")", "!"]) == "hello, (world)!"


def test_characters_are_what_a_reader_sees_and_white_space_is_one_space():
    assert CharacterTokenizer().split("A  b\n👩\u200d👧") == ["a", " ", "b", " ", "👩\u200d👧"]
    assert CharacterTokenizer(lowercase=False).split("Ab") == ["A", "b"]
    assert CharacterTokenizer().join(["a", " ", "b"]) == "a b"


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=40, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(["low lower lowest new newer"] * 5, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_any_tokenizer_json_works_and_travels_whole(tokenizer_file):
    tokens = HuggingFaceTokenizer.read(tokenizer_file)
    pieces = tokens.split("lower newest")
    assert "".join(pieces) == "lowernewest"
    tokenizer_file.rename(tokenizer_file.with_name("moved.json"))
    again = tokenizer_from_table(tokenizer_to_table(tokens))
    tokenizer_file.with_name("moved.json").rename(tokenizer_file)
    assert again.split("lower newest") == pieces
    assert set(pieces) <= set(tokens.words_by_id())


@pytest.mark.parametrize(
    "tokens", [WordTokenizer(), WordTokenizer(lowercase=False, punctuation="drop"), CharacterTokenizer()]
)
def test_a_record_rebuilds_the_same_tokens(tokens):
    assert tokenizer_from_table(tokenizer_to_table(tokens)) == tokens


def test_what_is_no_tokenizer_is_refused(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(InputError, match=r"not a Hugging Face tokenizer\.json"):
        HuggingFaceTokenizer.read(tmp_path / "x.json")
    with pytest.raises(InputError, match="Cannot read"):
        HuggingFaceTokenizer.read(tmp_path / "y.json")
    with pytest.raises(UnheardError, match="words"):
        tokenizer_from_table({"kind": "word"})
    (tmp_path / "x.json").write_bytes(b"\xa8\xff")
    with pytest.raises(InputError, match="not UTF-8"):
        HuggingFaceTokenizer.read(tmp_path / "x.json")


def test_a_panic_of_the_tokenizers_library_is_an_error_with_a_message(tokenizer_file, tmp_path, capfd):
    """A panic is not an `Exception`, so without a handler the command would end with a traceback."""
    definition = json.loads(tokenizer_file.read_text())
    definition["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    (tmp_path / "x.json").write_text(json.dumps(definition))
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        HuggingFaceTokenizer.read(tmp_path / "x.json")
    definition["pre_tokenizer"] = {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": True,
        "use_regex": True,
    }
    definition["normalizer"] = {"type": "Replace", "pattern": {"Regex": ""}, "content": "x" * 10_000}
    (tmp_path / "x.json").write_text(json.dumps(definition))
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        HuggingFaceTokenizer.read(tmp_path / "x.json").split("hello")
