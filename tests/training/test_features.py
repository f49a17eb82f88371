"""User features: the store, both engines and the evaluation pass them to a model that predicts from them."""

from dataclasses import replace

import numpy as np
import pytest

import unheard
from unheard.corpus.store import write_store
from unheard.corpus.vocabulary import BOS, Vocabulary
from unheard.errors import CorpusCorrupt, ModelError


@pytest.fixture
def two_kinds(tmp_path):
    """Users of kind 0 repeat word 3, users of kind 1 word 4. Before the first word only the feature shows the kind."""
    kinds = np.arange(24) % 2
    texts = [np.array([BOS, 3 + kind] * 5) for kind in kinds]
    features = np.eye(2, dtype="float32")[kinds]
    return write_store(
        tmp_path / "kinds",
        train=texts[:16],
        held_out=texts[16:],
        vocabulary=Vocabulary.of(["three", "four", "five"]),
        features={"train": features[:16], "held_out": features[16:]},
    )


def run_on(store, user_features):
    return unheard.Run(
        corpus=store.path,
        model=unheard.TiedLSTM(vocabulary_size=6, embedding_size=4, hidden_size=6, user_features=user_features),
        plan=unheard.Plan(
            population=16,
            sampling=unheard.PoissonSampling(users_per_round=16),
            update=unheard.FedAvg(batch_size=2, unroll=1, learning_rate=1.0),
            clip=unheard.FlatClip(norm=5.0),
            noise=unheard.NoNoise(),
        ),
        training=unheard.Training(rounds=6, reproducible_seed=1),
        evaluation=unheard.Evaluation(every=6, unroll=1),
    )


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_only_a_model_with_features_distinguishes_the_users(two_kinds, tmp_path, engine):
    choice = unheard.EngineChoice(kind=engine)
    knowing = list(unheard.train(run_on(two_kinds, 2), tmp_path / "knowing", engine=choice, allow_no_privacy=True))[
        -1
    ].metrics
    blind = list(unheard.train(run_on(two_kinds, 0), tmp_path / "blind", engine=choice, allow_no_privacy=True))[
        -1
    ].metrics
    assert knowing is not None
    assert blind is not None
    assert knowing["accuracy_top1"] == 1.0
    assert blind["accuracy_top1"] <= 0.5


def test_the_wrong_number_of_features_is_refused_with_the_right_one(two_kinds, store, tmp_path):
    with pytest.raises(ModelError, match=r"model\.user_features = 2"):
        unheard.train(run_on(two_kinds, 3), tmp_path / "r", allow_no_privacy=True)
    with pytest.raises(ModelError, match=r"model\.user_features = 0"):
        unheard.train(
            replace(
                run_on(two_kinds, 3), corpus=store.path, model=unheard.TiedLSTM(vocabulary_size=50, user_features=3)
            ),
            tmp_path / "r",
            allow_no_privacy=True,
        )


def test_features_that_do_not_fit_the_users_are_refused(two_kinds):
    np.save(two_kinds.path / "train" / "features.npy", np.zeros((3, 2), dtype="float32"))
    with pytest.raises(CorpusCorrupt, match="one row for each user"):
        unheard.TokenStore.open(two_kinds.path)
