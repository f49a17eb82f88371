"""What torchrun with one rank costs over plain `unheard train`: the same run file both ways, by the times of its checkpoints.

Run it: python benchmarks/one_rank.py RUN.toml [--rounds 301] [--every 100]
Rounds up to the first checkpoint are not counted: they compile and fill caches. Every run is charged to a ledger of its own.
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


def seconds(way: list[str], run_file: str, folder: Path, rounds: int, every: int) -> float:
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
