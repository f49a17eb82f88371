"""Train the private run, its baseline and the runs of Table 2 on reviews_81, as `rules.toml` registers them.

The inputs are reviews_81.jsonl.zst and blogs_1600.jsonl.zst. The outputs are run folders under WORK/runs and small
result files. Every command continues where an earlier call stopped.

    python -m reproduction.private_run prepare --data DATA --work WORK             both token stores (no GPU needed)
    python -m reproduction.private_run run choose-S --work WORK                    choose S on blogs
    python -m reproduction.private_run run private --work WORK --stop-after 580    a step of reproduction/schedule.toml
    python -m reproduction.private_run all --work WORK --stop-after 1500           all steps in order, until the time is over
    python -m reproduction.batch A --work WORK --bundle OUT/a.tar.gz --stop-after 1500     a batch of it, several at once
    python -m reproduction.private_run measure WORK/runs/private                   hits of each held-out user
    python -m reproduction.private_run digest WORK/reviews_81                      SHA-256 of the content of a store
    python -m reproduction.private_run counted WORK/reviews_81 --out counted.json  unigram and bigram, without privacy
    python -m reproduction.private_run collect --work WORK --out OUT               result files: figures only, no text
    python -m reproduction.private_run collect --work WORK --bundle OUT/a.tar.gz   the same in a few files, with the state
    python -m reproduction.private_run restore OUT/a.tar.gz* --work WORK           go on with them on another machine
    python -m reproduction.private_run unpack OUT/a.tar.gz* --out reproduction/results/reviews_81

Paper: the private run corresponds to the first row of Table 2 (z = 1, 5,000 users per round, 5,000 rounds), which the
paper estimated with 100 users per round. `private_results.py` applies the registered rules to the results.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from reproduction.bundles import bundle, collect, restore, unpack
from reproduction.private_measures import content_digest, counted, facts, measure
from reproduction.recipe import common_tables
from unheard import formatting
from unheard.run_folder import RunFolder
from unheard.storage import replace_file

WORDS = 64
"""Words in one segment of blogs_64: as many as reviews_81 keeps of a reviewer."""
CANDIDATES = (2, 4, 8, 12, 16)
"""Values of S to choose from (rule private-S)."""
POPULATIONS = {"reviews_81": 750_947, "blogs_64": 260_000, "reviews_1600_200k": 191_709}
"""Declared population of each corpus."""
PREPARE = ["--user-field", "user", "--text-field", "text", "--time-field", "time"]
"""Registered options of `unheard prepare`."""
CUT = {
    "reviews_81": ["--tokens-per-user", "81", "--min-tokens", "21", "--held-out", "0.005"],
    "blogs_64": ["--tokens-per-user", "81", "--min-tokens", "21", "--held-out", "0.01"],
    "reviews_1600_200k": ["--tokens-per-user", "1600", "--min-tokens", "21", "--held-out", "0.02"],
}
"""Registered options of `unheard prepare` by corpus."""
STEPS = ("choose-S", "private", "baseline-C5000", "table-2", "C1250")
"""Steps of `all` in their order."""
MORE_STEPS = ("z1-C1667", "baseline-C1667", "z1-C1250", "baseline-C1250", "trade-offs", "trade-offs-adjusted")
"""Further steps, which batches of schedule.toml name."""
LONG_STEPS = ("long-table-2", "long-C1250", "long-trade-offs", "long-trade-offs-adjusted")
"""The same steps on reviews_1600_200k, with several local steps, in a work folder of their own."""
Z1 = {1667: 10, 1250: 15}
"""S of the private runs with fewer users per round, as in Table 2."""
TRADES = (6.3, 7.9, 10, 12.6, 15.9, 20)
"""Values of S in Figures 4 and 8; sigma = 0.0006 S."""
TRADES_PER_LAYER = (7.9, 12.6, 20)
"""Values of S with the clip of each layer in Figure 4."""
TABLE_2 = ((15, 0.003), (10, 0.006), (15, 0.012))
"""S and sigma of the rows of Table 2."""
SEEDS = (1, 2, 3)


# ------------------------------------------------------------------------------------------------------------------- stores


def segments(source: Path, target: Path, words: int = WORDS) -> int:
    """Cut the text of each user into consecutive segments of `words` words, each of which becomes a user.

    Returns the number of segments.
    """
    import duckdb

    lines = duckdb.connect().execute(
        'SELECT "user", "text" FROM read_json(?, format = \'newline_delimited\') ORDER BY "user", "time"', [str(source)]
    )
    count, number, user, left = 0, 0, None, []
    with open(target, "w", encoding="utf-8") as file:
        for name, text in _rows(lines):
            if name != user:
                user, left, number = name, [], 0
            left += text.split()
            while len(left) >= words:
                row = {"user": f"{user}-{number}", "time": number, "text": " ".join(left[:words])}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                left, number, count = left[words:], number + 1, count + 1
    return count


def _rows(lines: Any) -> Iterator[tuple[str, str]]:
    """The rows of a DuckDB result, in batches."""
    while batch := lines.fetchmany(10_000):
        yield from batch


def prepare(data: Path, work: Path, corpora: Sequence[str]) -> None:
    """Prepare token stores with the registered options, unless they exist.

    Args:
        data: Folder of the corpora.
        work: Folder for the stores.
        corpora: Names of corpora, of `POPULATIONS`.
    """
    work.mkdir(parents=True, exist_ok=True)
    for name in corpora:
        if (work / name).exists():
            continue
        source = work / "blogs_64.jsonl"
        if name == "blogs_64":
            print(f"{segments(_file_of(data, 'blogs_1600'), source):,} segments", flush=True)
        else:
            source = _file_of(data, name)
        options = [*PREPARE, *CUT[name], "--out", str(work / name)]
        subprocess.run([sys.executable, "-m", "unheard", "prepare", str(source), *options], check=True)
        (work / "blogs_64.jsonl").unlink(missing_ok=True)


def _file_of(data: Path, name: str) -> Path:
    """The file of a corpus, compressed or not. Exits with a message if there is none."""
    files = [data / f"{name}.jsonl{suffix}" for suffix in (".zst", ".gz", "")]
    if existing := [file for file in files if file.exists()]:
        return existing[0]
    raise SystemExit(f"{data} has no {name}.jsonl.gz: build it with python -m reproduction.build_corpora {name}.")


# --------------------------------------------------------------------------------------------------------------------- runs


def run_tables(
    work: Path,
    corpus: str,
    users: int,
    rounds: int,
    norm: float | None = None,
    seed: int | None = None,
    *,
    clip: str = "flat",
    start: Path | None = None,
    scale: float = 1.0,
    **noise: float,
) -> dict[str, Any]:
    """The tables of a run file.

    Args:
        work: Folder with the stores.
        corpus: Name of the corpus.
        users: Users per round.
        rounds: Number of rounds.
        norm: S. None for the non-private baseline: fixed-size sampling, true average, no clip, no noise.
        seed: Seed of the run. None for noise from a secure generator.
        clip: Kind of clip.
        start: Folder of the run that this one starts from; None for none.
        scale: Factor on rounds and users; below 1 for tests only.
        noise: `noise_std` or `noise_multiplier`.
    """
    every, per_round = max(1, round(100 * scale)), max(4, round(users * scale))
    training = {"rounds": max(5, round(rounds * scale)), "init_seed": 0}
    training |= {"checkpoint_every": 5 * every, "keep_checkpoints": 1}
    training |= {} if start is None else {"init_from": str(start), "init_is_public": False}
    training |= {} if seed is None else {"reproducible_seed": seed}
    shared = common_tables(work / corpus, POPULATIONS[corpus], vocabulary_size=10_000) | {
        "evaluation": {"every": every, "max_tokens": 10_000_000},
        "training": training,
        "sampling": {"kind": "poisson", "users_per_round": per_round},
    }
    shared["model"] |= {"unit_norm": True, "keep_norm": False}
    if norm is not None:
        return shared | {"clip": {"kind": clip, "norm": float(norm)}, "noise": {"kind": "gaussian", **noise}}
    return shared | {
        "sampling": {"kind": "fixed_size", "users_per_round": per_round},
        "estimator": {"kind": "true_average"},
        "clip": {"kind": "none"},
        "noise": {"kind": "none"},
    }


def runs_of(step: str, work: Path, *, repetition: int = 1, scale: float = 1.0) -> dict[str, dict[str, Any]]:
    """The runs of one step.

    Args:
        step: One of `STEPS`, `MORE_STEPS` or `LONG_STEPS`.
        work: Folder with the stores and the chosen S.
        repetition: Number of the repetition, which is part of the name or the seed.
        scale: Factor on rounds and users; below 1 for tests only.

    Returns:
        The tables of each run by its name.
    """
    is_long = step in LONG_STEPS
    kind, _, size = step.removeprefix("long-").rpartition("-C")  # z1-C1250: kind z1 with 1,250 users per round
    suffix = "" if repetition == 1 else f"-repetition{repetition}"

    def run(users: int, rounds: int, *more: Any, corpus: str = "", **options: Any) -> dict[str, Any]:
        """The tables of a run of this step."""
        corpus = corpus or ("reviews_1600_200k" if is_long else "reviews_81")
        return run_tables(work, corpus, users, rounds, *more, scale=scale, **options)

    match kind or size:
        case "choose-S":
            return {f"S{n}": run(1000, 1000, n, 1, corpus="blogs_64", noise_std=n / 5000) for n in CANDIDATES}
        case "private":
            return {f"private{suffix}": run(5000, 5000, chosen_norm(work), noise_multiplier=1.0)}
        case "baseline":
            return {f"{step}-seed{repetition}": run(int(size), 5000, None, repetition)}
        case "C1250":
            return {f"S15-sigma0.012-C1250-seed{k}": run(1250, 3000, 15, k, noise_std=0.012) for k in SEEDS}
        case "z1":
            return {f"{step}{suffix}": run(int(size), 5000, Z1[int(size)], noise_multiplier=1.0)}
        case "trade-offs":
            pairs = [(norm, seed) for norm in TRADES for seed in SEEDS]
            return {f"trade-S{n:g}-seed{k}": run(100, 4885, n, k, noise_std=_traded(n)) for n, k in pairs}
        case "trade-offs-adjusted":
            return {
                f"then-S{norm:g}{label}-seed{seed}": run(
                    100,
                    6000,
                    norm,
                    seed,
                    clip=clip,
                    start=work / "runs" / f"trade-S20-seed{seed}",
                    noise_std=_traded(norm),
                )
                for seed in SEEDS
                for clip, label, norms in (("flat", "", TRADES), ("per_layer", "-per-layer", TRADES_PER_LAYER))
                for norm in norms
            }
        case "table-2":
            named = {f"baseline-seed{seed}": run(100, 5000, None, seed) for seed in SEEDS}
            for clip, sigma in TABLE_2:
                named |= {f"S{clip}-sigma{sigma:g}-seed{k}": run(100, 5000, clip, k, noise_std=sigma) for k in SEEDS}
            if is_long:
                return named
            norm = chosen_norm(work)
            return named | {f"estimate-seed{k}": run(100, 5000, norm, k, noise_std=norm / 5000) for k in SEEDS}
    raise SystemExit(f"There is no step {step}: choose from {', '.join((*STEPS, *MORE_STEPS, *LONG_STEPS))}.")


def _traded(norm: float) -> float:
    """sigma of the trade-off between noise and clip, adjusted or from the start: z = 0.06 with 100 users per round."""
    return round(0.0006 * norm, 6)


def chosen_norm(work: Path) -> float:
    """S by rule private-S. Exits with a message if it is not chosen yet."""
    file = work / "chosen_S.json"
    if not file.exists():
        raise SystemExit("S is not chosen yet: run the step choose-S first.")
    return float(json.loads(file.read_text())["S"])


def choose_norm(work: Path) -> dict[str, Any]:
    """Apply rule private-S: the S with the highest accuracy; of two equal ones the smaller.

    The choice is stored in `chosen_S.json`.
    """
    accuracies = {norm: smoothed(read_metrics(work / "runs" / f"S{norm}")) for norm in CANDIDATES}
    at = min(max(curve) for curve in accuracies.values())
    by_norm = {norm: curve[at] for norm, curve in accuracies.items()}
    best = max(by_norm, key=lambda norm: (by_norm[norm], -norm))
    result = {"S": best, "round": at, "accuracy_top1": {f"{norm}": value for norm, value in by_norm.items()}}
    (work / "chosen_S.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The evaluations of a run in order. If a round was evaluated twice, the later evaluation counts."""
    return RunFolder(folder).read_metrics()


