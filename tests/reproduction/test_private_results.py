"""Verdicts about the private run and Table 2 on invented results: each rule can hold, fail, or stay undecided."""

import functools
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from reproduction.bootstrap import difference_interval, half_width
from reproduction.measures import counted, hits_of
from reproduction.private_run import choose_norm, is_measured, read_metrics, runs_of, smoothed

from reproduction import bootstrap, measures, private_report, private_results, private_run, private_tables
from unheard import TiedLSTM
from unheard.corpus.store import TokenStore, write_store
from unheard.corpus.vocabulary import SPECIALS, Vocabulary
from unheard.errors import LedgerError, RunFolderError
from unheard.evaluation.measures import score
from unheard.evaluation.next_word import evaluate
from unheard.privacy.accountants import epsilon
from unheard.privacy.events import PoissonGaussian
from unheard.privacy.ledger import FORMAT, seal
from unheard.updates.user_update import User

USERS, TARGETS = 4000, 60


@pytest.fixture(autouse=True)
def few_resamples(request, monkeypatch):
    """Use a tenth of the resamples for intervals of invented runs, which are in a temporary folder."""
    if "tmp_path" in request.fixturenames:
        monkeypatch.setattr(bootstrap, "RESAMPLES", 200)


@functools.cache
def ledger_of(rounds: Sequence[int], noise_multiplier: float) -> bytes:
    """Return the content of a ledger with a charge for each round."""
    event = {"kind": "poisson_gaussian", "sampling_prob": 5000 / 750_947, "noise_multiplier": noise_multiplier}
    lines, head = [], ""
    for record in ({"ledger": FORMAT, "facts": {"delta": 3.4e-7}}, *({"round": r, "event": event} for r in rounds)):
        line, head = seal(record, head)
        lines.append(line)
    return b"".join(lines)


def write_ledger(folder: Path, rounds: Sequence[int], noise_multiplier: float = 1.0) -> None:
    (folder / "ledger.jsonl").write_bytes(ledger_of(rounds, noise_multiplier))


