"""A small trained run and untrained models, shared by the tests of deployment."""

from pathlib import Path

import pytest
import torch

import unheard
from unheard.corpus.tokenizers import WordTokenizer
from unheard.corpus.vocabulary import Vocabulary
from unheard.deployment.model import LoadedModel
from unheard.deployment.step import stepper_for
from unheard.models.recurrent import TiedGRU

PRIVATE = {
    "claimed": {"epsilon": 1.5, "accountant": "pld"},
    "delta": 1e-6,
    "claim": "(1.5, 1e-06)-differential privacy for every user, by pld",
    "warnings": [],
}
PLAIN = {
    **PRIVATE,
    "claimed": {"epsilon": "infinity", "accountant": "rdp"},
    "claim": "no guarantee: epsilon is infinite",
}
SENTENCE = "the to you i a it and of that is are how do don't doing today tomorrow this they then there go good . , ?"
WORDS = SENTENCE.split()


@pytest.fixture(scope="session")
def run_folder(store, model, plan, tmp_path_factory) -> Path:
    """A run of six rounds on the corpus of the tests. Tests may read and copy it but not write into it."""
    run = unheard.Run(
        corpus=store.path,
        model=model,
        plan=plan,
        training=unheard.Training(rounds=6),
        evaluation=unheard.Evaluation(every=6, max_tokens=200, unroll=20),
    )
    folder = tmp_path_factory.mktemp("runs") / "small"
    for _ in unheard.train(run, folder):
        pass
    return folder


@pytest.fixture(scope="session")
def two_models() -> list[LoadedModel]:
    """An untrained LSTM and an untrained GRU on a few words: their suggestions are fixed but not sensible."""
    vocabulary = Vocabulary.of(WORDS)
    models = []
    for name, cls, statement in (("private", unheard.TiedLSTM, PRIVATE), ("plain", TiedGRU, PLAIN)):
        model = cls(vocabulary_size=len(vocabulary), embedding_size=8, hidden_size=12)
        steps = stepper_for(model, model.initial(len(models)), context=20)
        models.append(
            LoadedModel(
                name=name,
                kind="run",
                stepper=steps,
                vocabulary=vocabulary,
                tokenizer=WordTokenizer(),
                statement=statement,
            )
        )
    return models


@pytest.fixture(scope="session")
def wild():
    """Return random parameters without zeros, with biases and norms unlike those of an initialisation, to expose errors."""

    def drawn(model, seed: int = 1, spread: float = 0.3) -> torch.Tensor:
        params_P = model.initial(seed)
        return params_P + spread * torch.randn(len(params_P), generator=torch.Generator().manual_seed(seed + 7))

    return drawn
