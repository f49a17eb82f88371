"""Accuracy computed by hand, for a model with known predictions on a known text."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import unheard
from unheard.corpus.store import write_store
from unheard.corpus.tokenizers import WordTokenizer
from unheard.corpus.vocabulary import Vocabulary
from unheard.errors import InvalidValue
from unheard.evaluation.next_word import evaluate, predict
from unheard.updates.user_update import User

BOS, EOS, UNK, A, B, C = range(6)


class AlwaysTheSame(nn.Module):
    """A model with fixed scores: A is most likely, then UNK, B, EOS, C, BOS."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.tensor([0.0, 2.0, 4.0, 5.0, 3.0, 1.0]))

    def forward(self, tokens):
        return self.scores.expand(*tokens.shape, 6)


@pytest.fixture
def model() -> unheard.ModuleModel:
    return unheard.ModuleModel.wrap(AlwaysTheSame(), vocabulary_size=6)


def numbers(model, *users, unroll=80):
    params_P = model.layout.join(dict(AlwaysTheSame().named_parameters())).detach()
    return evaluate(model, params_P, [User(np.array(u)) for u in users], unroll=unroll)


def numbers_of(model, scores):
    """Return the measures on the text A B, which has two targets."""
    return evaluate(model, torch.tensor(scores), [User(np.array([BOS, A, B]))], unroll=80)


def test_accuracy_by_hand(model):
    """Targets A B UNK EOS (BOS does not count) C A: top-1 hits A, A; top-3 adds B; top-5 adds EOS and C."""
    found = numbers(model, [BOS, A, B, UNK, EOS, BOS, C, A])
    assert found["tokens"] == 6
    assert found["accuracy_top1"] == pytest.approx(2 / 6)
    assert found["accuracy_top3"] == pytest.approx(3 / 6)
    assert found["accuracy_top5"] == pytest.approx(5 / 6)
    assert found["accuracy_top1_words"] == pytest.approx(2 / 5)  # EOS left out


def test_a_word_outside_the_dictionary_is_a_mistake_even_if_unk_is_guessed(model):
    assert numbers(model, [BOS, UNK, UNK])["accuracy_top5"] == 0.0


def test_a_guess_that_the_model_likes_no_better_than_others_is_no_hit(model):
    """Six words with equal scores: no hit. Two words with the highest score: a hit within the top two."""
    scored = numbers_of(model, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert [scored[f"accuracy_top{k}"] for k in (1, 3, 5)] == [0.0, 0.0, 0.0]
    scored = numbers_of(model, [0.0, 0.0, 0.0, 2.0, 2.0, 1.0])
    assert scored["accuracy_top1"] == 0.0
    assert scored["accuracy_top3"] == 1.0


def test_scores_that_are_no_numbers_are_no_hit(model):
    assert numbers_of(model, [math.nan] * 6)["accuracy_top5"] == 0.0


def test_loss_and_perplexity_by_hand(model):
    total = sum(math.exp(s) for s in (0, 2, 4, 5, 3, 1))
    found = numbers(model, [BOS, A, B])
    assert found["loss"] == pytest.approx((-math.log(math.exp(5) / total) - math.log(math.exp(3) / total)) / 2)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))


def test_how_text_is_cut_into_windows_does_not_change_what_counts(model):
    text = [BOS, A, B, UNK, EOS, BOS, C, A]
    assert numbers(model, text, unroll=2) == pytest.approx(numbers(model, text))
    assert numbers(model, text, text)["tokens"] == 12


def test_whole_users_are_taken_in_order_until_there_are_enough_tokens():
    users = [User(np.arange(10)), User(np.arange(10)), User(np.arange(10))]
    chosen = unheard.Evaluation(max_tokens=14).choose(users)
    assert [len(u.tokens) for u in chosen] == [10, 5]


def test_no_held_out_text_is_refused(model):
    with pytest.raises(InvalidValue, match="held-out"):
        numbers(model, [BOS])


def test_several_users_are_measured_each_with_their_own_features():
    model = unheard.TiedLSTM(vocabulary_size=20, embedding_size=4, hidden_size=6, user_features=2)
    rng, params_P = np.random.default_rng(3), model.initial(0)
    users = [User(rng.integers(3, 20, size=9 + k), np.array([2.0 * k, -k], dtype="float32")) for k in range(3)]
    alone = [evaluate(model, params_P, [user], unroll=5) for user in users]
    together = evaluate(model, params_P, users, unroll=5)
    tokens = [one["tokens"] for one in alone]
    assert together["loss"] == pytest.approx(np.average([one["loss"] for one in alone], weights=tokens), rel=1e-6)
    assert together["tokens"] == sum(tokens)


def test_features_of_each_user_are_used():
    model = unheard.TiedLSTM(vocabulary_size=20, embedding_size=4, hidden_size=6, user_features=2)
    tokens = np.arange(3, 15)

    def loss(features):
        return evaluate(model, model.initial(0), [User(tokens, np.array(features, dtype="float32"))], unroll=5)["loss"]

    assert loss([1, 0]) != pytest.approx(loss([0, 1]))


def test_suggestions_leave_out_unk_and_bos(model):
    params_P = model.layout.join(dict(AlwaysTheSame().named_parameters())).detach()
    words = predict(model, params_P, Vocabulary.of(["a", "b", "c"]), ["a", "unheard-of"], top=9)
    assert [w for w, _ in words] == ["a", "b", "<EOS>", "c"]
    assert words[0][1] > words[1][1] > words[2][1] > words[3][1] > 0


def test_an_evaluation_follows_the_text_of_held_out_users_and_no_others(run, store, tmp_path):
    """The figures have no noise, so a training user must not take part in them."""
    texts = [[np.array([BOS, *words, EOS])] * 3 for words in ((A, B, A, B), (C, C, C, A))]
    parts = {"params_P": run.model.initial(0), "vocabulary": store.vocabulary, "tokenizer": WordTokenizer()}

    def figures(train: int, held_out: int) -> dict[str, float]:
        path = tmp_path / f"{train}{held_out}"
        write_store(path, train=texts[train], held_out=texts[held_out], vocabulary=store.vocabulary)
        return unheard.evaluate(unheard.Released(run=run, **parts), corpus=path)

    first = figures(0, 0)
    assert figures(1, 0) == first
    assert figures(0, 1)["loss"] != first["loss"]