def make_run(folder: Path, at: dict[int, float], rounds: int = 5000) -> None:
    """Write a run whose accuracy (in percent) is linear between some points. Hits per user match the last accuracy."""
    folder.mkdir(parents=True)
    marks = [*range(100, rounds, 100), rounds]
    values = np.interp(marks, list(at), list(at.values())) / 100
    lines = [json.dumps({"round": r, "accuracy_top1": v}) for r, v in zip(marks, values, strict=True)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    rng = np.random.default_rng(0)  # the same users for all runs
    ease_U = rng.normal(0, 0.02, USERS)
    hits_U = np.round(TARGETS * (values[-1] + ease_U)).clip(0).astype(int)
    targets_U = np.full(USERS, TARGETS)
    more = {"words": targets_U, "word_hits": hits_U, "plain": targets_U, "plain_hits": hits_U}
    np.savez(folder / "per_user.npz", targets=targets_U, hits=hits_U, **more)  # pyright: ignore[reportArgumentType]
    if folder.name.startswith(("private", "z1", "epsilon")):
        write_ledger(folder, range(rounds))


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


@pytest.mark.parametrize(("early", "expected"), [(26.0, "held"), (22.0, "did not hold"), (20.0, "did not hold")])
def test_a_public_start_can_hold_and_fail(tmp_path, early, expected):
    make_run(tmp_path / "private", {100: 15.0, 5000: 25.0})
    make_run(tmp_path / "public-start", {100: 18.0, 3000: early, 5000: early + 3.3})
    assert outcome("expect-public-start", tmp_path) == expected
    (tmp_path / "chosen_S.json").write_text('{"S": 8}')
    run = runs_of("public-start", tmp_path)["public-start"]
    assert run["training"]["init_from"] == str(tmp_path / "runs" / "public-seed1")
    assert run["training"]["init_is_public"]
    assert runs_of("public", tmp_path)["public-seed1"]["corpus"]["path"] == str(tmp_path / "blogs_64")


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


def test_a_repetition_in_progress_is_a_missing_repetition(tmp_path):
    """It does not count, and does not prevent a decision by complete runs. With three of these it is not preliminary."""
    for number in (1, 2, 3):
        make_run(tmp_path / f"baseline-C5000-seed{number}", flat(25 + 0.04 * number))
        suffix = "" if number == 1 else f"-repetition{number}"
        make_run(tmp_path / f"private{suffix}", flat(24 + 0.04 * number), rounds=5000 if number < 3 else 3400)
    (tmp_path / "private-repetition3" / "per_user.npz").unlink()
    two = private_results.private_run(tmp_path)
    assert two.outcome == "did not hold"
    assert "-1.02 points" in two.reason  # 24.06 against 25.08
    assert "preliminary" in two.reason
    shutil.rmtree(tmp_path / "private-repetition3")
    make_run(tmp_path / "private-repetition3", flat(24.12))
    three = private_results.private_run(tmp_path)
    assert "-1.00 points" in three.reason
    assert "preliminary" not in three.reason


def test_epsilon_is_that_of_the_rounds_that_were_charged(tmp_path):
    """It includes rounds that were repeated after a stop."""
    make_run(tmp_path / "private", flat(25))
    once = private_results.spent([tmp_path / "private"], 3.4e-7, "rdp")
    write_ledger(tmp_path / "private", (*range(5000), *range(4500, 5000)))
    again = private_results.spent([tmp_path / "private"], 3.4e-7, "rdp")
    assert private_results.charges(tmp_path / "private")[0][1] == 5500
    assert again > once == pytest.approx(3.44, abs=0.01)


def test_a_damaged_ledger_or_statement_gives_no_published_epsilon(tmp_path):
    """Each damage would make the epsilon smaller."""
    folder = tmp_path / "private"
    make_run(folder, flat(25))
    spent = {by: private_results.spent([folder], 3.4e-7, by) for by in ("pld", "rdp")}
    statement = {"epsilon": spent, "delta": 3.4e-7}
    (folder / "statement.json").write_text(json.dumps(statement))
    assert private_results.checked_statement(folder) == statement
    smaller = {**statement, "epsilon": {**spent, "pld": spent["pld"] - 0.01}}
    for changed in (
        smaller,
        {**statement, "delta": 1e-5},
        {"delta": 3.4e-7},
        [],
        {**statement, "epsilon": {"pld": "1"}},
    ):
        (folder / "statement.json").write_text(json.dumps(changed))
        with pytest.raises(RunFolderError, match="not those of the ledger"):
            private_results.checked_statement(folder)
    whole = (folder / "ledger.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    shortened = [*lines[:2001]], [*lines[:1000], *lines[1001:]], [lines[0]], []
    edited = whole.replace(b'"noise_multiplier":1.0', b'"noise_multiplier":2.0', 1)
    assert edited != whole
    for content in (*map(b"".join, shortened), edited):
        (folder / "ledger.jsonl").write_bytes(content)
        with pytest.raises(LedgerError):
            private_results.spent([folder], 3.4e-7, "pld")
    (folder / "ledger.jsonl").unlink()
    with pytest.raises(LedgerError):
        private_results.charges(folder)


def test_a_ledger_of_another_run_gives_no_published_epsilon(tmp_path):
    """The model records the end of its own ledger."""
    folder = tmp_path / "private"
    shutil.copytree(private_results.REVIEWS / "private", folder)
    assert private_results.charges(folder)[0][1] == 5000
    shutil.copyfile(private_results.REVIEWS / "z1-C1250" / "ledger.jsonl", folder / "ledger.jsonl")
    with pytest.raises(LedgerError, match="shortened or replaced"):
        private_results.charges(folder)


def test_figures_4_and_8_are_shown_when_their_runs_exist(tmp_path):
    assert private_tables.trade_offs_tables(tmp_path) == []
    for seed in (1, 2, 3):
        make_run(tmp_path / f"trade-S7.9-seed{seed}", flat(20 + seed), rounds=4000)
        make_run(tmp_path / f"then-S12.6-per-layer-seed{seed}", flat(21), rounds=6000)
    early, later = private_tables.trade_offs_tables(tmp_path)
    assert "0.00013" in early.note
    assert early.rows == [
        (
            "S = 7.9, σ = 0.00474",
            "22.00 ± 1.00 %",
            "22.00 ± 1.00 %",
            "22.00 ± 1.00 %",
            "22.00 ± 1.00 %",
            "stopped at 4,000",
        )
    ]
    assert later.rows == [("S = 12.6, per layer", *["21.00 ± 0.00 %"] * 4)]


def make_trades(place: Path, levels: dict[float, float], then: dict[float, float], apart: float = 0.02) -> None:
    """Write runs of Figures 8 and 4 with these accuracies, three seeds each."""
    for seed in (1, 2, 3):
        for prefix, rounds, at in (("trade", 4885, levels), ("then", 6000, then)):
            for norm, level in at.items():
                make_run(place / f"{prefix}-S{norm:g}-seed{seed}", flat(level + apart * seed), rounds=rounds)


@pytest.mark.parametrize(
    ("at_10", "at_20", "later", "expected"),
    [
        (22.0, 20.0, 21.0, ("held", "held")),
        (21.0, 20.0, 21.0, ("did not hold", "held")),  # S = 10 is a point below the best
        (22.0, 21.95, 23.5, ("cannot tell", "did not hold")),  # all six close together; S = 10 is better later
        (21.8, 20.0, 22.49, ("cannot tell", "cannot tell")),  # 0.25 points below the best; equal later
    ],
)
def test_figures_8_and_4_can_hold_fail_and_stay_open(tmp_path, at_10, at_20, later, expected):
    levels = {6.3: 22.0, 7.9: 22.05, 10: at_10, 12.6: 22.0, 15.9: 21.95, 20: at_20}
    make_trades(tmp_path, levels, {7.9: 22.5, 10: later, 12.6: 21.0, 20: 20.0})
    judges = (private_results.figure_8_early, private_results.figure_4, private_results.figure_8_seeds)
    assert tuple(judge(tmp_path).outcome for judge in judges) == (*expected, "held")


def test_three_seeds_of_figure_8_may_be_far_apart_or_missing(tmp_path):
    make_trades(tmp_path, {20: 20.0}, {}, apart=0.2)
    assert outcome_of_seeds(tmp_path) == "did not hold"
    shutil.rmtree(tmp_path / "trade-S20-seed3")
    assert outcome_of_seeds(tmp_path) == "cannot tell"


def test_rules_on_longer_reviews_are_judged_when_they_have_runs(tmp_path):
    assert "figure-4" not in private_results.verdicts(private_results.REVIEWS, tmp_path)
    make_trades(tmp_path, {}, {7.9: 22.5, 10: 22.0}, apart=0.0)
    judged = private_results.verdicts(private_results.REVIEWS, tmp_path)
    assert judged["figure-4"].reason == "Missing: then-S12.6 at round 6,000, then-S20 at round 6,000."


def make_seeds(place: Path, name: str, at: dict[int, float], seeds: int = 3) -> None:
    """Write the seeds of a sweep of 3,000 rounds, which are 0.02 points apart."""
    for seed in range(1, seeds + 1):
        make_run(place / f"{name}-seed{seed}", {r: v + 0.02 * seed for r, v in at.items()}, rounds=3000)


@pytest.mark.parametrize(
    ("free", "noised", "expected"),
    [  # accuracy at rounds 100 and 3,000: without noise; with sigma = 0.012, 0.024 and 0.2
        ((10.0, 20.0), ((10.0, 19.8), (10.0, 19.0), (3.0, 5.0)), ("held", "held", "held")),
        ((10.0, 20.0), ((10.0, 19.8), (9.0, 19.2), (3.0, 5.0)), ("did not hold", "did not hold", "held")),
        ((10.0, 20.0), ((10.0, 19.0), (10.0, 18.0), (8.0, 15.0)), ("held", "did not hold", "did not hold")),
        ((10.0, 20.0), ((10.0, 19.8), (9.75, 19.8), (8.0, 10.0)), ("cannot tell", "did not hold", "cannot tell")),
        ((4.0, 20.0), ((4.0, 19.8), (4.0, 19.0), (3.0, 5.0)), ("cannot tell", "cannot tell", "held")),
    ],
)
def test_figure_3_can_hold_fail_and_stay_open(tmp_path, free, noised, expected):
    for name, (early, late) in zip(("", "-sigma0.012", "-sigma0.024", "-sigma0.2"), (free, *noised), strict=True):
        make_seeds(tmp_path, f"flat-S20{name}", {100: early, 500: early, 2500: late, 3000: late})
    judges = (private_results.figure_3_early, private_results.figure_3_late, private_results.figure_3_destroyed)
    assert tuple(judge(tmp_path).outcome for judge in judges) == expected


@pytest.mark.parametrize(
    ("early", "late", "expected"),
    [(10.0, 20.0, "held"), (10.6, 20.0, "did not hold"), (10.0, 21.0, "did not hold"), (10.0, 20.25, "cannot tell")],
)
def test_figure_5_can_hold_fail_and_stay_open(tmp_path, early, late, expected):
    for number, name in enumerate(private_results.ESTIMATORS):
        levels = (early, late) if number == 2 else (10.0, 20.0)
        make_seeds(tmp_path, name.removesuffix("-seed"), {100: 8.0, 110: levels[0], 900: levels[0], 1000: levels[1]})
    assert private_results.figure_5(tmp_path).outcome == expected


@pytest.mark.parametrize(
    ("early", "late", "seeds", "expected"),
    [
        (9.9, 19.8, 3, "held"),
        (9.0, 19.8, 3, "did not hold"),
        (9.9, 19.0, 1, "did not hold"),
        (9.9, 19.6, 1, "cannot tell"),
    ],
)
def test_figure_2_can_hold_fail_and_stay_open(tmp_path, early, late, seeds, expected):
    """The worst of six clips decides. With one seed, only a loss far from the threshold does, as a preliminary verdict."""
    make_seeds(tmp_path, "variable-true-average", {100: 10.0, 500: 10.0, 1000: 20.0})
    for number, name in enumerate(private_results.CLIPPED):
        levels = (early, late) if number == 4 else (10.0, 20.0)
        make_seeds(tmp_path, name.removesuffix("-seed"), {100: levels[0], 500: levels[0], 1000: levels[1]}, seeds)
    judged = private_results.figure_2(tmp_path)
    assert judged.outcome == expected
    assert ("preliminary" in judged.reason) is (seeds == 1)


@pytest.mark.parametrize(
    ("ten", "thousand", "expected"),
    [
        (18.0, 20.5, "held"),
        (19.0, 22.0, "did not hold"),  # the second gain is larger
        (18.0, 19.0, "did not hold"),  # 1,000 users per round are worse than 100
        (20.5, 20.0, "did not hold"),  # the first gain is negative
        (19.0, 21.0, "cannot tell"),
        (4.0, 20.5, "cannot tell"),
    ],
)
def test_figure_6_can_hold_fail_and_stay_open(tmp_path, ten, thousand, expected):
    for name, value in (("baseline-C10", ten), ("baseline", 20.0), ("baseline-C1000", thousand)):
        make_seeds(tmp_path, name, {100: value, 3000: value})
    assert private_results.figure_6(tmp_path).outcome == expected
    (table,) = private_tables.figure_6_table(tmp_path)
    assert [row[0] for row in table.rows] == ["10 users per round", "100 users per round", "1,000 users per round"]


def make_fedsgd(place: Path, best: float, avg_at_2: float, early: float, seeds: int = 3) -> None:
    """Write the runs of Figures 9 and 10 without noise: FedSGD ends at 17 % with S = 2, FedAvg at 19 % with S = 20.

    Args:
        place: Folder of the runs.
        best: Accuracy of FedSGD with S = 5.
        avg_at_2: Accuracy of FedAvg with S = 2.
        early: Accuracy of FedAvg with S = 20 at round 1,000.
        seeds: Number of seeds of FedSGD.
    """
    for norm, value in ((0.5, 15.0), (1, 16.0), (2, 17.0), (5, best), (20, 17.0)):
        make_seeds(place, f"fedsgd-flat-S{norm:g}", {100: 5.0, 2500: value, 3000: value}, seeds)
    make_seeds(place, "flat-S2", {100: 5.0, 2500: avg_at_2, 3000: avg_at_2})
    make_seeds(place, "flat-S20", {100: 5.0, 1000: early, 2500: 19.0, 3000: 19.0})


@pytest.mark.parametrize(
    ("best", "avg_at_2", "early", "seeds", "expected"),
    [
        (17.05, 13.0, 18.0, 3, ("held", "held")),
        (18.0, 13.0, 18.0, 3, ("did not hold", "held")),
        (17.25, 13.0, 18.0, 3, ("cannot tell", "held")),
        (17.05, 19.0, 10.0, 3, ("did not hold", "did not hold")),
        (17.05, 13.0, 18.0, 2, ("cannot tell", "cannot tell")),  # a seed of FedSGD is missing
        (17.05, 13.0, 16.68, 3, ("held", "cannot tell")),  # single seeds lie on both sides of 2
    ],
)
def test_figure_9_can_hold_fail_and_stay_open(tmp_path, best, avg_at_2, early, seeds, expected):
    make_fedsgd(tmp_path, best, avg_at_2, early, seeds)
    judges = (private_results.figure_9_clip, private_results.figure_9_rounds)
    assert tuple(judge(tmp_path).outcome for judge in judges) == expected
    judged = private_results.verdicts(private_results.REVIEWS, private_results.LONG, tmp_path)
    assert judged["figure-9-clip"].outcome == expected[0]
    assert judged["figure-10"].reason.startswith("Missing: flat-S20-sigma0.006 at round 3,000")
    (table,) = private_tables.fedsgd_tables(tmp_path)
    assert [row[0] for row in table.rows] == [
        *(f"FedSGD, S = {n}" for n in ("0.5", 1, 2, 5, 20)),
        "FedAvg, S = 2",
        "FedAvg, S = 20",
    ]


@pytest.mark.parametrize(
    ("sgd", "avg", "expected"),
    [
        ((15.0, 9.0), (18.8, 17.0), "held"),
        ((15.0, 16.0), (18.8, 14.0), "did not hold"),
        ((15.0, 9.0), (16.75, 17.0), "cannot tell"),
    ],
)
def test_figure_10_can_hold_fail_and_stay_open(tmp_path, sgd, avg, expected):
    """Each share lost is relative to the accuracy of the same algorithm without noise."""
    make_fedsgd(tmp_path, 17.0, 13.0, 18.0)
    for prefix, values in (("fedsgd-", sgd), ("", avg)):
        for sigma, value in zip(("0.006", "0.024"), values, strict=True):
            make_seeds(tmp_path, f"{prefix}flat-S20-sigma{sigma}", {100: 5.0, 2500: value, 3000: value})
    judged = private_results.verdicts(private_results.REVIEWS, private_results.LONG, tmp_path)["figure-10"]
    assert judged.outcome == expected
    lost = 100 * (mean_end(avg[0]) / mean_end(19.0) - mean_end(sgd[0]) / mean_end(17.0))
    assert f"sigma = 0.006: FedSGD loses {lost:+.1f} points" in judged.reason


def mean_end(value: float) -> float:
    """Return the value plus the mean shift of the three seeds of `make_seeds`."""
    return value + 0.04


def test_steps_on_blogs_are_those_of_the_rules(tmp_path):
    clips, noise = (runs_of(step, tmp_path) for step in ("fedsgd-clipping", "fedsgd-noise"))
    assert (len(clips), len(noise)) == (21, 24)
    assert not clips.keys() & noise.keys()
    for name, run in (clips | noise).items():
        is_fedsgd = name.startswith("fedsgd")
        assert run["corpus"]["path"] == str(tmp_path / "blogs_1600")
        assert run["privacy"]["population"] == 10_229
        assert run["update"]["kind"] == ("fedsgd" if is_fedsgd else "fedavg")
        assert run["sampling"]["users_per_round"] == (50 if is_fedsgd else 100)
        assert (run["training"]["rounds"], run["evaluation"]["every"]) == (3000, 100)
    needed = {name for _, needs in private_results.BLOGS_JUDGES.values() for name in needs}
    runs = {name: run for step in private_run.BLOGS_STEPS for name, run in runs_of(step, tmp_path).items()}
    assert needed <= {name.removesuffix("1") for name in runs}
    assert runs["characters-flat-S15-seed2"]["corpus"]["path"] == str(tmp_path / "blogs_1600_characters")
    assert "vocabulary_size" not in runs["characters-flat-S15-seed2"]["model"]
    assert runs["gru-baseline-seed1"]["model"]["kind"] == "tied_gru"


@pytest.mark.parametrize(
    ("gain", "cost", "expected"),
    [(0.5, 0.1, ("held", "held")), (2.0, 0.1, ("did not hold", "held")), (0.5, 0.8, ("held", "did not hold")),
     (1.0, 0.25, ("cannot tell", "cannot tell"))],
)  # fmt: skip
def test_rules_on_dictionaries_can_hold_fail_and_stay_open(tmp_path, gain, cost, expected):
    """The gain of 30,000 words decides figure-11-gain, and the largest additional cost figure-11-clip and figure-12."""
    names = ["variable-true-average", *(f"flat-S{norm}" for norm in (10, 15, 20))]
    names += [f"flat-S20-sigma{sigma}" for sigma in (0.003, 0.006, 0.012)]
    for size, more in (("", 0.0), ("20k-", 0.3), ("30k-", gain)):
        for name in names:
            paid = 0.0 if "S" not in name or name == "flat-S20" else 0.5
            paid += cost if (size, name) in {("30k-", "flat-S15"), ("30k-", "flat-S20-sigma0.006")} else 0.0
            value = 20.0 + more - paid
            make_seeds(tmp_path, size + name, {100: value, 3000: value})
    judges = (private_results.figure_11_gain, private_results.figure_11_clip, private_results.figure_12)
    outcomes = [judge(tmp_path).outcome for judge in judges]
    assert outcomes == [expected[0], expected[1], expected[1]]
    clips, noises = private_tables.dictionaries_tables(tmp_path)
    assert clips.rows[0] == ("no clip", "20.04 ± 0.02 %", "20.34 ± 0.02 %", f"{20.04 + gain:.2f} ± 0.02 %")
    assert noises.rows[-1] == ("σ = 0.048", "not run", "not run", "not run")


def test_a_store_can_have_the_held_out_users_of_another(tmp_path):
    words = Vocabulary([*SPECIALS, "a", "b"])
    for name, first in (("scotus_1600", 1), ("blogs_1600", 10)):
        texts = [np.array([0, 2, first + k, 1], dtype=np.uint16) % len(words) for k in range(3)]
        write_store(tmp_path / name, train=texts[:2], held_out=texts[2:], vocabulary=words)
    out = tmp_path / "scotus_for_blogs"
    private_run.with_held_out_of(tmp_path / "scotus_1600", tmp_path / "blogs_1600", out)
    mixed, trained, other = (TokenStore.open(tmp_path / name) for name in (out.name, "scotus_1600", "blogs_1600"))
    assert [list(mixed.train.tokens(k)) for k in (0, 1)] == [list(trained.train.tokens(k)) for k in (0, 1)]
    assert list(mixed.held_out.tokens(0)) == list(other.held_out.tokens(0))
    write_store(tmp_path / "b", train=[], held_out=[], vocabulary=Vocabulary([*SPECIALS, "b"]))
    with pytest.raises(SystemExit, match="dictionaries"):
        private_run.with_held_out_of(tmp_path / "scotus_1600", tmp_path / "b", tmp_path / "c")
    with pytest.raises(SystemExit, match="name it before"):
        private_run.with_held_out_of(tmp_path / "scotus_1600", tmp_path / "missing", tmp_path / "c")


def test_runs_evaluated_every_20_and_every_100_rounds_are_read_alike(tmp_path):
    for every in (20, 100):
        (tmp_path / f"{every}").mkdir()
        rows = [{"round": r, "accuracy_top1": r / 10_000} for r in range(every, 3001, every)]
        (tmp_path / f"{every}" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    often, seldom = (private_results.accuracy([tmp_path / name], 3000, every=100) for name in ("20", "100"))
    assert often == seldom == pytest.approx([28.0])
    assert private_results.accuracy([tmp_path / "20"], 3000) == pytest.approx([29.6])


def make_texts(place: Path, other: float, penalty: float, untied: float, early: float) -> None:
    """Write the runs of the rules `text-…`. Without a change each ends at 19 %; free vectors reach 18 % at the end."""
    for name, value in (("growing-baseline", 19.0), ("growing-S15-sigma0.003", 18.9), ("other-baseline", other),
                        ("flat-S15-penalty0.001", 18.0), ("flat-S15-penalty0.01", penalty),
                        ("untied-baseline", untied)):  # fmt: skip
        make_seeds(place, name, {100: value, 3000: value})
    make_seeds(place, "free-flat-S15", {100: 6.0, 2600: 18.0, 3000: 18.0})
    make_seeds(place, "growing-flat-S15", {100: 6.0, 1000: early, 2000: 19.0, 3000: 19.0})
    for folder in place.glob("*-baseline-seed1"):
        parameters = 2_306_144 if folder.name.startswith("untied") else 1_346_144
        (folder / "facts.json").write_text(json.dumps({"parameters": parameters}))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((16.0, 19.0, 19.2, 18.5), ("held", "held", "held", "held")),
        ((18.5, 20.0, 20.5, 6.0), ("did not hold", "did not hold", "did not hold", "held")),
        ((17.9, 19.25, 19.5, 18.5), ("cannot tell", "cannot tell", "cannot tell", "held")),
    ],
)
def test_rules_without_a_figure_can_hold_fail_and_stay_open(tmp_path, values, expected):
    make_texts(tmp_path, *values)
    rules = ("text-other-corpus", "text-penalty", "text-tied", "text-unit-norm")
    judged = private_results.verdicts(private_results.REVIEWS, private_results.LONG, tmp_path)
    assert tuple(judged[rule].outcome for rule in rules) == expected
    assert "41.6 % of the parameters saved" in judged["text-tied"].reason
    (table,) = private_tables.text_tables(tmp_path)
    assert table.rows[0][0] == "S = 15, vectors of norm 1 that grow"


@pytest.mark.parametrize(
    ("larger", "adaptive", "noised", "expected"),
    [
        (19.8, 18.9, 18.8, ("held", "held", "held")),
        (19.05, 18.0, 17.0, ("did not hold", "did not hold", "did not hold")),
        (19.25, 18.75, 18.5, ("cannot tell", "cannot tell", "cannot tell")),
    ],
)
def test_expectations_on_blogs_can_hold_fail_and_stay_open(tmp_path, larger, adaptive, noised, expected):
    levels = {"growing-baseline": 20.0, "growing-S15-sigma0.003": 19.0, "flat-S20-sigma0.003": 18.5}
    levels |= {"flat-S30-sigma0.003": larger, "adaptive-z0.06": adaptive}
    levels |= {f"trade-S{norm:g}": 19.0 if norm == 10 else 18.0 for norm in private_run.TRADES}
    levels |= {f"{kind}-{run}": 18.0 for kind in ("gru", "characters") for run in ("baseline", "flat-S15-sigma0.003")}
    levels |= {"gru-flat-S15": 17.0, "characters-flat-S15": 19.0, "characters-flat-S15-sigma0.003": noised}
    for name, value in levels.items():
        make_seeds(tmp_path, name, {100: value, 3000: value})
    judged = private_results.verdicts(private_results.REVIEWS, private_results.LONG, tmp_path)
    rules = ("expect-larger-S", "expect-adaptive", "expect-other-models")
    assert tuple(judged[rule].outcome for rule in rules) == expected
    titles = [table.title for table in private_tables.text_tables(tmp_path)]
    assert [title.split()[0] for title in titles] == ["Larger", "Adaptive", "A"]


def test_a_larger_s_is_undecided_if_s_15_may_cost_nothing(tmp_path):
    levels = {"growing-baseline": 20.0, "growing-S15-sigma0.003": 20.0, "flat-S20-sigma0.003": 18.0}
    for name, value in (levels | {"flat-S30-sigma0.003": 19.0}).items():
        make_seeds(tmp_path, name, {100: value, 3000: value})
    judged = private_results.verdicts(private_results.REVIEWS, private_results.LONG, tmp_path)
    assert judged["expect-larger-S"].outcome == "cannot tell"


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        ((26.0, 25.0, 24.5, 24.0), ("held", "held", "held")),
        ((25.0, 24.9, 24.0, 24.1), ("did not hold", "did not hold", "did not hold")),
        ((25.5, 25.25, 24.35, 24.1), ("cannot tell", "cannot tell", "cannot tell")),
    ],
)
def test_how_far_one_can_go_can_hold_fail_and_stay_open(tmp_path, levels, expected):
    names = ("epsilon8-correlated", "epsilon8-independent", "epsilon1-public-correlated", "epsilon1-correlated")
    for number in (1, 2, 3):
        make_run(tmp_path / f"baseline-C5000-seed{number}", flat(26))
        for name, value in zip(names, levels, strict=True):
            make_run(tmp_path / (name if number == 1 else f"{name}-repetition{number}"), flat(value))
    rules = ("expect-far-cost", "expect-far-correlated", "expect-far-public")
    assert tuple(outcome(rule, tmp_path) for rule in rules) == expected
    (table,) = private_tables.far_tables(tmp_path)
    assert [row[0] for row in table.rows] == ["ε = 1", "ε = 8"]
    assert table.rows[1][1:4] == (f"{levels[1]:.2f} ± 0.00 %", f"{levels[0]:.2f} ± 0.00 %", "not run")
    assert table.rows[1][5].startswith(f"{levels[0] - levels[1]:.2f} (")
    assert table.rows[1][6] == "3.18 / 3.44"


