"""Words have ids by rank, the special ones first, and survive a round trip through a file."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unheard.corpus import vocabulary as vocabulary_module
from unheard.corpus.tokenizers import CharacterTokenizer, WordTokenizer
from unheard.corpus.vocabulary import BOS, EOS, SPECIALS, UNK, Vocabulary, public_vocabulary, vocabulary_from_file
from unheard.errors import CorpusCorrupt, InputError, InvalidValue


def test_the_three_special_words_have_fixed_ids():
    vocabulary = Vocabulary.of(["the"])
    assert (BOS, EOS, UNK) == (0, 1, 2)
    assert [vocabulary.word(i) for i in range(4)] == ["<BOS>", "<EOS>", "<UNK>", "the"]


def test_words_without_the_special_ones_first_or_with_one_twice_are_no_vocabulary():
    for words in ([], ["the"], ["<EOS>", "<BOS>", "<UNK>", "the"], ["<BOS>", "<EOS>", "the", "<UNK>"]):
        with pytest.raises(InvalidValue, match="begins with"):
            Vocabulary(words)
    for words in (["the", "the"], ["the", "<UNK>"]):
        with pytest.raises(InvalidValue, match="occurs twice"):
            Vocabulary.of(words)


def test_an_unknown_word_is_unk_and_text_cannot_spell_a_special_word():
    assert Vocabulary.of(["the"]).encode_words(["the", "zebra", "<BOS>", "<EOS>"]).tolist() == [3, UNK, UNK, UNK]


@settings(max_examples=50, deadline=None)
@given(
    words=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5), unique=True, max_size=20)
)
def test_any_words_survive_a_file(tmp_path_factory, words):
    vocabulary = Vocabulary.of(w for w in words if w not in SPECIALS)
    file = tmp_path_factory.mktemp("v") / "vocabulary.txt"
    vocabulary.save(file)
    assert Vocabulary.load(file) == vocabulary


def test_the_public_vocabulary_has_as_many_rows_as_asked_most_frequent_first():
    vocabulary = public_vocabulary(10_000)
    assert len(vocabulary) == 10_000
    assert vocabulary.id("the") < vocabulary.id("dog") < vocabulary.id("tractor")
    assert vocabulary.id(".") < 10


def test_every_public_word_is_one_that_the_tokens_make():
    tokens = WordTokenizer()
    assert all(tokens.split(word) == [word] for word in public_vocabulary(3_000).words[3:])


def test_public_words_come_in_other_languages_and_as_characters():
    assert "und" in public_vocabulary(200, "de")
    assert {"e", " ", "."} <= set(public_vocabulary(60, tokenizer=CharacterTokenizer()).words)
    assert "E" in public_vocabulary(120, tokenizer=CharacterTokenizer(lowercase=False))


@pytest.mark.parametrize(
    ("language", "marks"), [("ja", "。、？！「」"), ("ar", "،؟؛"), ("es", "¿¡"), ("de", "–…"), ("zh", "，。；（）")]
)
def test_public_words_have_the_punctuation_of_their_script(language, marks):
    assert set(marks) <= set(public_vocabulary(2_000, language).words)
    assert set(marks) <= set(public_vocabulary(2_000, language, CharacterTokenizer()).words)
    assert "_" in public_vocabulary(2_000, language)


def test_quotes_of_other_languages_are_words_or_become_one():
    for language, text in (("de", "„gut“"), ("fr", "«bon»"), ("es", "¿qué?")):
        vocabulary = public_vocabulary(5_000, language)
        assert all(word in vocabulary for word in WordTokenizer().split(text)), language


def test_an_unknown_language_or_no_room_is_refused():
    with pytest.raises(InvalidValue, match="language"):
        public_vocabulary(100, "xx")
    with pytest.raises(InvalidValue, match="holds no words"):
        public_vocabulary(3)


def test_a_word_list_is_taken_in_its_order_without_repeats(tmp_path):
    (tmp_path / "w.txt").write_text("<BOS>\nb\r\na\n\nb\nc\n", encoding="utf-8")
    assert vocabulary_from_file(tmp_path / "w.txt").words[3:] == ("b", "a", "c")
    assert vocabulary_from_file(tmp_path / "w.txt", size=5).words[3:] == ("b", "a")


def test_bad_word_lists_are_refused(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    for name in ("empty.txt", "latin.txt"):
        with pytest.raises(InputError):
            vocabulary_from_file(tmp_path / name)
    (tmp_path / "plain.txt").write_text("a\nb\n")
    with pytest.raises(CorpusCorrupt):
        Vocabulary.load(tmp_path / "plain.txt")
    with pytest.raises(InvalidValue, match="twice"):
        Vocabulary.of(["a", "a"])


@pytest.mark.parametrize("language", ["en", "de", "ja"])
def test_words_are_listed_by_frequency_without_sorting_them_all(language):
    listed = vocabulary_module._words_by_frequency(language)
    assert tuple(listed) == vocabulary_module._by_weight(vocabulary_module._frequencies(language))
