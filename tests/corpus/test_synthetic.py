"""A synthetic store has the requested size, the statistics of its model store, and is marked as synthetic."""

import numpy as np
import pytest

from unheard.corpus.store import TokenStore, write_store
from unheard.corpus.store_stats import predicted_lengths
from unheard.corpus.synthetic import fit, generate, synthesise, with_bos
from unheard.corpus.vocabulary import BOS, EOS, Vocabulary
from unheard.randomness import reproducible_generator

WORDS = Vocabulary.of("abcdef")


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    # after a comes b three times in four, else c; after b and c the post ends
    posts = [[BOS, 3, 4, EOS]] * 3 + [[BOS, 3, 5, EOS]]
    users = [np.concatenate(posts) for _ in range(50)]
    return write_store(tmp_path_factory.mktemp("real") / "store", train=users, held_out=users[:2], vocabulary=WORDS)


def test_every_user_has_exactly_the_tokens_asked_for(real, tmp_path):
    store = synthesise(real, tmp_path / "s", users=37, tokens_per_user=11, held_out=5)
    assert (store.train.num_users, store.held_out.num_users) == (37, 5)
    for users in (store.train, store.held_out):
        assert predicted_lengths(users).tolist() == [11] * users.num_users


def test_a_synthetic_store_stays_marked_and_keeps_the_cost_of_its_vocabulary(real, tmp_path):
    store = TokenStore.open(synthesise(real, tmp_path / "s", users=3, tokens_per_user=4).path)
    assert store.info["synthetic"] is True
    assert store.info["fitted_to"] == "store"
    assert store.vocabulary == WORDS
    events = [{"kind": "gaussian", "noise_multiplier": 2.0}]
    paid = write_store(
        tmp_path / "paid",
        train=[np.array([0, 3, 1])],
        held_out=[],
        vocabulary=WORDS,
        info={"vocabulary": {"events": events}},
    )
    assert synthesise(paid, tmp_path / "p", users=2, tokens_per_user=3).vocabulary_events == events


def test_the_same_seed_gives_the_same_corpus_and_another_seed_another(real, tmp_path):
    one, two, other = (
        synthesise(real, tmp_path / name, users=50, tokens_per_user=9, seed=seed)
        for name, seed in (("1", 1), ("2", 1), ("3", 2))
    )
    read = [[s.train.tokens(k).tolist() for k in range(50)] for s in (one, two, other)]
    assert read[0] == read[1]
    assert read[0] != read[2]


def test_nobody_who_is_held_out_has_the_text_of_somebody_in_train(real, tmp_path):
    store = synthesise(real, tmp_path / "s", users=20, tokens_per_user=30, held_out=20)
    train, held_out = ({tuple(users.tokens(k).tolist()) for k in range(20)} for users in (store.train, store.held_out))
    assert not train & held_out


def test_words_follow_each_other_as_they_do_in_the_store(real):
    model = fit(real)
    draws = (np.arange(1000) + 0.5) / 1000
    after_a = np.bincount(model.next_words(np.full(1000, 3), draws), minlength=9)
    # 150 times b, 50 times c, and one end that every word is given: shares of 201
    assert abs(after_a[4] - 1000 * 150 / 201) <= 1
    assert abs(after_a[5] - 1000 * 50 / 201) <= 1
    assert set(model.next_words(np.full(1000, BOS), draws).tolist()) <= {3, EOS}
    assert set(model.next_words(np.full(10, 8), draws[::100]).tolist()) == {EOS}


def test_every_bos_is_at_a_beginning_and_every_beginning_has_one(real):
    flat, lengths = generate(fit(real), 40, 30, reproducible_generator(0, "t"))
    ends = np.cumsum(lengths)
    begins = ends - lengths
    assert ends[-1] == len(flat)
    assert (flat[begins] == BOS).all()
    inside = np.setdiff1d(np.flatnonzero(flat == BOS), begins)
    assert (flat[inside - 1] == EOS).all()
    follow = np.setdiff1d(np.flatnonzero(flat == EOS) + 1, ends)
    assert (flat[follow] == BOS).all()


def test_with_bos_puts_bos_before_every_sequence():
    flat, lengths = with_bos(np.array([[3, EOS, 4], [EOS, EOS, 5]]))
    assert flat.tolist() == [BOS, 3, EOS, BOS, 4, BOS, EOS, BOS, EOS, BOS, 5]
    assert lengths.tolist() == [5, 6]