def make_lora(place: Path, tops: dict[float | None, float], seeds: int = 3) -> None:
    """Write results of SmolLM2 by epsilon, and next words of which each model has the given share right."""
    settings, lines = {"users_per_round": 2000, "rounds": 100}, [{"kind": "base", "metrics": {"accuracy_top1": 0.3}}]
    for claim, top in tops.items():
        for seed in range(1, seeds + 1):
            metrics = {"accuracy_top1": top / 100 + 1e-5 * seed}
            line = {"kind": "users", "epsilon": claim, "seed": seed, "metrics": metrics, "settings": settings}
            spent = {"epsilon": "infinity" if claim is None else claim}
            noise = {"noise_multiplier": 0.0 if claim is None else 0.5, "charged": 101}
            lines.append(line | noise | {"population": 750_000, "claimed": spent})
    (place / "smollm2").mkdir()
    (place / "smollm2" / "results.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.mark.parametrize(
    ("at_1", "seeds", "expected"), [(39.9, 3, "held"), (39.0, 3, "did not hold"), (39.9, 1, "cannot tell")]
)
def test_noise_may_cost_smollm2_little_or_much(tmp_path, at_1, seeds, expected):
    make_lora(tmp_path, {None: 40.0, 8.0: 40.0, 4.0: 40.0, 2.0: 40.0, 1.0: at_1}, seeds)
    assert outcome("expect-far-lora", tmp_path) == expected
    (table,) = private_tables.far_tables(tmp_path)
    assert [row[0] for row in table.rows] == ["not fine-tuned", "no noise", "ε = 1", "ε = 2", "ε = 4", "ε = 8"]
    assert table.rows[0] == ("not fine-tuned", "1", "30.00 %", "", "", "")
    assert table.rows[1][3:] == ("", "", "0.0027, 0.27")
    assert table.rows[2][3:] == ("1.00", "0.500", "0.0027, 0.27")


