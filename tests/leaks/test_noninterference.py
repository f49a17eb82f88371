"""Output depends on the training users only through the noise: two sets of training users give identical output.

Two stores have the same public parts (words, held-out users, corpus.json) and different training users: another number of
users, with more text and other words. The noisy average of each round is replaced by a value that depends on no user. Then
each command is run on both stores ("worlds"), and all output (printed, logged, or written outside of the store) must be
equal byte for byte. So the test needs no list of private quantities: any count, norm, loss, cohort, order or file name that
depends on the training users makes a difference.
"""

import hashlib
import logging
import os
import re
import secrets
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import WORDS, counting_user
from unheard.corpus.store import TokenStore, write_store
from unheard.corpus.vocabulary import Vocabulary
from unheard.mechanism.aggregation import NoisyAverage
from unheard.mechanism.noise import GaussianNoise

SMALL = (
    "--set model.embedding_size=4 --set model.hidden_size=6 --set evaluation.max_tokens=200 --set evaluation.every=1"
)
COMMANDS = (
    "init run.toml --corpus store --population 60 --users-per-round 12 --rounds 2",
    f"train run.toml --out runs/first --set training.checkpoint_every=1 --set clip.norm=0.1 {SMALL}",
    "resume runs/first --rounds 3",
    f"train run.toml --out runs/capped {SMALL} --set weights.kind=capped --set weights.weight_cap=20 "
    "--set weights.total_weight=30 --set estimator.kind=clipped_denominator --set estimator.min_total_weight=20",
    f"sweep run.toml --out runs/swept --vary clip.norm=0.1,0.2 {SMALL}",
    f"tune run.toml --out runs/best --select --vary clip.norm=0.1,0.2 --trials 1 {SMALL}",
    "statement runs/first",
    "statement runs/first --all-runs --json",
    "statement runs/first --format report",
    "verify runs/first",
    "budget store",
    "evaluate runs/first --full",
    "compare runs/first runs/capped",
    "report runs/first runs/capped --out page",
    "card runs/first --out card.md",
    "export runs/first --out exported",
    "predict runs/first w1",
    "watch runs/first --once",
    "audit runs/first --canaries 8 --rounds 2",
)
TIMES = re.compile(r"\d+:\d\d:\d\d|\d+ seconds? ago")


def public_average(noise: GaussianNoise, average, rng) -> NoisyAverage:
    """Return a noisy average that is a function of public numbers only."""
    std = noise.std(average.sensitivity)
    waves_P = torch.sin(torch.arange(average.units_P.numel(), dtype=torch.float64))
    return NoisyAverage(average_P=std * waves_P, noise_std=std)


@pytest.fixture
def fixed_keys(monkeypatch):
    """Replace the random ids and keys of the system by two fixed sequences, which restart for each world.

    Ids are part of the output. They have their own sequence, because threads draw keys at varying times.
    """
    drawn = {"key": 0, "id": 0}

    def draw(kind: str, size: int) -> bytes:
        drawn[kind] += 1
        return hashlib.shake_256(f"{kind} {drawn[kind]}".encode()).digest(size)

    monkeypatch.setattr(os, "urandom", lambda size: draw("key", size))
    monkeypatch.setattr(secrets, "token_hex", lambda size=32: draw("id", size).hex())
    return drawn


def write_world(folder: Path, users: int, longest: int, seed: int) -> None:
    """Write a store with the training users of one world. Everything else is the same in both worlds."""
    private, public = np.random.default_rng(seed), np.random.default_rng(7)
    write_store(
        folder / "store",
        train=[counting_user(private, int(private.integers(longest // 2, longest))) for _ in range(users)],
        held_out=[counting_user(public, 60) for _ in range(10)],
        public=[counting_user(public, 60) for _ in range(5)],
        vocabulary=Vocabulary.of([f"w{i}" for i in range(WORDS)]),
        info={"tokens": {"kind": "words"}, "vocabulary": {"kind": "file", "source": "a test's own words"}},
    )


def outcome(folder: Path, command, caplog) -> dict[str, bytes]:
    """Return all output of a world: printed and logged text by command, and file contents by path."""
    seen: dict[str, bytes] = {}
    for line in COMMANDS:
        caplog.clear()
        done = command(*line.split())
        assert done.status == 0, (line, done.said)
        said = TIMES.sub("TIME", done.said)
        logged = "\n".join(f"{record.name} {record.getMessage()}" for record in caplog.records)
        seen[f"$ {line}"] = f"{said}\n--- log\n{TIMES.sub('TIME', logged)}".encode()
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and not name.startswith("store/"):
            seen[name] = path.read_bytes()
    return seen


def test_nothing_but_the_noise_depends_on_the_training_users(
    tmp_path, monkeypatch, unheard_command, caplog, fixed_keys
):
    monkeypatch.setattr(GaussianNoise, "add", public_average)
    caplog.set_level(logging.DEBUG, logger="unheard")
    # The digest of the text is in the store's ledger only, whose hash chain begins with a secret number.
    monkeypatch.setattr(TokenStore, "content_digest", "0" * 64)
    worlds, folder = [], tmp_path / "world"
    # The owner is warned if the declared population of 60 is smaller than the number of users, or more than three times
    # as large. In both worlds it is within these limits.
    for users, longest in ((25, 12), (55, 90)):
        write_world(folder, users, longest, seed=users)
        monkeypatch.chdir(folder)
        fixed_keys.update(key=0, id=0)
        worlds.append(outcome(folder, unheard_command, caplog))
        monkeypatch.chdir(tmp_path)
        shutil.rmtree(folder)
    one, other = worlds
    assert one.keys() == other.keys()
    assert len(one) > len(COMMANDS) + 40
    assert [name for name in one if one[name] != other[name]] == []
