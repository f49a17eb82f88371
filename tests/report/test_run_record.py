"""Reading run folders, and their curves of accuracy and epsilon by round."""

import itertools
import math
import shutil
from dataclasses import replace
from typing import Any

import pytest

from tests.report.builders import ROUNDS, made_up_record
from unheard.errors import InvalidValue, LedgerError, RunFolderError
from unheard.formatting import smoothed
from unheard.privacy.accountants import epsilons
from unheard.privacy.budget import RunningEpsilon
from unheard.privacy.events import Gaussian, NonPrivate, PoissonGaussian
from unheard.privacy.population_ledger import PopulationLedger, vocabulary_run
from unheard.report.comparison import Comparison
from unheard.report.run_record import (
    _check,
    accuracy_points,
    epsilon_points,
    final_accuracy,
    latest,
    read_runs,
)
from unheard.run_folder import RunFolder


def test_a_record_is_what_the_folder_holds(runs):
    compared = Comparison.read(runs)
    plain, private = compared.records
    assert [plain.name, private.name] == ["plain", "private"]
    assert [plain.rounds, private.rounds] == [ROUNDS, ROUNDS]
    assert [plain.users_per_round, private.users_per_round] == [6, 12]
    assert math.isinf(plain.epsilon)
    assert 0 < private.epsilon < 1000
    assert compared.baseline is plain


def test_runs_of_one_name_are_distinguished_and_no_run_is_shown_twice(runs, tmp_path):
    for parent in ("monday", "tuesday"):
        shutil.copytree(runs[1], tmp_path / parent / "run")
    names = [r.name for r in read_runs([tmp_path / "monday" / "run", tmp_path / "tuesday" / "run"])]
    assert names == ["monday/run", "tuesday/run"]
    with pytest.raises(InvalidValue, match="twice"):
        read_runs([runs[0], runs[0]])
    with pytest.raises(InvalidValue, match="at least one"):
        read_runs([])


def test_smoothed_is_the_mean_of_the_last_five_and_never_of_the_future():
    assert smoothed([1, 2, 3, 4, 5, 6, 10]) == [1, 1.5, 2, 2.5, 3, 4, 5.6]
    assert smoothed([1, 2, 3], over=1) == [1, 2, 3]
    assert smoothed([]) == []


def test_final_accuracy_is_the_last_smoothed_figure():
    run = made_up_record("a", [0.1, 0.1, 0.2, 0.2, 0.2, 0.3])
    assert [p["round"] for p in accuracy_points(run)] == [20, 40, 60, 80, 100, 120]
    assert final_accuracy(run) == pytest.approx(0.2)
    assert final_accuracy(made_up_record("b", [])) is None
    assert latest(run, "accuracy_top1") == 0.3
    assert latest(made_up_record("b", []), "accuracy_top1") is None


def test_epsilon_by_round_ends_where_the_accountant_says():
    event = PoissonGaussian(sampling_prob=0.01, noise_multiplier=0.8)
    points = epsilon_points(made_up_record("a", [], events=[event] * 450))
    assert len(points) <= 201
    assert [points[0]["round"], points[-1]["round"]] == [1, 450]
    assert points[-1]["epsilon"] == pytest.approx(epsilons([(event, 450)], 1e-9)["rdp"])
    assert all(a["epsilon"] < b["epsilon"] for a, b in itertools.pairwise(points))


@pytest.mark.parametrize("charges", [1, 2, 3, 199, 200, 201, 202, 399, 401, 997])
def test_an_epsilon_curve_of_any_length_ends_with_everything_that_was_charged(charges):
    events = [PoissonGaussian(sampling_prob=0.01, noise_multiplier=1.0)] * (charges - 1)
    events += [PoissonGaussian(sampling_prob=0.5, noise_multiplier=0.7)]
    points = epsilon_points(made_up_record("a", [], events=events))
    assert [points[0]["round"], points[-1]["round"]] == [1, charges]
    assert len(points) <= 201
    for point in (points[0], points[-1]):
        assert point["epsilon"] == RunningEpsilon(1e-9, events=events[: point["round"]]).epsilon