def smoothed(rows: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Accuracy by round as the rules define it: the mean of an evaluation and the four before it."""
    values = formatting.smoothed([row["accuracy_top1"] for row in rows])
    return {row["round"]: value for row, value in zip(rows, values, strict=True)}


def run_step(
    step: str,
    work: Path,
    *,
    device: str,
    stop_after: float | None,
    scale: float,
    repetition: int,
    only: Sequence[str] = ("*",),
) -> bool:
    """Train the runs of one step side by side, or continue them.

    Args:
        step: One of `STEPS`.
        work: Folder of stores, ledgers and run folders.
        device: Device of the engine: `cuda` or `cpu`.
        stop_after: Seconds after which the runs stop; None means when they are complete.
        scale: Factor on rounds and users; below 1 for tests only.
        repetition: Number of the repetition.
        only: Patterns of names; other runs of the step are left for a later call.

    Returns:
        Whether these runs of the step are complete. They are then also measured.
    """
    from unheard import EngineChoice
    from unheard.training.loop import train_together
    from unheard.training.run import run_from_tables

    began = time.monotonic()
    origin = facts(device)  # fails here, not after the training, if the commit is unknown
    if scale == 1 and origin["commit"].endswith("-dirty"):
        raise SystemExit(
            "Runs are made from a clean commit (reproduction/rules.md): commit or remove the changes first."
        )
    wanted = {
        name: tables
        for name, tables in runs_of(step, work, repetition=repetition, scale=scale).items()
        if any(fnmatchcase(name, pattern) for pattern in only)
        and not is_measured(work / "runs" / name, tables["training"]["rounds"])
    }
    if not wanted:
        print(f"{step}: complete", flush=True)
        return True
    precision = "bfloat16" if device.startswith("cuda") else "float32"
    choice = EngineChoice(kind="stacked", device=device, precision=precision, users_at_once=None)
    folders = {name: work / "runs" / name for name in wanted}
    (work / "ledgers").mkdir(parents=True, exist_ok=True)
    runs = []
    for name, tables in wanted.items():
        # Each run has a ledger of its population of its own: the runs are experiments on one public corpus, and each
        # statement is about one run.
        privacy = tables["privacy"] | {"ledger": str(work / "ledgers" / f"{name}.jsonl")}
        runs.append((run_from_tables(tables | {"privacy": privacy})[0], folders[name]))
    rounds = max(tables["training"]["rounds"] for tables in wanted.values())
    users = sum(tables["sampling"]["users_per_round"] for tables in wanted.values())
    sitting = Sitting(step, began, users, folders, origin)
    with closing(train_together(runs, engine=choice, allow_no_privacy=True)) as reports:
        for number, report in reports:
            sitting.add(list(wanted)[number], report)
            # All runs have completed their round when the first report of a turn comes.
            if stop_after is not None and time.monotonic() - began >= stop_after:
                break
    sitting.write()
    is_complete = sitting.last >= rounds or sitting.first is None
    if is_complete:
        for folder in folders.values():
            measure(folder, device)
        if step == "choose-S":
            print(json.dumps(choose_norm(work)), flush=True)
    return is_complete


class Sitting:
    """What one process did on the runs of a step: rounds, seconds, users per second, and when each run was evaluated.

    It is written every ten seconds at evaluations, so that the record of a process that is killed is not lost.

    Args:
        step: The name of the step.
        began: When the process began, by `time.monotonic`.
        users: Users per round of all runs together.
        folders: The run folders, by the names of the runs.
        origin: Commit, device, version of torch, date.
    """

    def __init__(self, step: str, began: float, users: int, folders: dict[str, Path], origin: dict[str, Any]) -> None:
        self.step, self.began, self.users, self.folders, self.origin = step, began, users, folders, origin
        self.first: int | None = None
        self.last = 0
        self.marks: list[dict[str, Any]] = []
        self._written = began
        self._before: dict[str, str] | None = None

    def add(self, name: str, report: Any) -> None:
        """Take a report of a run into the record, and print its evaluation."""
        self.last = report.round
        if self.first is None:
            self.first = report.round - 1
        if report.metrics:
            elapsed = time.monotonic() - self.began
            self.marks.append({"run": name, "round": report.round, "seconds": round(elapsed, 3)})
            print(
                f"{name}: round {report.round}, {100 * report.metrics['accuracy_top1']:.2f} %, {elapsed:.0f} s",
                flush=True,
            )
            if time.monotonic() - self._written > 10:
                self.write()

    def write(self) -> None:
        """Write the record after those of earlier processes, in `sittings.jsonl` of each run."""
        if self.first is None:
            return
        files = {name: folder / "sittings.jsonl" for name, folder in self.folders.items()}
        self._written = time.monotonic()
        if self._before is None:
            self._before = {name: file.read_text() if file.exists() else "" for name, file in files.items()}
        seconds = time.monotonic() - self.began
        speed = round((self.last - self.first) * self.users / seconds, 1)
        record = {
            "step": self.step,
            "from_round": self.first,
            "to_round": self.last,
            "seconds": round(seconds, 3),
            "users_per_second": speed,
            "runs_side_by_side": len(self.folders),
        }
        for name, file in files.items():
            mine = [mark for mark in self.marks if mark["run"] == name]
            line = json.dumps(record | {"marks": mine} | self.origin)
            replace_file(file, f"{self._before[name]}{line}\n".encode())
        print(f"{self.step}: rounds {self.first} to {self.last}, {seconds:.1f} s, {speed:,} users/s", flush=True)


def is_measured(folder: Path, rounds: int) -> bool:
    """Whether a run has all its rounds and its last model was measured."""
    if not (folder / "facts.json").exists() or not (folder / "metrics.jsonl").exists():
        return False
    return read_metrics(folder)[-1]["round"] >= rounds


# ------------------------------------------------------------------------------------------------------------- command line


def main() -> None:
    """The command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)

    def verb(name: str, work: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
        """Add a subcommand and the function that it calls."""
        command = verbs.add_parser(name)
        command.set_defaults(work_on=work)
        return command

    named = verb("digest", lambda arguments: print(content_digest(arguments.store)))
    named.add_argument("store", type=Path)
    words = verb("counted", lambda arguments: counted(arguments.store, arguments.out))
    words.add_argument("store", type=Path)
    words.add_argument("--out", type=Path, required=True)
    stores = verb("prepare", lambda arguments: prepare(arguments.data, arguments.work.resolve(), arguments.corpus))
    stores.add_argument("--data", type=Path, required=True)
    stores.add_argument("--work", type=Path, required=True)
    stores.add_argument("--corpus", nargs="+", choices=tuple(POPULATIONS), default=["blogs_64", "reviews_81"])
    for name in ("run", "all"):
        run = verb(name, _run)
        if name == "run":
            run.add_argument("steps", nargs="+", choices=(*STEPS, *MORE_STEPS, *LONG_STEPS))
            run.add_argument("--only", nargs="+", default=["*"], help="names of runs, such as '*-seed1'")
        run.add_argument("--work", type=Path, required=True)
        run.add_argument("--device", default="cuda")
        run.add_argument("--stop-after", type=float, help="seconds")
        run.add_argument("--stop-at", type=float, help="the same as a time, in seconds since 1970")
        run.add_argument("--repetition", type=int, default=1)
        run.add_argument("--scale", type=float, default=1.0, help="shrinks rounds and users; for tests only")
    read = verb("measure", _measure)
    read.add_argument("folders", type=Path, nargs="+", help="run folders, complete or not")
    read.add_argument("--device", default="cuda")
    back = verb("restore", lambda arguments: restore(arguments.kept, arguments.work))
    back.add_argument("kept", type=Path, nargs="+", help="result folders with checkpoints/, or the files of a bundle")
    back.add_argument("--work", type=Path, required=True)
    got = verb("collect", _collect)
    got.add_argument("--work", type=Path, required=True)
    either = got.add_mutually_exclusive_group(required=True)
    either.add_argument("--out", type=Path, help="result files are copied to this folder")
    either.add_argument(
        "--bundle", type=Path, help="result files and the state go into FILE.tar.gz, in parts of 15 MiB"
    )
    open_ = verb("unpack", lambda arguments: print(*unpack(arguments.files, arguments.out), sep="\n"))
    open_.add_argument("files", type=Path, nargs="+")
    open_.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.work_on(arguments)


def _collect(arguments: argparse.Namespace) -> None:
    """Write the results to where the options say."""
    work = arguments.work.resolve()
    if arguments.bundle is None:
        collect(work, arguments.out)
    else:
        for file in bundle(work, arguments.bundle):
            print(f"{file}: {file.stat().st_size:,} bytes", flush=True)


def _measure(arguments: argparse.Namespace) -> None:
    """Measure several run folders."""
    for folder in arguments.folders:
        measure(folder, arguments.device)


def _run(arguments: argparse.Namespace) -> None:
    """Run the given steps, or all of them, within the time limit."""
    until = arguments.stop_at if arguments.stop_after is None else time.time() + arguments.stop_after
    for step in getattr(arguments, "steps", STEPS):
        left = None if until is None else until - time.time()
        if left is not None and left <= 0:
            break
        run_step(
            step,
            arguments.work.resolve(),
            device=arguments.device,
            stop_after=left,
            scale=arguments.scale,
            repetition=arguments.repetition,
            only=getattr(arguments, "only", ["*"]),
        )


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
