"""A small trained run, and finished models that cost nothing to make: what the tests of this room share."""

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
    "claimed": {"epsilon": 1.5},
    "delta": 1e-6,
    "claim": "(1.5, 1e-06)-differential privacy for every user, by pld",
    "warnings": [],
}
PLAIN = {**PRIVATE, "claimed": {"epsilon": "infinity"}, "claim": "no guarantee: epsilon is infinite"}
SENTENCE = "the to you i a it and of that is are how do don't doing today tomorrow this they then there go good . , ?"
WORDS = SENTENCE.split()


@pytest.fixture(scope="session")
def run_folder(store, model, plan, tmp_path_factory) -> Path:
    """A run of six rounds on the tests' own corpus. Read it, copy it, do not write into it."""
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
    """An LSTM and a GRU that nobody trained, on a handful of words: what they suggest is fixed, not sensible."""
    vocabulary = Vocabulary.of(WORDS)
    made = []
    for name, cls, told in (("private", unheard.TiedLSTM, PRIVATE), ("plain", TiedGRU, PLAIN)):
        model = cls(vocabulary_size=len(vocabulary), embedding_size=8, hidden_size=12)
        steps = stepper_for(model, model.initial(len(made)), context=20)
        made.append(
            LoadedModel(
                name=name, kind="run", stepper=steps, vocabulary=vocabulary, tokenizer=WordTokenizer(), statement=told
            )
        )
    return made


@pytest.fixture(scope="session")
def wild():
    """Parameters as after training: biases and norms that no initialisation has, so that nothing hides behind a zero."""

    def drawn(model, seed: int = 1, spread: float = 0.3) -> torch.Tensor:
        params_P = model.initial(seed)
        return params_P + spread * torch.randn(len(params_P), generator=torch.Generator().manual_seed(seed + 7))

    return drawn
