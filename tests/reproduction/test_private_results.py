"""Verdicts of the private run and of Table 2 on made-up results: each rule can hold, fail and stay open."""

import json
from pathlib import Path

import numpy as np
import pytest
from reproduction.bootstrap import difference_interval, half_width
from reproduction.private_run import choose_norm, runs_of, smoothed

from reproduction import private_results

USERS, TARGETS = 4000, 60


def make_run(folder: Path, at: dict[int, float], rounds: int = 5000) -> None:
    """A run whose accuracy (in percent) goes linearly through some points; hits per user follow the last."""
    folder.mkdir(parents=True)
    marks = range(100, rounds + 1, 100)
    values = np.interp(marks, list(at), list(at.values())) / 100
    lines = [json.dumps({"round": r, "accuracy_top1": v}) for r, v in zip(marks, values, strict=True)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    rng = np.random.default_rng(0)  # the same users for all runs
    ease_U = rng.normal(0, 0.02, USERS)
    hits_U = np.round(TARGETS * (values[-1] + ease_U)).clip(0).astype(int)
    np.savez(folder / "per_user.npz", targets=np.full(USERS, TARGETS), hits=hits_U)


def flat(value: float) -> dict[int, float]:
    return {100: value, 5000: value}


def make_table_2(place: Path, costs: tuple[float, float, float], early: tuple[float, float, float] = (0, 0, 0)) -> None:
    for seed in (1, 2, 3):
        shift = 0.01 * seed
        make_run(place / f"baseline-seed{seed}", flat(25 + shift))
        names = ("S15-sigma0.003", "S10-sigma0.006", "S15-sigma0.012")
        for name, cost, before in zip(names, costs, early, strict=True):
            points = {
                100: 25 - before + shift,
                1000: 25 - before + shift,
                1500: 25 - cost + shift,
                5000: 25 - cost + shift,
            }
            make_run(place / f"{name}-seed{seed}", points)


def outcome(rule: str, place: Path) -> str:
    judge, needed = private_results.JUDGES[rule]
    return "cannot tell" if private_results.missing(needed, place) else judge(place).outcome


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ((0.1, 0.5, 1.2), "held"),
        ((0.1, 0.5, 3.0), "did not hold"),
        ((0.1, 0.83, 1.2), "cannot tell"),
        ((0.6, 0.3, 1.2), "did not hold"),
    ],
)
def test_table_2_can_hold_fail_and_stay_open(tmp_path, costs, expected):
    make_table_2(tmp_path, costs)
    assert outcome("table-2-cost", tmp_path) == expected


@pytest.mark.parametrize(("cost", "expected"), [(0.0, "held"), (0.25, "cannot tell"), (0.9, "did not hold")])
def test_nearly_matching_can_hold_fail_and_stay_open(tmp_path, cost, expected):
    make_table_2(tmp_path, (cost, 1.0, 2.0))
    assert outcome("figure-1-match", tmp_path) == expected


def test_noise_that_costs_less_later_contradicts_the_paper(tmp_path):
    make_table_2(tmp_path / "grows", (0.6, 1.0, 2.0), early=(0.1, 0.2, 0.5))
    make_table_2(tmp_path / "shrinks", (0.1, 1.0, 2.0), early=(0.9, 0.2, 0.5))
    assert outcome("figure-1-later", tmp_path / "grows") == "held"
    assert outcome("figure-1-later", tmp_path / "shrinks") == "did not hold"


@pytest.mark.parametrize(("cost", "expected"), [(0.0, "held"), (0.3, "cannot tell"), (1.5, "did not hold")])
def test_one_repetition_of_the_private_run_decides_only_far_from_the_threshold(tmp_path, cost, expected):
    make_run(tmp_path / "baseline-C5000-seed1", flat(25))
    make_run(tmp_path / "private", flat(25 - cost))
    assert outcome("private-run", tmp_path) == expected


def test_a_run_that_stopped_early_decides_nothing(tmp_path):
    make_run(tmp_path / "baseline-C5000-seed1", flat(25))
    make_run(tmp_path / "private", flat(20), rounds=3400)
    assert outcome("private-run", tmp_path) == "cannot tell"


@pytest.mark.parametrize(("end", "expected"), [(25.5, "held"), (24.0, "did not hold")])
def test_rounds_of_the_private_run(tmp_path, end, expected):
    make_run(tmp_path / "private", {100: 15, 5000: end})
    for seed in (1, 2, 3):
        make_run(tmp_path / f"baseline-seed{seed}", {100: 15, 4120: 24.9, 5000: 24.9})
    assert outcome("private-rounds", tmp_path) == expected


@pytest.mark.parametrize(("apart", "expected"), [(0.0, "held"), (1.5, "did not hold")])
def test_estimates_and_figure_7(tmp_path, apart, expected):
    make_run(tmp_path / "private", flat(25))
    for seed in (1, 2, 3):
        make_run(tmp_path / f"estimate-seed{seed}", flat(25 + apart))
        make_run(tmp_path / f"S15-sigma0.012-seed{seed}", flat(20))
        make_run(tmp_path / f"S15-sigma0.012-C1250-seed{seed}", flat(20 + apart), rounds=3000)
    assert outcome("private-estimate", tmp_path) == expected
    assert outcome("figure-7", tmp_path) == expected


def test_the_bootstrap_pairs_users(tmp_path):
    make_run(tmp_path / "one", flat(25))
    make_run(tmp_path / "two", flat(24))
    low, high = difference_interval([tmp_path / "one"], [tmp_path / "two"])
    assert low < 0.01 < high or (low > 0.005 and high < 0.015)
    assert (half_width([tmp_path / "one"], [tmp_path / "one"]) or 0.0) == 0.0
    (tmp_path / "two" / "per_user.npz").unlink()
    assert half_width([tmp_path / "one"], [tmp_path / "two"]) is None


def test_accuracy_is_the_mean_of_five_evaluations():
    rows = [{"round": r, "accuracy_top1": float(r)} for r in (100, 200, 300, 400, 500, 600)]
    assert smoothed(rows)[600] == 400.0
    assert smoothed(rows)[200] == 150.0


def test_the_best_S_is_chosen_and_the_smaller_of_two_equal_ones(tmp_path):
    for norm, value in {2: 12, 4: 13, 8: 15, 12: 15, 16: 14}.items():
        make_run(tmp_path / "runs" / f"S{norm}", flat(value), rounds=1000)
    assert choose_norm(tmp_path)["S"] == 8
    private = runs_of("private", tmp_path)["private"]
    assert private["clip"]["norm"] == 8.0
    assert "reproducible_seed" not in private["training"]  # secure noise


def test_the_published_results_give_the_published_verdicts():
    made = private_results.verdicts()
    assert made["private-S"].outcome == "chosen: S = 8"
    assert made["private-run"].outcome == "cannot tell"
    assert made["table-1-digits"].outcome == "held"
