"""Accuracy of independent and of banded correlated noise at equal epsilon, on reviews_81.

    python -m reproduction.private_run prepare --data DATA --work WORK             the token store, once
    python -m benchmarks.correlated_accuracy --store WORK/reviews_81 --work RUNS --out results.json --stop-after 230
    python -m benchmarks.correlated_accuracy --show results.json

1,000 users per round, 1,500 rounds, S = 8, epsilon 2 and 1 at delta 3.4e-7 for 750,000 users. The noise multipliers are
those of `unheard plan --users 750000 --users-per-round 1000 --rounds 1500 --epsilon E --delta 3.4e-7 --compare-noise`.
The pairs to compare train side by side, in the order of `PAIRS`, until the time is over; a later call goes on where an
earlier one stopped. Each run charges a ledger of its own: these are experiments on a public corpus.
"""

import argparse
import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

POPULATION, DELTA = 750_000, 3.4e-7
MULTIPLIERS = {
    (2, "independent"): (0.663, 1),
    (2, "banded"): (1.354, 48),
    (1, "independent"): (0.769, 1),
    (1, "banded"): (1.559, 24),
}
"""z and the number of groups, by epsilon and kind of noise."""
SETTINGS = ({}, {"norm": 4.0}, {"learning_rate": 3.0}, {"norm": 16.0})
"""At most four settings are tried for each epsilon and kind; the first is S = 8 and the paper's learning rate."""
PAIRS = (
    [(epsilon, 0, 1) for epsilon in (2, 1)]
    + [(epsilon, setting, 1) for setting in (1, 2, 3) for epsilon in (2, 1)]
    + [(epsilon, 0, seed) for seed in (2, 3) for epsilon in (2, 1)]
)
"""(epsilon, setting, seed), in their order."""


def tables(store: Path, epsilon: int, kind: str, setting: dict[str, float], seed: int, scale: float) -> dict[str, Any]:
    """The run file of one run."""
    z, groups = MULTIPLIERS[epsilon, kind]
    rounds, users = max(5, round(1500 * scale)), max(4, round(1000 * scale))
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


def train_pair(options: argparse.Namespace, pair: tuple[int, int, int], until: float) -> bool:
    """Train both runs of a pair side by side, or go on with them. Returns whether both are complete."""
    from unheard import EngineChoice
    from unheard.training.loop import train_together
    from unheard.training.run_file import run_from_tables

    epsilon, setting, seed = pair
    runs, rounds = [], 0
    for kind in ("independent", "banded"):
        name = f"epsilon{epsilon}-setting{setting}-seed{seed}-{kind}"
        settings = tables(options.store, epsilon, kind, SETTINGS[setting], seed, options.scale)
        (options.work / "ledgers").mkdir(parents=True, exist_ok=True)
        settings["privacy"]["ledger"] = str(options.work / "ledgers" / f"{name}.jsonl")
        run = run_from_tables(settings)[0]
        rounds = run.training.rounds
        runs.append((run, options.work / name))
    if all(_round(folder) >= rounds for _, folder in runs):
        return True
    is_gpu = options.device.startswith("cuda")
    choice = EngineChoice(
        kind="stacked" if is_gpu else "auto", device=options.device, precision="bfloat16" if is_gpu else "auto"
    )
    began, last = time.monotonic(), 0
    # The statements of these experiments are of no interest, and each takes seconds.
    with (
        patch("unheard.training.loop.statement", lambda *_: {"claim": "an experiment"}),
        closing(train_together(runs, engine=choice)) as reports,
    ):
        for number, report in reports:
            if report.metrics:
                accuracy, elapsed = 100 * report.metrics["accuracy_top1"], time.monotonic() - began
                print(f"{runs[number][1].name}: round {report.round}, {accuracy:.2f} %, {elapsed:.0f} s", flush=True)
                _collect(options)
            last = report.round
            if number == len(runs) - 1 and time.monotonic() > until:
                break
    return last >= rounds


def _round(folder: Path) -> int:
    from unheard.run_folder import RunFolder

    return RunFolder(folder).saved_round if folder.exists() else 0


def _collect(options: argparse.Namespace) -> None:
    """Write the accuracy curves of all runs so far into the results file."""
    curves = {}
    for folder in sorted(options.work.glob("epsilon*")):
        file = folder / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        curves[folder.name] = {row["round"]: row["accuracy_top1"] for row in rows}
    options.out.write_text(json.dumps(curves, indent=1) + "\n")


def show(path: Path) -> None:
    """Print the last accuracy of each pair, smoothed over five evaluations, and the gain."""
    curves = json.loads(path.read_text())
    for name, curve in curves.items():
        if not name.endswith("-banded"):
            continue
        other = curves.get(name.replace("-banded", "-independent"), {})
        common = sorted(set(map(int, curve)) & set(map(int, other)))[-5:]
        if common:
            mean = [100 * sum(c[str(r)] for r in common) / len(common) for c in (other, curve)]
            gain = mean[1] - mean[0]
            title = name.removesuffix("-banded")
            print(
                f"{title}: round {common[-1]}, independent {mean[0]:.2f} %, banded {mean[1]:.2f} %, {gain:+.2f} points"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, help="the token store of reviews_81")
    parser.add_argument("--work", type=Path, default=Path("correlated-runs"), help="run folders, to go on later")
    parser.add_argument("--out", type=Path, default=Path("correlated-accuracy.json"))
    parser.add_argument("--stop-after", type=float, default=1e9, help="seconds")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=float, default=1.0, help="shrinks rounds and users; to try the script")
    parser.add_argument("--pairs", type=int, default=len(PAIRS), help="train only the first N pairs")
    parser.add_argument("--show", type=Path, help="print a results file")
    options = parser.parse_args()
    if options.show:
        show(options.show)
        return
    if options.store is None:
        parser.error("--store is needed")
    options.work.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + options.stop_after
    for pair in PAIRS[: options.pairs]:
        if time.monotonic() > until or not train_pair(options, pair, until):
            break
    _collect(options)
    show(options.out)


if __name__ == "__main__":
    main()
