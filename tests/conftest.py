"""Fixtures for all tests: a small store whose text a model can learn, a small model, a plan and a run."""

import os
import signal

import numpy as np
import pytest
import torch
from hypothesis import settings

import tests.kernels  # noqa: F401 (first: it may turn on Triton's interpreter)
import unheard
from unheard.corpus.store import TokenStore, write_store
from unheard.corpus.vocabulary import BOS, EOS, Vocabulary
from unheard.engines.vectorised import VectorisedEngine

torch.set_num_threads(1)
# Background jobs of a shell ignore SIGINT, and jobs under `nohup` ignore SIGHUP. Commands that tests start would inherit this.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
# Hypothesis has no deadline, because no test is about time. In CI it draws the same examples every time.
settings.register_profile("house", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("house")


def fsync_without_waiting(descriptor: int) -> None:
    """Check the descriptor as `os.fsync` does, without waiting for the disk.

    No test simulates a loss of power. Tests that check the calls of `os.fsync` replace this function.
    """
    os.fstat(descriptor)


os.fsync = fsync_without_waiting


CLIP_NORM, NOISE_MULTIPLIER = 2.0393, 0.5039
"""S and z of the fixture `run`. They have many digits, so that a test notices where one is rounded."""

WORDS = 47
ROWS = WORDS + 3


class ManyAtOnce(VectorisedEngine):
    """The engine `vectorised` with many users in one array, as on a GPU. On a CPU it computes one user at a time."""

    ALONE_ON = ()


def counting_user(rng: np.random.Generator, num_tokens: int) -> np.ndarray:
    """Return a user's token ids: each word has the next id in 80 % of cases, else a random one; a post has about 10 words."""
    tokens, word = [BOS], int(rng.integers(WORDS))
    while len(tokens) < num_tokens:
        if rng.random() < 0.1:
            tokens += [EOS, BOS]
        word = (word + 1) % WORDS if rng.random() < 0.8 else int(rng.integers(WORDS))
        tokens.append(word + 3)
    return np.array(tokens[:num_tokens])


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    rng = np.random.default_rng(7)
    return write_store(
        tmp_path_factory.mktemp("corpora") / "counting",
        train=[counting_user(rng, int(rng.integers(2, 60))) for _ in range(60)],
        held_out=[counting_user(rng, 60) for _ in range(10)],
        vocabulary=Vocabulary.of([f"w{i}" for i in range(WORDS)]),
        info={"tokens": {"kind": "words"}, "vocabulary": {"kind": "file", "source": "a test's own words"}},
    )


@pytest.fixture(scope="session")
def model() -> unheard.TiedLSTM:
    return unheard.TiedLSTM(vocabulary_size=ROWS, embedding_size=6, hidden_size=8)


@pytest.fixture(scope="session")
def plan() -> unheard.Plan:
    return unheard.Plan(
        population=60,
        sampling=unheard.PoissonSampling(users_per_round=12),
        update=unheard.FedAvg(batch_size=2, unroll=5, learning_rate=1.0),
        clip=unheard.FlatClip(norm=CLIP_NORM),
        noise=unheard.GaussianNoise(noise_multiplier=NOISE_MULTIPLIER),
    )


@pytest.fixture
def run(store: TokenStore, model: unheard.TiedLSTM, plan: unheard.Plan) -> unheard.Run:
    return unheard.Run(
        corpus=store.path,
        model=model,
        plan=plan,
        training=unheard.Training(rounds=6, checkpoint_every=2),
        evaluation=unheard.Evaluation(every=3, max_tokens=200, unroll=20),
    )
