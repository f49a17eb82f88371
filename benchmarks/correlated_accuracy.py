"""Compare the accuracy of independent noise and of banded correlated noise at equal epsilon, on reviews_81.

    python -m reproduction.private_run prepare --data DATA --work WORK             # the token store, once
    python -m benchmarks.correlated_accuracy --store WORK/reviews_81 --work RUNS --out results.json --stop-after 280
    python -m benchmarks.correlated_accuracy --show results.json

The runs have 1,000 users per round, 1,500 rounds and S = 8. Epsilon is 2 or 1 at delta 3.4e-7 for 750,000 users. The
noise multipliers come from `unheard plan --users 750000 --users-per-round 1000 --rounds 1500 --epsilon E --delta 3.4e-7
--compare-noise`. A pair is one run with each kind of noise. The pairs train in the order of `PAIRS`, several side by
side, until the time limit is reached. A later call continues where an earlier one stopped. On another machine,
`--done results.json` skips the pairs that are complete in this file. Each run has its own population ledger, because
these are experiments on a public corpus.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

from reproduction.measures import content_digest, facts

from unheard.formatting import SMOOTHED_OVER

POPULATION, DELTA = 750_000, 3.4e-7
MULTIPLIERS = {
    (2, "independent"): (0.663, 1),
    (2, "banded"): (1.354, 48),
    (1, "independent"): (0.769, 1),
    (1, "banded"): (1.559, 24),
}
"""Noise multiplier z and number of groups of the sampling, by epsilon and kind of noise."""
KINDS = ("independent", "banded")
SETTINGS = ({}, {"norm": 4.0}, {"learning_rate": 3.0}, {"norm": 16.0})
"""Settings that are tried for each epsilon and kind. The first is S = 8 and the paper's learning rate."""
PAIRS = [(epsilon, 0, seed) for seed in (1, 2, 3) for epsilon in (2, 1)] + [
    (epsilon, setting, 1) for setting in (1, 3, 2) for epsilon in (2, 1)
]
"""The pairs in the order of training: epsilon, index in `SETTINGS`, seed."""
ROUNDS = 1500


def tables(store: Path, epsilon: int, kind: str, setting: dict[str, float], seed: int, scale: float) -> dict[str, Any]:
    """Return the tables of the run file of one run.

    Args:
        store: The token store.
        epsilon: 2 or 1.
        kind: `independent` or `banded`.
        setting: One of `SETTINGS`.
        seed: Seed of the run.
        scale: Factor on rounds and users; below 1 to try the script.
    """
    z, groups = MULTIPLIERS[epsilon, kind]
    rounds, users = max(5, round(ROUNDS * scale)), max(4, round(1000 * scale))
    sampling: dict[str, Any] = {"kind": "poisson", "users_per_round": users}
    noise: dict[str, Any] = {"kind": "gaussian", "noise_multiplier": z}
    if kind == "banded":
        sampling = {"kind": "cyclic_poisson", "users_per_round": users, "groups": groups}
        noise = {"kind": "correlated", "strategy": "banded", "noise_multiplier": z, "rounds": rounds}
    return {
        "corpus": {"path": str(store)},
        "privacy": {"population": POPULATION, "delta": DELTA},
        "model": {"kind": "tied_lstm", "unit_norm": True, "keep_norm": False},
        "sampling": sampling,
        "update": {
            "kind": "fedavg",
            "learning_rate": setting.get("learning_rate", 6.0),
            "batch_size": 8,
            "unroll": 10,
            "epochs": 1,
        },
        "clip": {"kind": "flat", "norm": setting.get("norm", 8.0)},
        "noise": noise,
        "evaluation": {"every": max(1, round(100 * scale)), "max_tokens": 10_000_000},
        "training": {
            "rounds": rounds,
            "init_seed": 0,
            "checkpoint_every": 10**6,
            "keep_checkpoints": 1,
            "reproducible_seed": seed,
        },
    }


def name_of(pair: tuple[int, int, int], kind: str) -> str:
    """Return the name of a run, which is also the name of its folder."""
    return "epsilon{}-setting{}-seed{}-{}".format(*pair, kind)


