"""kill -9 at random moments, several times: the ledger never under-counts, and training continues.

Each start imports torch, so there are few of them here; tests/faults kills at every step. UNHEARD_KILLS=50 kills fifty times.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors import safe_open

from unheard.privacy.ledger import Ledger
from unheard.training.run import run_toml

pytestmark = pytest.mark.system

KILLS = int(os.environ.get("UNHEARD_KILLS", "4"))


def start(*words: object) -> subprocess.Popen:
    code = "from unheard.cli.main import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def released_round(folder: Path) -> int:
    """Return the round of the released model; 0 if there is none."""
    if not (folder / "model.safetensors").exists():
        return 0
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        found = re.search(r'"round": (\d+)', file.metadata()["unheard"])
    assert found
    return int(found.group(1))


def charged(folder: Path) -> int:
    return len(Ledger.read(folder / "ledger.jsonl")) if (folder / "ledger.jsonl").exists() else 0


def test_kill_9_at_random_moments_never_under_counts(run, tmp_path):
    rng, folder = random.Random(4), tmp_path / "r"
    (tmp_path / "run.toml").write_text(run_toml(run).replace("rounds = 6", "rounds = 100000"))
    kills, models, seen = 0, set(), 0
    while kills < KILLS:
        going = (
            start("resume", folder)
            if (folder / "ledger.jsonl").exists()
            else start("train", tmp_path / "run.toml", "--out", folder)
        )
        while charged(folder) == seen and going.poll() is None:  # wait for the start, then kill within a few rounds
            time.sleep(0.005)
        time.sleep(rng.random() * 0.25)
        going.send_signal(signal.SIGKILL)
        _, errors = going.communicate()
        assert going.returncode == -signal.SIGKILL, errors.decode()
        kills += 1
        assert charged(folder) >= seen
        seen = charged(folder)
        models.add(released_round(folder))
        assert seen >= max(models)
        rounds = [e.round for e in Ledger.read(folder / "ledger.jsonl").entries]
        assert set(range(max(models))) <= set(rounds)  # every round of a released model was paid for
    going = start("resume", folder, "--rounds", max(models) + 3)
    _, errors = going.communicate(timeout=120)
    assert going.returncode == 0, errors.decode()
    assert released_round(folder) == max(models) + 3
    assert charged(folder) >= seen
