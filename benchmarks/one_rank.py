"""Compare the time of plain `unheard train` with that of torchrun with one rank, for the same run file.

Run it: python benchmarks/one_rank.py RUN.toml [--rounds 301] [--every 100]

The time is measured from the checkpoint after --every rounds to the last checkpoint. The rounds before it, which
compile and fill caches, are not counted. Each run has its own population ledger.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

PLAIN = [sys.executable, "-m", "unheard"]
WAYS = {
    "plain": PLAIN,
    "torchrun, one rank": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "-m", "unheard"],
}
"""The beginning of the command line of each way to train."""


def seconds(way: list[str], run_file: str, folder: Path, rounds: int, every: int) -> float:
    """Train a run and return the seconds between the checkpoint after `every` rounds and the last regular one.

    Args:
        way: A value of `WAYS`.
        run_file: The run file.
        folder: A temporary folder.
        rounds: Number of rounds.
        every: Rounds between checkpoints.
    """
    out = folder / "run"
    changes = [
        f"training.rounds={rounds}",
        f"training.checkpoint_every={every}",
        "training.keep_checkpoints=1000",
        f"evaluation.every={rounds}",
        f"privacy.ledger={folder / 'people.jsonl'}",
    ]
    command = [*way, "train", run_file, "--out", str(out), *(word for one in changes for word in ("--set", one))]
    subprocess.run(command, check=True, capture_output=True)
    saved = sorted((out / "checkpoints").glob("*.safetensors"))
    counted = [file.stat().st_mtime for file in saved if int(file.stem.removeprefix("round-")) % every == 0][1:]
    return counted[-1] - counted[0]


def main() -> None:
    """Train the run file in each way and print the seconds."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    words.add_argument("run_file")
    words.add_argument("--rounds", type=int, default=301)
    words.add_argument("--every", type=int, default=100)
    asked = words.parse_args()
    if asked.rounds < 2 * asked.every:
        words.error("--rounds must be at least twice --every: the first checkpoint is where the clock starts.")
    for name, way in WAYS.items():
        with tempfile.TemporaryDirectory() as folder:
            taken = seconds(way, asked.run_file, Path(folder), asked.rounds, asked.every)
        print(
            f"{name}: {taken:.2f} s for rounds {asked.every} to {asked.rounds // asked.every * asked.every}", flush=True
        )


if __name__ == "__main__":
    main()