def train_group(options: argparse.Namespace, pairs: Sequence[tuple[int, int, int]], until: float) -> bool:
    """Train the runs of some pairs side by side, or continue them, and return whether all are complete.

    Args:
        options: The options of the command.
        pairs: The pairs.
        until: Time at which training stops, by `time.monotonic`.
    """
    from unheard import EngineChoice
    from unheard.training.loop import train_together
    from unheard.training.run import run_from_tables

    runs, rounds = [], 0
    (options.work / "ledgers").mkdir(parents=True, exist_ok=True)
    for pair in pairs:
        for kind in KINDS:
            epsilon, setting, seed = pair
            settings = tables(options.store, epsilon, kind, SETTINGS[setting], seed, options.scale)
            settings["privacy"]["ledger"] = str(options.work / "ledgers" / f"{name_of(pair, kind)}.jsonl")
            run = run_from_tables(settings)[0]
            rounds = run.training.rounds
            runs.append((run, options.work / name_of(pair, kind)))
    is_gpu = options.device.startswith("cuda")
    choice = EngineChoice(
        kind="stacked" if is_gpu else "auto", device=options.device, precision="bfloat16" if is_gpu else "auto"
    )
    began, last = time.monotonic(), 0
    # Do not write statements: nobody reads those of these experiments, and each takes seconds.
    with (
        patch("unheard.training.loop.write_statement", lambda *_: {}),
        closing(train_together(runs, engine=choice)) as reports,
    ):
        for number, report in reports:
            last = report.round
            if report.metrics:
                accuracy, elapsed = 100 * report.metrics["accuracy_top1"], time.monotonic() - began
                print(f"{runs[number][1].name}: round {last}, {accuracy:.2f} %, {elapsed:.0f} s", flush=True)
            if number == len(runs) - 1:
                if report.metrics:
                    collect(options)
                if time.monotonic() > until:
                    break
    return last >= rounds


def is_complete(options: argparse.Namespace, pair: tuple[int, int, int]) -> bool:
    """Return whether both runs of a pair were evaluated after their last round, here or in the file `--done`."""
    curves = collect(options)
    return all(max(map(int, curves.get(name_of(pair, kind)) or [0])) >= options.rounds for kind in KINDS)


def collect(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Write the accuracy curves of all runs so far, with their origin, to the results file, and return the curves."""
    earlier = json.loads(options.done.read_text()) if options.done else {}
    origins, curves = earlier.pop("origins", {}), earlier
    for folder in sorted(options.work.glob("epsilon*")):
        file = folder / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        curves[folder.name] = {str(row["round"]): row["accuracy_top1"] for row in rows}
        origins[folder.name] = options.origin
    options.out.write_text(json.dumps({**curves, "origins": origins}, indent=1) + "\n")
    return curves


def show(path: Path) -> None:
    """Print the last accuracy of each pair, smoothed over five evaluations, the gain, and the mean gain over seeds."""
    curves = json.loads(path.read_text())
    gains: dict[str, list[float]] = {}
    for name, curve in sorted(curves.items()):
        if not name.endswith("-banded"):
            continue
        other = curves.get(name.replace("-banded", "-independent"), {})
        common = sorted(set(map(int, curve)) & set(map(int, other)))[-SMOOTHED_OVER:]
        if common:
            mean = [100 * sum(c[str(r)] for r in common) / len(common) for c in (other, curve)]
            gain = mean[1] - mean[0]
            title = name.removesuffix("-banded")
            if common[-1] == ROUNDS:
                gains.setdefault(title.rpartition("-")[0], []).append(gain)
            print(
                f"{title}: round {common[-1]}, independent {mean[0]:.2f} %, banded {mean[1]:.2f} %, {gain:+.2f} points"
            )
    for title, values in gains.items():
        if len(values) > 1:
            print(
                f"{title}: {statistics.mean(values):+.2f} ± {statistics.stdev(values):.2f} points, {len(values)} seeds"
            )


def main() -> None:
    """Train the pairs that are not complete, or print a results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, help="the token store of reviews_81")
    parser.add_argument("--work", type=Path, default=Path("correlated-runs"), help="folder of the run folders")
    parser.add_argument("--out", type=Path, default=Path("correlated-accuracy.json"))
    parser.add_argument("--done", type=Path, help="results of an earlier call: complete pairs are not trained again")
    parser.add_argument("--stop-after", type=float, default=1e9, help="seconds after which training stops")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=float, default=1.0, help="shrinks rounds and users; to try the script")
    parser.add_argument("--pairs", type=int, default=len(PAIRS), help="train only the first N pairs")
    parser.add_argument("--together", type=int, default=5, metavar="N", help="number of pairs side by side")
    parser.add_argument("--show", type=Path, help="print a results file")
    options = parser.parse_args()
    if options.show:
        show(options.show)
        return
    if options.store is None:
        parser.error("--store is required unless --show is given")
    began = time.monotonic()
    options.rounds = max(5, round(ROUNDS * options.scale))
    options.origin = facts(options.device) | {"store_content": content_digest(options.store)}
    options.work.mkdir(parents=True, exist_ok=True)
    pairs = [pair for pair in PAIRS[: options.pairs] if not is_complete(options, pair)]
    for first in range(0, len(pairs), options.together):
        if time.monotonic() - began > options.stop_after:
            break
        if not train_group(options, pairs[first : first + options.together], began + options.stop_after):
            break
    collect(options)
    show(options.out)


if __name__ == "__main__":
    main()
