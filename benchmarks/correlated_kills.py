"""Check that a run with correlated noise that is killed (kill -9) continues its noise and uses no index twice.

    python -m benchmarks.correlated_kills                     # a kill at each step of a short run (takes minutes)
    python -m benchmarks.correlated_kills --random 50         # 50 kills of one run at random steps

After the kills the run is resumed and completed. Then its ledger is checked: all events belong to one mechanism, and
the indices are 0, 1, 2, ... The noise of each attempt is compared with that of all others: no two attempts may share a
number. tests/training/test_noise_state.py does the same at a few steps.
"""

import argparse
import json
import random
import shutil
import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy as np
from tests.conftest import WORDS, counting_user
from tests.faults.inject import Steps, in_a_child, install, kill, output_of_a_child

import unheard
from unheard.corpus.store import write_store
from unheard.corpus.vocabulary import Vocabulary
from unheard.privacy.events import CorrelatedGaussian
from unheard.privacy.ledger import Ledger
from unheard.training import noise_state

ENGINE = unheard.EngineChoice(kind="reference")
PARTS = {
    "banded": (
        unheard.CyclicPoissonSampling(users_per_round=3, groups=2),
        unheard.CorrelatedNoise(noise_multiplier=1.0),
    ),
    "blt": (
        unheard.MinSeparationSampling(separation=2),
        unheard.CorrelatedNoise(noise_multiplier=4.0, strategy="blt", rounds=500),
    ),
}


def run_of(place: Path, strategy: str, rounds: int) -> unheard.Run:
    """Return a run of a tiny model.

    Args:
        place: Folder with the store.
        strategy: A key of `PARTS`.
        rounds: Number of rounds.
    """
    sampling, noise = PARTS[strategy]
    return unheard.Run(
        corpus=place / "corpus",
        model=unheard.TiedLSTM(vocabulary_size=50, embedding_size=2, hidden_size=2),
        plan=unheard.Plan(
            population=8,
            sampling=sampling,
            update=unheard.FedAvg(batch_size=2, unroll=5, learning_rate=1.0),
            clip=unheard.FlatClip(norm=2.0),
            noise=noise,
        ),
        training=unheard.Training(rounds=rounds, checkpoint_every=2),
        evaluation=unheard.Evaluation(every=10**6, max_tokens=10, unroll=5),
        delta=0.01,
    )


def go(run: unheard.Run, folder: Path, noise: Path) -> None:
    """Train or resume a run, and save the noise of each attempt to its own file.

    Args:
        run: The run.
        folder: The run folder; if it exists, the run is resumed.
        noise: Folder for the noise.
    """
    real = noise_state.CorrelatedNormals.take

    def take(self, count):
        """Return the noise as the real method does, and save it under its index."""
        noise_P = real(self, count)
        np.save(noise / f"{self.history.index - 1}-{random.SystemRandom().getrandbits(32)}", noise_P.numpy())
        return noise_P

    with (
        patch.object(noise_state.CorrelatedNormals, "take", take),
        patch("unheard.training.loop.write_statement", lambda *_: {}),
    ):
        is_there = folder.exists()
        list(unheard.resume(folder, engine=ENGINE) if is_there else unheard.train(run, folder, engine=ENGINE))


def killed(run: unheard.Run, folder: Path, noise: Path, at: int) -> int:
    """Train or resume in a child process that kills itself at step `at`, and return its exit status."""

    def work() -> None:
        install(Steps(at, kill))
        go(run, folder, noise)

    return in_a_child(work)


def check(folder: Path, noise: Path, kills: int) -> int:
    """Check that indices count up from 0 and are used once, and that no two attempts share a number of their noise.

    Returns:
        The number of attempts in the ledger.
    """
    events = Ledger.read(folder / "ledger.jsonl").events
    indices = [event.index for event in events if isinstance(event, CorrelatedGaussian)]
    assert indices == list(range(len(indices))), indices
    drawn = {path.stem: np.load(path) for path in noise.glob("*.npy")}
    everything = np.concatenate(list(drawn.values()))
    assert len(np.unique(everything)) == len(everything), "two attempts share noise"
    used = sorted(int(name.split("-")[0]) for name in drawn)
    assert used == sorted(set(used)), f"an index was used twice: {used}"
    assert not (folder / "noise").exists()
    return len(indices)


def main() -> None:
    """Make a small store and check both kinds of noise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", type=int, default=0, metavar="N", help="kill one run N times at random steps")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = np.random.default_rng(7)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_store(
            place / "corpus",
            train=[counting_user(rng, 12) for _ in range(8)],
            held_out=[counting_user(rng, 12)],
            vocabulary=Vocabulary.of([f"w{i}" for i in range(WORDS)]),
            info={"tokens": {"kind": "words"}, "vocabulary": {"kind": "file", "source": "a benchmark's own words"}},
        )
        for strategy in PARTS:
            (at_random if options.random else at_every_step)(place, strategy, options)


def at_every_step(place: Path, strategy: str, options: argparse.Namespace) -> None:
    """For each step from the first round on: kill a new run at this step, resume it to its end, and check it."""
    noise = place / "noise"

    def list_steps() -> str:
        """Train once without a kill and return the names of all steps as JSON."""
        steps = Steps(-1, kill)
        install(steps)
        noise.mkdir()
        go(run_of(place, strategy, 4), place / "dry", noise)
        return json.dumps(steps.names)

    names = json.loads(output_of_a_child(list_steps))
    first = names.index("round: sum_updates")
    for at in range(first, len(names)):
        for old in (noise, place / "r", place / "dry"):
            shutil.rmtree(old, ignore_errors=True)
        noise.mkdir()
        run = run_of(place, strategy, 4)
        assert killed(run, place / "r", noise, at) == -9
        go(run, place / "r", noise)
        attempts = check(place / "r", noise, 1)
        assert 4 <= attempts <= 6, attempts
    print(
        f"{strategy}: killed at each of {len(names) - first} steps; every run was completed by one mechanism",
        flush=True,
    )
    for old in (noise, place / "r"):
        shutil.rmtree(old)


def at_random(place: Path, strategy: str, options: argparse.Namespace) -> None:
    """Kill one run `--random` times at random steps, complete it, and check it."""
    noise, chance, kills = place / "noise", random.Random(options.seed), 0
    noise.mkdir()
    run = run_of(place, strategy, 10**4)
    while kills < options.random:
        kills += killed(run, place / "r", noise, chance.randrange(3, 120)) == -9
    rounds = max(e.round for e in Ledger.read(place / "r" / "ledger.jsonl").entries) + 3
    with patch("unheard.training.loop.write_statement", lambda *_: {}):
        list(unheard.resume(place / "r", engine=ENGINE, rounds=rounds))
    attempts = check(place / "r", noise, kills)
    print(
        f"{strategy}: killed {kills} times at random; {attempts} attempts for {rounds} rounds, one mechanism",
        flush=True,
    )
    shutil.rmtree(noise)
    shutil.rmtree(place / "r")


if __name__ == "__main__":
    main()