def test_runs_of_smollm2_add_to_the_epsilon_of_all_private_runs(tmp_path):
    make_run(tmp_path / "private", flat(25))
    before = private_report.composed(1e-6, tmp_path)
    make_lora(tmp_path, {None: 40.0, 2.0: 40.0, 1.0: 40.0}, seeds=2)
    after = private_report.composed(1e-6, tmp_path)
    names = [f"SmolLM2-epsilon{claim}-seed{seed} (101)" for claim in (1, 2) for seed in (1, 2)]
    assert after["charged"] == ", ".join(["private (5,000)", *names])
    lost = private_results.charges(private_tables.INTERRUPTED / "private")
    events = [*lost, *private_results.charges(tmp_path / "private")]
    events.append((PoissonGaussian(sampling_prob=2000 / 750_000, noise_multiplier=0.5), 404))
    assert after["rdp"] == pytest.approx(epsilon(events, 1e-6, "rdp"), rel=1e-9)
    assert after["rdp"] > before["rdp"]
    assert after["pld"] > before["pld"]


@pytest.mark.parametrize(("lora", "expected"), [(0.5, "held"), (0.1, "did not hold"), (0.31, "cannot tell")])
def test_next_words_compare_both_models(tmp_path, lora, expected):
    assert outcome("expect-far-words", tmp_path) == "cannot tell"
    rng = np.random.default_rng(1)
    shares = {"LSTM": 0.3, "SmolLM2": lora}
    hits = {
        f"{kind}, epsilon {e}": (rng.random(1000) < share).astype(int).tolist()
        for kind, share in shares.items()
        for e in (1, 2, 4, 8)
    }
    (tmp_path / "next_words.json").write_text(json.dumps({"hits": hits}))
    assert outcome("expect-far-words", tmp_path) == expected
    (table,) = private_tables.far_tables(tmp_path)
    assert table.rows[0][:2] == ("LSTM, epsilon 1", "1,000")


