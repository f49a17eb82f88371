"""Invented results of every run, in which the paper's conclusions hold. For tests only; nothing is trained."""

import math
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from reproduction.recipe import PaperRun, distinct
from reproduction.recipes import RECIPES
from reproduction.results import ResultSet, RunResult

RUNS = {run.name: run for run in distinct(RECIPES.values())}
TOP = 0.215


def world(*, rounds: int | None = None, without: Iterable[str] = (), only: Iterable[str] | None = None) -> ResultSet:
    """Return invented results of every run of every recipe, limited to some rounds or without some runs."""
    gone, kept = set(without), None if only is None else set(only)
    made = {
        name: result(run, min(run.rounds, rounds or run.rounds))
        for name, run in RUNS.items()
        if name not in gone and (kept is None or name in kept)
    }
    return ResultSet("made-up" if made else "", made)


def moved(results: ResultSet, points: Mapping[str, float]) -> ResultSet:
    """Return the results with the accuracy of some runs changed by the given points, from the first round on."""
    runs = dict(results.runs)
    for name, by in points.items():
        rows = [{**row, "accuracy_top1": row["accuracy_top1"] + by / 100} for row in runs[name].evaluations]
        runs[name] = replace(runs[name], evaluations=rows)
    return ResultSet(results.corpus, runs)


def changed(results: ResultSet, name: str, **fields: Any) -> ResultSet:
    """Return the results with other fields of one run."""
    return ResultSet(results.corpus, {**results.runs, name: replace(results.runs[name], **fields)})


def result(run: PaperRun, rounds: int) -> RunResult:
    every = 20 if rounds >= 20 else 1
    evaluations = []
    for at in sorted({*range(every, rounds + 1, every), rounds}):
        accuracy = accuracy_of(run, at)
        evaluations.append({"round": at, "accuracy_top1": accuracy, "loss": 5.0, "perplexity": 150.0})
    last = evaluations[-1]["accuracy_top1"]
    is_private = "sigma" in run.name or "adaptive" in run.name
    return RunResult(
        name=run.name,
        corpus="made-up",
        seed=run.seed,
        rounds=rounds,
        planned=run.rounds,
        settings={"sampling": {"users_per_round": run.users}},
        evaluations=evaluations,
        head_words={head: _histogram(last, int(head)) for head in ("10", "50", "100")},
        accuracy_elsewhere={"main": {"accuracy_top1": 0.185}} if run.corpus == "other" else {},
        parameters=2_306_144 if run.name.startswith("untied") else 1_346_144,
        epsilon={"moments": 41.0, "rdp": 38.5, "pld": 37.25, "delta": 3.1e-5}
        if is_private
        else {"moments": None, "delta": 3.1e-5},
        population=763_430 if run.corpus == "synthetic" else 4_500,
        seconds=rounds * run.users / 4000,
        users_per_second=4000.0,
        device="a made-up device",
        date="2026-01-02",
        commit="0123456789abcdef",
    )


def accuracy_of(run: PaperRun, at: int) -> float:
    """Return the accuracy after a round: a saturating curve, minus the cost of noise and clip, plus a small random term."""
    name, pace, top, clip_weight, noise_weight = run.name, 1.0, TOP, 1.0, 1.0
    late = 1 - math.exp(-at / 1500)
    if name.startswith("then-"):
        at, late, clip_weight, noise_weight = at + 4885, 1.0, 0.5, 1.5
    if name.startswith("after-public-"):
        at += 800
    if name.startswith("fedsgd-"):
        pace, clip_weight, noise_weight = 1 / 6, 0.05, 3.0
    if name.startswith("free-norm-"):
        pace = 0.5
    extra = {"20k-": 0.3, "30k-": 0.4, "untied-": 0.3, "gru-": -0.3, "characters-": 28.0}
    top += sum(by / 100 for prefix, by in extra.items() if name.startswith(prefix))
    top += {10: -1.5, 30: -0.6, 300: 0.3, 1000: 0.5, 1250: 0.1, 5000: 0.1}.get(run.users, 0.0) / 100
    norm, sigma = _number(name, r"-S([\d.]+)"), _number(name, r"sigma([\d.]+)")
    if "adaptive" in name:
        norm, sigma = 10.0, 0.006
    if "penalty" in name:
        top -= 0.001
    loss = 0.0
    if norm is not None:
        loss += clip_weight * 0.003 * (10 / norm) ** 1.7
    if sigma is not None:
        loss += noise_weight * 0.009 * (sigma / 0.012) ** 1.3 * late
    learned = 1 - 0.35 * math.exp(-at * pace / 80) - 0.15 * math.exp(-at * pace / 700)
    chance = zlib.crc32(f"{name} {at // 100}".encode()) % 1000 / 1000 - 0.5
    return max(0.01, top * learned - loss) + chance * 0.0004


def _number(text: str, pattern: str) -> float | None:
    results = re.search(pattern, text)
    return None if results is None else float(results.group(1).rstrip("."))


def _histogram(accuracy: float, head: int) -> list[int]:
    """Return a binomial histogram of head words, whose mean decreases with accuracy: a worse model suggests more of them."""
    share = min(0.95, {10: 0.30, 50: 0.55, 100: 0.65}[head] + 2 * (TOP - accuracy))
    return [round(10_000 * math.comb(10, i) * share**i * (1 - share) ** (10 - i)) for i in range(11)]
