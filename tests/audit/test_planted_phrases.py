"""Planted phrases: they are drawn from frequent words, and a store has a record of its phrases."""

import json

import numpy as np
import pytest

from unheard.corpus.canaries import draw_canaries, read_canaries
from unheard.corpus.vocabulary import Vocabulary
from unheard.errors import CorpusCorrupt, CorpusMissing, InvalidValue


def test_phrases_are_of_plain_words_and_come_in_groups():
    words = [a + b for a in "abcdefgh" for b in "klmnop"]
    drawn = draw_canaries(
        Vocabulary.of([*words, "Upper", "x1", "!"]),
        np.random.default_rng(1),
        carriers=(0, 7),
        each=2,
        words=4,
        repeats=3,
    )
    assert [(canary.users, canary.repeats) for canary in drawn] == [(0, 3), (0, 3), (7, 3), (7, 3)]
    assert all(len(canary.text.split()) == 4 and set(canary.text.split()) <= set(words) for canary in drawn)


def test_a_vocabulary_without_plain_words_is_refused():
    with pytest.raises(InvalidValue, match="too few plain words"):
        draw_canaries(Vocabulary.of([f"w{i}" for i in range(50)]), np.random.default_rng(1))


@pytest.mark.parametrize(
    "content",
    ["{", "[3]", '[{"tokens": [99], "users": [], "repeats": 1}]', '[{"tokens": "x", "users": [], "repeats": 1}]'],
)
def test_a_damaged_record_is_refused(tmp_path, content):
    (tmp_path / "canaries.json").write_text(content)
    with pytest.raises(CorpusCorrupt):
        read_canaries(tmp_path, 10)


def test_a_store_without_canaries_is_refused_and_a_record_is_read(tmp_path):
    with pytest.raises(CorpusMissing, match="unheard canaries"):
        read_canaries(tmp_path, 10)
    (tmp_path / "canaries.json").write_text(json.dumps([{"tokens": [0, 4, 1], "users": [3], "repeats": 2}]))
    planted = read_canaries(tmp_path, 10)
    assert planted[0]["carriers"] == 1