def test_runs_at_an_epsilon_spend_no_more_and_have_secure_noise(tmp_path):
    (tmp_path / "chosen_S.json").write_text('{"S": 8}')
    for step, prefix in (("far", ""), ("far-public", "public-")):
        runs = runs_of(step, tmp_path, repetition=2)
        for claim, (alone, correlated, groups) in private_run.FAR.items():
            first = runs[f"epsilon{claim}-{prefix}independent-repetition2"]
            second = runs[f"epsilon{claim}-{prefix}correlated-repetition2"]
            assert first["noise"] == {"kind": "gaussian", "noise_multiplier": alone}
            assert second["noise"] == {"kind": "correlated", "noise_multiplier": correlated, "strategy": "banded"}
            assert second["sampling"] == {"kind": "cyclic_poisson", "users_per_round": 5000, "groups": groups}
            for q, z, times in ((5000, alone, 5000), (5000 * groups, correlated, -(-5000 // groups))):
                event = PoissonGaussian(sampling_prob=q / 750_947, noise_multiplier=z)
                assert 0.99 * claim < epsilon([(event, times)], 750_947**-1.1, "pld") <= claim
            for run in (first, second):
                assert "reproducible_seed" not in run["training"]
                assert run["training"].get("init_is_public", False) is bool(prefix)


def test_vectors_of_norm_1_that_never_catch_up_contradict_the_paper(tmp_path):
    make_texts(tmp_path, 16.0, 19.0, 19.2, 18.5)
    shutil.rmtree(tmp_path / "growing-flat-S15-seed1")
    assert private_results.text_unit_norm(tmp_path).outcome == "cannot tell"  # a seed is missing
    make_seeds(tmp_path, "server-flat-S15", {100: 6.0, 3000: 15.0})
    assert private_results.verdict_of_reading("text-unit-norm", "server-", tmp_path).outcome == "did not hold"


def test_the_readings_of_the_word_vectors_are_shown_with_their_verdicts(tmp_path):
    assert private_tables.readings_tables(tmp_path) == private_tables.text_tables(tmp_path) == []
    make_table_2(tmp_path, (0.0, 0.5, 1.2))
    for folder in sorted(tmp_path.glob("*-seed?")):
        shutil.copytree(folder, tmp_path / f"growing-{folder.name}")
        folder.rename(tmp_path / f"step-{folder.name}")
    runs, judged = private_tables.readings_tables(tmp_path)
    assert [row[0] for row in runs.rows[:2]] == ["baseline, grow", "S = 15, σ = 0.003, grow"]
    assert len(runs.rows) == 8
    assert judged.columns == ("rule", "grow", "users project them after each step")
    assert {row[0]: row[1:] for row in judged.rows} == {
        "figure-1-match": ("held", "held"),
        "figure-1-later": ("cannot tell", "cannot tell"),
        "table-2-cost": ("held", "held"),
        "text-unit-norm": ("cannot tell", "cannot tell"),
        "held": ("2 of 4", "2 of 4"),
    }


def make_heads(place: Path, accuracies: list[float], heads: list[float]) -> None:
    """Write the seven models of Table 3 with these accuracies and mean numbers of head words."""
    for name, value, head in zip(private_results.HEADS.values(), accuracies, heads, strict=True):
        make_seeds(place, name.removesuffix("-seed"), {100: value, 3000: value})
        for folder in place.glob(f"{name}?"):
            counts = bootstrap.load(folder)
            per_user = np.round(TARGETS * head + np.random.default_rng(1).normal(0, 20, USERS)).clip(0)
            np.savez(folder / "per_user.npz", **counts, head_words=per_user)  # pyright: ignore[reportArgumentType]


DESCENDING = [24.0, 23.9, 22.0, 20.0, 20.1, 16.0, 12.0]
"""Accuracies of the models of Table 3, in the order of `HEADS`."""


@pytest.mark.parametrize(
    ("accuracies", "heads", "expected"),
    [
        (DESCENDING, [4.0, 4.1, 4.2, 4.4, 4.3, 5.0, 6.0], ("held", "held")),
        (DESCENDING, [4.0, 4.6, 4.2, 4.4, 4.3, 5.0, 6.0], ("held", "did not hold")),
        (DESCENDING, [6.0, 6.1, 5.2, 4.4, 4.3, 4.0, 3.0], ("did not hold", "held")),
        (DESCENDING, [4.0, 4.25, 4.2, 4.4, 4.3, 5.0, 6.0], ("held", "cannot tell")),
        ([24.0, 23.0, *DESCENDING[2:]], [4.0, 4.1, 4.2, 4.4, 4.3, 5.0, 6.0], ("held", "cannot tell")),
        ([20.3, 20.2, 20.1, 20.0, 20.0, 19.9, 19.8], [4.0, 4.1, 4.2, 4.4, 4.3, 5.0, 6.0], ("cannot tell", "held")),
    ],
)
def test_table_3_can_hold_fail_and_stay_open(tmp_path, accuracies, heads, expected):
    """A pair whose accuracies are far apart, or accuracies that hardly differ, leave a rule open."""
    make_heads(tmp_path, accuracies, heads)
    judges = (private_results.table_3_quality, private_results.table_3_noise)
    assert tuple(judge(tmp_path).outcome for judge in judges) == expected
    (table,) = private_tables.table_3(tmp_path)
    assert [float(row[2]) for row in table.rows] == pytest.approx(heads, abs=0.02)


def test_a_weighted_sum_has_the_interval_of_its_parts(tmp_path):
    """The standard errors of seeds and the bootstrap over users both enter, each with the weight of its run."""
    for name, value in (("a", 20.0), ("b", 10.0)):
        make_seeds(tmp_path, name, {100: value, 3000: value})
    once = private_results.combined("figure-6", {"a-seed": 1, "b-seed": -0.5}, 3000, tmp_path)
    twice = private_results.combined("figure-6", {"a-seed": 2, "b-seed": -1}, 3000, tmp_path)
    assert once.value == pytest.approx(20.04 - 0.5 * 10.04)
    assert (twice.value, twice.half) == (pytest.approx(2 * once.value), pytest.approx(2 * once.half))
    counts = {name: [bootstrap.load(folder) for folder in tmp_path.glob(f"{name}-seed?")] for name in "ab"}
    resampled = {name: 100 * bootstrap.resampled_accuracy(counts[name]) for name in "ab"}
    low, high = bootstrap.interval(resampled["a"] - 0.5 * resampled["b"])
    of_seeds = 1.96 * 0.02 / 3**0.5 * np.hypot(1, 0.5)
    assert once.half == pytest.approx(np.hypot((high - low) / 2, of_seeds))


def test_sweeps_are_evaluated_every_20_rounds_and_differ_as_registered(tmp_path):
    noise, estimators, clips = (runs_of(f"long-{step}", tmp_path) for step in ("noise", "estimators", "clipping"))
    assert (len(noise), len(estimators), len(clips)) == (12, 12, 15)
    for run in (*noise.values(), *estimators.values(), *clips.values()):
        assert (run["evaluation"]["every"], run["training"]["rounds"]) == (20, 3000)
        assert (run["training"]["checkpoint_every"], run["sampling"]["users_per_round"]) == (500, 100)
    assert noise["flat-S20-seed2"]["noise"] == {"kind": "none"}
    assert noise["flat-S20-sigma0.2-seed1"]["noise"]["noise_std"] == 0.2
    assert estimators["fixed-size-true-average-seed3"]["sampling"]["kind"] == "fixed_size"
    assert estimators["variable-clipped-denominator-seed1"]["estimator"]["min_total_weight"] == 191_709
    assert {run["clip"]["kind"] for run in estimators.values()} == {"none"}
    assert "flat-S20-seed1" not in clips
    assert clips["per-layer-S10-seed1"]["clip"] == {"kind": "per_layer", "norm": 10}
    needed = {name for _, needs in private_results.LONG_JUDGES.values() for name in needs if "trade" not in name}
    cohorts, heads = (runs_of(f"long-{step}", tmp_path) for step in ("users-per-round", "head-words"))
    assert {run["sampling"]["users_per_round"] for run in cohorts.values()} == {10, 30, 300, 1000}
    assert {run["training"]["rounds"] for run in (*cohorts.values(), *heads.values())} == {3000}
    assert {run["evaluation"]["every"] for run in (*cohorts.values(), *heads.values())} == {100}
    assert heads["heads-S15-sigma0.012-C1250-seed1"]["sampling"]["users_per_round"] == 1250
    assert heads["heads-S20-sigma0.048-seed3"]["noise"]["noise_std"] == 0.048
    table_2 = runs_of("long-table-2", tmp_path)
    assert {name for name in needed if "0k-" in name} | {"flat-S20-sigma0.003-seed", "flat-S20-sigma0.006-seed"} <= {
        name.removesuffix("1")
        for step in ("long-dictionaries-clipping", "long-dictionaries-noise")
        for name in runs_of(step, tmp_path)
    }
    needed = {name for name in needed if "0k-" not in name and "sigma0.003" not in name and "sigma0.006" not in name}
    needed |= {"heads-S15-sigma0.003-seed", "heads-S10-sigma0.006-seed"}
    every = (*noise, *estimators, *clips, *cohorts, *heads, *(name for name in table_2 if name.startswith("baseline")))
    runs = {name.removesuffix("1") for name in every if name.endswith("seed1")} - {
        "baseline-C30-seed",
        "baseline-C300-seed",
    }
    assert {name for name in needed if not name.startswith("then")} == runs


def test_sweeps_are_shown_when_their_runs_exist(tmp_path):
    assert private_tables.sweep_tables(tmp_path) == []
    for name in ("flat-S20", "flat-S20-sigma0.012"):
        make_seeds(tmp_path, name, flat(20.0))
    (noise,) = private_tables.sweep_tables(tmp_path)
    assert noise.title.startswith("Figure 3")
    assert [row[0] for row in noise.rows] == ["no noise", "σ = 0.012"]
    assert noise.rows[0][1:] == ("20.04 ± 0.02 %",) * 4


def outcome_of_seeds(place: Path) -> str:
    return private_results.figure_8_seeds(place).outcome


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
def test_estimates_are_compared_with_figure_7(tmp_path, apart, expected):
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


def test_the_published_report_and_the_first_pages_state_the_results():
    """The report equals the output of the command that it names. README and first page have the private run's figures."""
    root = Path(private_run.__file__).parent.parent
    published = (root / "benchmarks" / "results" / "2026-11-16-h200-private-run.md").read_text(encoding="utf-8")
    assert published == private_report.report(), "run python -m reproduction.private_report --out THAT_FILE"
    private = [private_results.REVIEWS / f"private{repetition}" for repetition in ("", "-repetition2", "-repetition3")]
    baselines = [private_results.REVIEWS / f"baseline-C5000-seed{seed}" for seed in (1, 2, 3)]
    shares = [
        100 * np.mean([smoothed(read_metrics(folder))[5000] for folder in folders]) for folders in (private, baselines)
    ]
    spent = max(json.loads((folder / "statement.json").read_text())["epsilon"]["pld"] for folder in private)
    bigram = private_report.counted_baselines()["bigram"]
    minutes = [sum(one["seconds"] for one in private_results.sittings(folder)) / 60 for folder in private]
    assert (round(min(minutes)), round(max(minutes))) == (5, 9)
    for page in (root / "README.md", root / "docs" / "index.md"):
        text = " ".join(page.read_text(encoding="utf-8").split())
        assert f"reached {shares[0]:.1f} % top-1 accuracy at ε = {spent:.2f} (PLD" in text
        assert f"without privacy reaches {shares[1]:.1f} %" in text
        assert page.name == "README.md" or f"a bigram counted without privacy {bigram:.1f} %" in text
        assert "in five to nine minutes on one H200" in text


def test_new_results_fill_the_tables_and_figures_of_the_page(tmp_path):
    make_table_2(tmp_path, (0.1, 0.4, 1.0))
    origin = {"device": "NVIDIA H200", "date": "2026-11-17", "commit": "0" * 40, "users_per_second": 1.0}
    for name, level in {"private": 24.9, "baseline-C5000-seed1": 25.0, "z1-C1667": 24.5}.items():
        make_run(tmp_path / name, flat(level))
        sitting = {"from_round": 0, "to_round": 5000, "seconds": 60.0, "marks": [], **origin}
        (tmp_path / name / "sittings.jsonl").write_text(json.dumps(sitting) + "\n")
        (tmp_path / name / "facts.json").write_text('{"suggestions": {"The room": ["was"]}}')
    spent = {by: private_results.spent([tmp_path / "private"], 3.4e-7, by) for by in ("pld", "rdp")}
    (tmp_path / "private" / "statement.json").write_text(json.dumps({"epsilon": spent, "delta": 3.4e-7}))
    content = private_report.section(tmp_path)
    assert content is not None
    cohorts, repetitions, table_2, figure_7, *_ = content["tables"]  # then those of reviews_1600_200k
    assert [row[:2] for row in repetitions.rows] == [
        ("private", "24.90 %"),
        ("baseline-C5000-seed1", "25.00 %"),
        ("z1-C1667", "24.50 %"),
    ]
    assert repetitions.rows[0][2].startswith("24.8")  # hits of the last model
    assert repetitions.rows[0][3:5] == ("3.18 / 3.44", "5,000")
    assert cohorts.rows[0][4:7] == ("24.90 %", "25.00 %", cohorts.rows[0][6])
    assert cohorts.rows[0][6].startswith("0.1")
    assert cohorts.rows[1][4:7] == ("24.50 %", "not run", "")
    assert cohorts.rows[2][4] == "not run"
    assert [row[5] for row in table_2.rows] == [
        "25.02 ± 0.01 %",
        "24.92 ± 0.01 %",
        "24.62 ± 0.01 %",
        "24.02 ± 0.01 %",
        "not run",
    ]
    assert table_2.rows[3][6].startswith("1.00 (")
    of_reviews = [figure.name for figure in content["figures"] if figure.name.endswith("reviews")]
    assert of_reviews == ["figure-1-reviews", "cohorts-reviews"]
    assert figure_7.rows[1][1] == "not run"
    rules = {rule["name"]: rule for rule in content["rules"]}
    assert rules["table-2-cost"]["outcome"] == "held"
    assert rules["table-2-cost"]["printed"].startswith("17.62")
    assert "of the paper’s 30 conclusions are tested" in content["counts"]
    states = {row[0]: row[2] for row in content["state"].rows}
    assert (states["private"], states["z1-C1250"]) == ("1 complete", "not run")


def test_the_table_of_steps_counts_every_repetition(tmp_path):
    origin = {"device": "NVIDIA H200", "date": "2026-11-17", "commit": "0" * 40, "users_per_second": 1.0}
    for name in ("epsilon8-correlated", "epsilon8-correlated-repetition2", "epsilon1-correlated-repetition3"):
        make_run(tmp_path / name, flat(25))
        sitting = {"from_round": 0, "to_round": 5000, "seconds": 60.0, "marks": [], **origin}
        (tmp_path / name / "sittings.jsonl").write_text(json.dumps(sitting) + "\n")
    states = {row[0]: row[2] for row in private_tables.state_table(tmp_path).rows}
    assert states["far"] == "3 complete; 7 not run"
    assert states["far-public"] == "not run"


def test_the_bigram_is_counted_on_all_training_users(tmp_path):
    words = Vocabulary.of(["a", "b", "c"])
    a, b, c = (words.id(word) for word in "abc")
    write_store(
        tmp_path / "store",
        train=[np.array([0, a, b, a, b, 1]), np.array([0, a, b, 1])],
        held_out=[np.array([0, a, b, c, 1])],
        vocabulary=words,
        info={"tokens": {"kind": "words"}, "vocabulary": {"kind": "file", "source": "a test's own words"}},
    )
    counted(tmp_path / "store", tmp_path / "counted.json")
    content = json.loads((tmp_path / "counted.json").read_text())
    assert content["targets"] == 4
    # After BOS comes a, after a comes b, after b the end; c was never seen.
    assert content["accuracy_top1"]["bigram"] == 50.0


def test_hits_are_counted_like_accuracy_on_users_and_on_random_posts():
    """With and without sentence ends, on whole users and on posts: the counts equal those of `evaluate`."""
    model = TiedLSTM(vocabulary_size=12, embedding_size=4, hidden_size=6)
    words = ["<bos>", "<eos>", "<unk>", ",", *"abcdefgh"]
    params_P = model.initial(1) * 2
    rng = np.random.default_rng(0)
    texts = [np.concatenate([[0], rng.integers(1, 12, size=n), [1]]) for n in (30, 200, 5)]
    counts = hits_of(model, params_P, words, texts, windows_at_once=2)
    said = evaluate(model, params_P, [User(tokens) for tokens in texts], unroll=80)
    assert counts["hits"].sum() / counts["targets"].sum() == pytest.approx(said["accuracy_top1"])
    assert counts["word_hits"].sum() / counts["words"].sum() == pytest.approx(said["accuracy_top1_words"])
    commas = sum(int((tokens[1:] == 3).sum()) for tokens in texts)
    assert (counts["words"] - counts["plain"]).sum() == commas
    heads = score(model, params_P, [User(tokens) for tokens in texts], unroll=80)[1][100]
    assert counts["head_words"].sum() == (heads * np.arange(11)).sum()
    one_by_one = [hits_of(model, params_P, words, [tokens])["hits"][0] for tokens in texts]
    assert counts["hits"].tolist() == one_by_one


def test_random_posts_stand_beside_the_users_with_an_interval(published):
    """The published models were also measured on random posts, like the paper's test set."""
    table = published["accuracy"]
    assert [row[0] for row in table.rows] == ["private", "without privacy", "difference, points"]
    assert not any("not measured" in cell for row in table.rows for cell in row)
    assert "75,122" in table.note


def test_private_runs_of_a_batch_have_z_1_and_secure_noise(tmp_path):
    for users, norm in ((1667, 10.0), (1250, 15.0)):
        (run,) = runs_of(f"z1-C{users}", tmp_path).values()
        assert (run["clip"]["norm"], run["sampling"]["users_per_round"]) == (norm, users)
        assert run["noise"] == {"kind": "gaussian", "noise_multiplier": 1.0}
        assert "reproducible_seed" not in run["training"]
    adjusted = runs_of("trade-offs-adjusted", tmp_path)["then-S7.9-seed2"]
    assert adjusted["noise"]["noise_std"] == 0.00474
    assert adjusted["training"]["init_from"].endswith("runs/trade-S20-seed2")


def test_only_the_runs_that_are_not_complete_are_trained(tmp_path, monkeypatch):
    (tmp_path / "chosen_S.json").write_text('{"S": 8}')
    monkeypatch.setattr(measures, "facts", lambda device: {})
    for seed in (1, 2):
        make_run(tmp_path / "runs" / f"baseline-seed{seed}", flat(20), rounds=300)
        (tmp_path / "runs" / f"baseline-seed{seed}" / "facts.json").write_text("{}")
    given = []

    def train_together(runs, **more):
        given.extend(folder.name for _, folder in runs)
        raise RuntimeError("trained")

    monkeypatch.setattr("unheard.training.loop.train_together", train_together)
    options = {"device": "cpu", "stop_after": None, "scale": 0.06, "repetition": 1}
    assert private_run.run_step("table-2", tmp_path, **options, only=["baseline-seed[12]"])
    with pytest.raises(RuntimeError, match="trained"):
        private_run.run_step("table-2", tmp_path, **options, only=["baseline-*", "estimate-seed1"])
    assert given == ["baseline-seed3", "estimate-seed1"]


def test_registered_runs_are_made_from_a_clean_commit(tmp_path, monkeypatch):
    (tmp_path / "chosen_S.json").write_text('{"S": 8}')
    monkeypatch.setattr(measures, "facts", lambda device: {"commit": "abc-dirty"})
    with pytest.raises(SystemExit, match="clean commit"):
        private_run.run_step("private", tmp_path, device="cpu", stop_after=None, scale=1.0, repetition=1)


def make_checkout(folder: Path, monkeypatch) -> Path:
    """Make a folder with the files of a checkout that `measures` looks at. Return its folder `reproduction`."""
    for name, text in {
        "src/unheard/a.py": "1",
        "src/unheard/kernel.cu": "2",
        "reproduction/rules.toml": "3",
        "reproduction/results/x/run.toml": "4",
        "reproduction/rules.md": "5",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.setattr(measures, "HERE", folder / "reproduction")
    return folder / "reproduction"


def test_without_a_commit_nothing_is_trained(tmp_path, monkeypatch):
    (tmp_path / "chosen_S.json").write_text('{"S": 8}')
    make_checkout(tmp_path, monkeypatch)
    with pytest.raises(SystemExit, match="no git repository here"):
        private_run.run_step("table-2", tmp_path, device="cpu", stop_after=None, scale=0.01, repetition=1)
    with pytest.raises(SystemExit, match="clean checkout"):
        measures.write_commit(tmp_path / "COMMIT")


@pytest.mark.parametrize("changed", ["src/unheard/a.py", "src/unheard/kernel.cu", "reproduction/rules.toml"])
def test_a_copied_commit_counts_only_with_its_own_code(tmp_path, monkeypatch, changed):
    here = make_checkout(tmp_path, monkeypatch)
    (here / "COMMIT").write_text(f"abc {measures.code_digest()}\n")
    (here / "results/x/run.toml").unlink()
    (here / "rules.md").write_text("other words")
    assert measures.commit() == "abc"
    assert measures.facts("cpu")["code"] == measures.code_digest()
    (tmp_path / changed).write_text("other code")
    assert measures.commit() == "abc-dirty"


@pytest.mark.parametrize("text", ["abc\n", "", "abc 0123"])
def test_a_commit_without_the_digest_of_this_code_counts_as_changed(tmp_path, monkeypatch, text):
    here = make_checkout(tmp_path, monkeypatch)
    (here / "COMMIT").write_text(text)
    assert str(measures.commit()).endswith("-dirty")


def test_the_file_for_another_machine_has_the_commit_and_the_digest_of_the_code(tmp_path, monkeypatch):
    make_checkout(tmp_path, monkeypatch)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=A", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "Add code"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    measures.write_commit(tmp_path / "reproduction" / "COMMIT")
    assert (tmp_path / "reproduction" / "COMMIT").read_text().split() == [head, measures.code_digest()]
    assert measures.commit() == head
    (tmp_path / "reproduction" / "COMMIT").unlink()
    (tmp_path / "src/unheard/a.py").write_text("changed")
    with pytest.raises(SystemExit, match="clean checkout"):
        measures.write_commit(tmp_path / "COMMIT")


def test_a_run_is_complete_if_it_has_all_rounds_and_was_measured(tmp_path):
    make_run(tmp_path / "r", flat(20), rounds=300)
    assert not is_measured(tmp_path / "r", 300)
    (tmp_path / "r" / "facts.json").write_text("{}")
    assert is_measured(tmp_path / "r", 300)
    assert not is_measured(tmp_path / "r", 400)


def test_the_record_of_a_process_that_is_killed_is_not_lost(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(private_run, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    earlier = '{"from_round": 0, "to_round": 2}\n'
    (tmp_path / "sittings.jsonl").write_text(earlier)
    sitting = private_run.Sitting("private", 100.0, 50, {"private": tmp_path}, {"commit": "abc"})
    for number in range(3, 7):
        clock[0] += 6.0
        metrics = {"accuracy_top1": 0.2} if number % 2 == 0 else None
        sitting.add("private", SimpleNamespace(round=number, metrics=metrics))
    lines = (tmp_path / "sittings.jsonl").read_text().splitlines(keepends=True)
    assert lines[0] == earlier  # one line for each process
    (record,) = map(json.loads, lines[1:])
    assert (record["from_round"], record["to_round"], record["seconds"]) == (2, 6, 24.0)
    assert record["users_per_second"] == round(4 * 50 / 24, 1)
    assert [mark["round"] for mark in record["marks"]] == [4, 6]
    assert record["commit"] == "abc"