def test_rounds_done_again_cost_again():
    event = PoissonGaussian(sampling_prob=0.01, noise_multiplier=0.8)
    once = made_up_record("a", [], events=[event] * 4)
    again = replace(once, entries=[*once.entries, *once.entries[2:]])
    assert [p["round"] for p in epsilon_points(again)] == [1, 2, 3, 4]
    assert epsilon_points(again)[-1]["epsilon"] == pytest.approx(epsilons([(event, 6)], 1e-9)["rdp"])


def test_no_point_of_a_curve_is_from_before_the_repeated_rounds():
    """With more than 200 charges only every n-th has a point, and not the same rounds before and after a crash."""
    event = PoissonGaussian(sampling_prob=0.01, noise_multiplier=0.8)
    once = made_up_record("a", [], events=[event] * 299)
    again = replace(once, entries=[*once.entries, *once.entries[200:]])
    points = epsilon_points(again)
    assert all(a["epsilon"] < b["epsilon"] for a, b in itertools.pairwise(points))
    for point in points:
        spent = RunningEpsilon(1e-9)
        spent.charge(event, point["round"] + (99 if point["round"] > 200 else 0))
        assert point["epsilon"] == pytest.approx(spent.epsilon)


def test_a_run_without_privacy_has_no_curve_of_epsilon():
    assert epsilon_points(made_up_record("a", [], events=[NonPrivate(reason="no noise is added")])) == []


def test_every_other_run_on_the_same_users_is_named(tmp_path):
    population = PopulationLedger.open(tmp_path / "ledger.jsonl", {})
    for name in "abcd":
        population.register(name, {"name": name}, num_charged=0)
        population.settle(name, [PoissonGaussian(sampling_prob=1.0, noise_multiplier=5.0)])
    population.register("not begun", {"name": "not begun"}, num_charged=0)
    for corpus in ("own", "joined"):  # only the vocabulary of its own store counts for a run
        population.register(vocabulary_run(corpus), {"name": f"words, {corpus}"}, num_charged=0)
        population.settle(vocabulary_run(corpus), [Gaussian(noise_multiplier=5.0)])
    for name in "abcd":
        record = replace(made_up_record("r", [0.1]), run_id=name, population_ledger=population)
        record = replace(record, facts={**record.facts, "corpus": "own"})
        assert record.other_runs == [*(other for other in "abcd" if other != name), "words, joined"]


TABLES: dict[str, Any] = {"training": {"rounds": 3}, "privacy": {"budget_epsilon": 2}}
FACTS: dict[str, Any] = {"delta": 1e-5, "population": 100, "sampling": {"sampling_prob": 0.1}}


@pytest.mark.parametrize("tables", [TABLES, {"training": {"rounds": 3}}, {**TABLES, "privacy": {}}])
@pytest.mark.parametrize("sampling", [{"sampling_prob": 0.1}, {"users_per_round": 7}])
def test_a_run_file_and_a_ledger_that_a_report_can_read(tmp_path, tables, sampling):
    _check(RunFolder(tmp_path), tables, {**FACTS, "sampling": sampling})


@pytest.mark.parametrize(
    "change",
    [
        {"training": None},
        {"training": [3]},
        {"training": {}},
        {"training": {"rounds": 3.0}},
        {"training": {"rounds": True}},
        {"privacy": {"budget_epsilon": "2"}},
        {"privacy": {"budget_epsilon": True}},
        {"privacy": [2]},
    ],
)
def test_a_run_file_that_a_report_cannot_read_is_named(tmp_path, change):
    with pytest.raises(RunFolderError, match=r"run\.toml is not the run file of a run"):
        _check(RunFolder(tmp_path), {**TABLES, **change}, FACTS)


@pytest.mark.parametrize(
    "change", [{"delta": None}, {"delta": "1e-5"}, {"population": None}, {"population": True}, {"sampling": {}}]
)
def test_a_ledger_that_does_not_declare_what_a_report_needs_is_named(tmp_path, change):
    with pytest.raises(LedgerError, match="does not declare delta, population and sampling"):
        _check(RunFolder(tmp_path), TABLES, {**FACTS, **change})
