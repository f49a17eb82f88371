"""The machine time of a plan: user updates divided by a measured speed."""

import importlib.util
from pathlib import Path

import pytest

from unheard.errors import InvalidValue
from unheard.performance.estimate import Speed, cost_of, costs_on_measured_machines, measured_speeds, nearest_rounds

ROOT = Path(__file__).parents[2]


def speed(**changes) -> Speed:
    settings = {
        "device": "G",
        "engine": "e",
        "model": "m",
        "users_per_round": 10,
        "users_per_second": 2.0,
        "source": "s",
    }
    return Speed(**{**settings, **changes})


def test_hours_are_updates_over_speed():
    """7,200 rounds of 10 users at 2 users per second: 36,000 seconds."""
    alone = cost_of(speed(), rounds=7200, users_per_round=10)
    assert (alone.machine_hours, alone.hours, alone.price) == (10.0, 10.0, None)
    four = cost_of(speed(), rounds=7200, users_per_round=10, machines=4, efficiency=0.5, hour_price=3.0)
    assert (four.machine_hours, four.hours, four.price) == (20.0, 5.0, 60.0)


def test_the_speed_of_the_most_similar_cohort_is_taken():
    rows = [speed(users_per_round=n, users_per_second=n) for n in (100, 1250, 20)]
    assert [s.users_per_round for s in nearest_rounds(rows, 5000)] == [1250]
    assert [s.users_per_round for s in nearest_rounds(rows, 100)] == [100]
    assert [s.users_per_round for s in nearest_rounds(rows, 3)] == [20]


def test_the_packages_speeds_are_those_of_the_dated_results():
    spec = importlib.util.spec_from_file_location("speeds", ROOT / "benchmarks" / "speeds.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.OUT.read_text() == script.text(), "run python benchmarks/speeds.py"
    for each in measured_speeds():
        assert (ROOT / each.source).is_file()


def test_several_gpus_share_the_work_and_a_cpu_is_one_machine():
    speeds = [speed(), speed(device="C", is_gpu=False, users_per_second=1.0)]
    gpu, cpu = costs_on_measured_machines(speeds, rounds=7200, users_per_round=10, gpus=4, gpu_hour_price=3.0)
    assert (gpu.machines, gpu.hours, gpu.price) == (4, 2.5, 30.0)
    assert (cpu.machines, cpu.hours, cpu.price) == (1, 20.0, None)
    assert gpu.record()["measured"] == "whole rounds of 10 users"


@pytest.mark.parametrize("values", [{"machines": 0}, {"efficiency": 0.0}, {"efficiency": 1.1}, {"hour_price": -1.0}])
def test_values_out_of_range_are_refused(values):
    with pytest.raises(InvalidValue):
        cost_of(speed(), rounds=1, users_per_round=1, **values)
