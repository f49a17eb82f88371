"""The statistics of a store, compared with counts by hand."""

import numpy as np

from unheard.corpus.store import write_store
from unheard.corpus.store_stats import cap_effect, histogram, split_statistics
from unheard.corpus.vocabulary import BOS, EOS, UNK, Vocabulary

WORDS = Vocabulary.of("abcdef")


def test_statistics_are_what_one_counts_by_hand(tmp_path):
    users = [np.array([BOS, 3, UNK, EOS, BOS, 4, EOS]), np.array([BOS, 3, EOS])]
    store = write_store(tmp_path / "s", train=users, held_out=[], vocabulary=WORDS)
    found = split_statistics(store.train)
    assert (found.users, found.tokens, found.posts) == (2, 7, 3)
    assert found.out_of_dictionary == 0.25
    assert (found.percentiles[0], found.percentiles[-1]) == (2, 5)
    assert found.largest_user_share == 5 / 7
    assert found.histogram == ((1, 1, 0), (2, 3, 1), (4, 7, 1))
    effect = cap_effect(store, 4)
    assert (effect.users_at_cap, effect.total_weight, effect.mean_weight) == (0.5, 1.75, 0.875)
    assert split_statistics(store.held_out).users == 0


def test_a_histogram_counts_everybody_once():
    lengths = np.array([1, 2, 3, 500, 100_000, 7, 7])
    assert sum(n for _, _, n in histogram(lengths, 5)) == 7
    assert sum(n for _, _, n in histogram(lengths, 50)) == 7
