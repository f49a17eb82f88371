"""Suggestions: completions and next words, both ranked by the model, and the cache of its states."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from unheard.corpus.tokenizers import CharacterTokenizer
from unheard.corpus.vocabulary import BOS, Vocabulary
from unheard.deployment.keyboard.suggestions import MAX_STATES, WINDOW, Suggester, split_at_cursor, suggester_for
from unheard.deployment.model import probabilities
from unheard.errors import ModelError


class Counting:
    """A model that prefers the word with the next id, and counts its steps."""

    def __init__(self, rows: int) -> None:
        self.rows, self.calls = rows, 0

    def read(self, state, word):
        self.calls += 1
        scores = np.zeros(self.rows, np.float32)
        scores[(word + 1) % self.rows] = 5.0
        return ((*(state or ()), word), scores)


@pytest.fixture
def counting(two_models) -> tuple[Suggester, Counting]:
    steps = Counting(len(two_models[0].vocabulary))
    return Suggester(replace(two_models[0], stepper=steps)), steps


def words(suggestions) -> list[str]:
    return [one.word for one in suggestions]


@pytest.mark.parametrize(
    ("text", "before", "begun"),
    [
        ("", "", ""),
        ("hello", "", "hello"),
        ("hello ", "hello ", ""),
        ("Hello, wor", "Hello, ", "wor"),
        ("I don't", "I ", "don't"),
        ("I don’", "I ", "don’"),
        ("she said 'th", "she said '", "th"),
        ("well-kn", "well-", "kn"),
        ("first\nsec", "", "sec"),
        ("first\n", "", ""),
        ("naïve café", "naïve ", "café"),
        ("ok 👍", "ok 👍", ""),
    ],
)
def test_the_word_at_the_cursor(text, before, begun):
    assert split_at_cursor(text) == (before, begun)


def test_a_word_begun_is_completed_from_the_dictionary(two_models):
    for model in two_models:
        assert set(words(Suggester(model).suggest("how are you do", top=9))) == {"don't", "doing"}
        assert set(words(Suggester(model).suggest("T", top=20))) == {w for w in model.vocabulary.words if w[0] == "t"}
        assert Suggester(model).suggest("xq") == []


def test_the_word_that_is_typed_already_is_no_suggestion(counting):
    suggester, _ = counting
    assert "the" not in words(suggester.suggest("the"))
    assert set(words(suggester.suggest("the", top=9))) == {"they", "then", "there"}
    assert set(words(suggester.suggest("DON’", top=9))) == {"don't"}


def test_the_model_ranks_completions_and_next_words(counting):
    suggester, _ = counting
    vocabulary = suggester.model.vocabulary
    after = vocabulary.word(vocabulary.id("how") + 1)  # "do"
    assert words(suggester.suggest("and how "))[0] == after
    assert words(suggester.suggest("today "))[0] == "tomorrow"
    assert words(suggester.suggest("today t"))[0] == "tomorrow"
    assert words(suggester.suggest("tomorrow t"))[0] == "this"


def test_shares_are_of_what_could_stand_here(counting):
    suggester, _ = counting
    assert sum(one.share for one in suggester.suggest("today t", top=99)) == pytest.approx(1)
    assert sum(one.share for one in suggester.suggest("today ", top=99)) == pytest.approx(1)


def test_marks_and_special_words_are_never_suggested(two_models):
    for model in two_models:
        found = words(Suggester(model).suggest("how are ", top=99))
        assert not {"<BOS>", "<EOS>", "<UNK>", ".", ",", "?"} & set(found)
        assert len(found) == len(model.vocabulary) - 6


def test_a_key_within_a_word_costs_no_step_and_a_finished_word_costs_one(counting):
    suggester, steps = counting
    suggester.suggest("how are ")
    assert steps.calls == 3  # BOS, how, are
    for text in ("how are y", "how are yo", "how are you"):
        suggester.suggest(text)
    assert steps.calls == 4  # no longer word begins with "you", so the word is finished
    suggester.suggest("how are you ")
    assert steps.calls == 4
    suggester.suggest("how are ")
    assert steps.calls == 4


@pytest.mark.parametrize(
    "text", ["", "t", "th", "Do", "how are ", "how are y", "how are you", "today, to", "don", "xq", "'", "a\n"]
)
def test_the_prefetched_suggestions_of_a_key_are_those_after_it(two_models, text):
    for model in two_models:
        foreseen = Suggester(model).suggest_ahead(text)
        for letter in "abcdefghijklmnopqrstuvwxyzé7":
            assert foreseen.get(letter, []) == Suggester(model).suggest(text + letter)
        if split_at_cursor(text)[1]:
            assert foreseen[" "] == Suggester(model).suggest(text + " ")
        else:
            assert " " not in foreseen


def test_the_cache_of_states_is_bounded_and_correct(counting, two_models):
    suggester, _ = counting
    for i in range(3 * MAX_STATES):
        suggester.suggest(f"{'the ' * (i % 50)}{'to ' * (i // 50)}")
    assert len(suggester._states) <= MAX_STATES
    fresh, used = Suggester(two_models[0]), Suggester(two_models[0])
    text = "how are you doing today and tomorrow then "
    for i in range(len(text)):
        used.suggest(text[:i])
    assert used.suggest(text) == fresh.suggest(text)


def test_the_first_words_of_a_text_are_read_from_bos_as_predict_does(two_models):
    model = two_models[0]
    _, scores = model.stepper.read(None, BOS)
    best = Suggester(model).suggest("", top=1)[0].word
    usable = [i for i, w in enumerate(model.vocabulary.words) if (i > 2 and w.isalpha()) or w == "don't"]
    assert best == model.vocabulary.word(max(usable, key=lambda i: probabilities(scores)[i]))


def test_a_long_message_is_read_from_a_fixed_place_so_that_most_keys_find_their_state(counting):
    suggester, steps = counting
    text = "the " * (5 * WINDOW)
    suggester.suggest(text)
    assert steps.calls <= 2 * WINDOW + 1
    before = steps.calls
    for i in range(1, WINDOW // 2):
        suggester.suggest(text + "to " * i)
    assert steps.calls - before <= WINDOW


def test_many_threads_get_the_same_answers(two_models):
    suggester = Suggester(two_models[0])
    texts = [f"{'how are you '[: i % 12]}{'the ' * (i % 7)}" for i in range(60)]
    alone = [Suggester(two_models[0]).suggest(text) for text in texts]
    found: list = [None] * len(texts)

    def ask(i: int) -> None:
        found[i] = suggester.suggest(texts[i])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone


def test_a_model_of_characters_is_refused_with_advice(two_models):
    characters = replace(two_models[0], tokenizer=CharacterTokenizer())
    with pytest.raises(ModelError, match="--tokens words"):
        suggester_for(characters)
    with pytest.raises(ModelError, match="PieceSuggester"):
        Suggester(characters)
    assert isinstance(suggester_for(two_models[0]), Suggester)


def test_words_that_differ_only_in_case_are_all_found(two_models):
    longer = {"parish", "parisian", "parisienne"}
    model = replace(two_models[0], vocabulary=Vocabulary.of(["Paris", "paris", *longer]), stepper=Counting(8))
    assert set(words(Suggester(model).suggest("pa", top=9))) == {"Paris", "paris", *longer}
    assert set(words(Suggester(model).suggest("paris"))) == longer


def test_next_words_follow_a_finished_word_before_its_space(counting):
    """After "how" the model predicts "do". A finished "do" is more likely than the longer words that begin with it."""
    suggester, _ = counting
    finished = suggester.suggest("how do")
    assert [one.word for one in finished] == [one.word for one in suggester.suggest("how do ")]
    assert all(one.follows for one in finished)
    assert not any(
        one.follows for one in suggester.suggest("the do")
    )  # there "don't" and "doing" are as likely as "do"
    assert set(words(suggester.suggest("the do"))) == {"don't", "doing"}
    assert suggester.suggest_ahead("how d")["o"] == finished
