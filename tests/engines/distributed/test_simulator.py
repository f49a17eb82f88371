"""The simulator in benchmarks/: cases that can be computed by hand, and properties that hold for any machine."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "scale_out_simulator.py"


@pytest.fixture(scope="module")
def simulator():
    spec = importlib.util.spec_from_file_location("scale_out_simulator", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scale_out_simulator"] = module  # where its dataclasses look for their names
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def parts(simulator):
    """Equal users of 2 s each, a network of 1 s per hop and 1,000 bytes per second, 500 parameters; other parts take 0 s."""
    return simulator.Parts(
        hardware="a sheet of paper", parameters=500, seconds_per_cost=0.5, seconds_fixed=0.0, cost_mean=4.0,
        cost_deviation=0.0, unsteadiness=0.0, draw=0.0, ledger=0.0, noise=0.0, finish=0.0, message=0.0, round_trip=0.0,
        latency=1.0, bytes_per_second=1000.0,
    )  # fmt: skip


class Exactly:
    """A generator that always draws the expected value."""

    def poisson(self, mean):
        return mean

    def normal(self, mean, deviation, size):
        return np.full(size, mean) + deviation * np.linspace(-1, 1, size)


def seconds(simulator, parts, ranks, users, shape="tree"):
    return simulator.one_round(parts, ranks, users, shape, Exactly())


def test_one_rank_does_nothing_but_its_users(simulator, parts):
    one = seconds(simulator, parts, 1, 8)
    assert (one.compute, one.seconds) == (16.0, 16.0)


def test_four_ranks_share_the_users_and_pay_for_communication(simulator, parts):
    """8 users on 4 ranks: 4 s. Parameters, 2,000 bytes, and the sum, 4,000: 2 s and 4 s. A tree of 4: 4 hops each; a ring: 3."""
    tree = seconds(simulator, parts, 4, 8)
    assert (tree.compute, tree.hand_out, tree.add_up) == (4.0, 6.0, 8.0)
    ring = seconds(simulator, parts, 4, 8, "ring")
    assert (ring.hand_out, ring.add_up) == (5.0, 7.0)
    gloo = seconds(simulator, parts, 4, 8, "gloo")  # two levels, each whole
    assert (gloo.hand_out, gloo.add_up) == (6.0, 10.0)


def test_noise_costs_only_what_the_users_do_not_hide(simulator, parts):
    free = replace(parts, latency=0.0, bytes_per_second=1e12)
    assert seconds(simulator, replace(free, noise=16.0), 1, 8).seconds == 16.0
    assert seconds(simulator, replace(free, noise=20.0), 1, 8).seconds == pytest.approx(20.0)
    assert seconds(simulator, replace(free, noise=20.0), 4, 8).seconds == pytest.approx(20.0)


def test_the_leader_speaks_to_one_rank_after_the_other(simulator, parts):
    asked = seconds(simulator, replace(parts, message=0.1, round_trip=0.5), 4, 8)
    assert asked.messages == pytest.approx(0.8)


def test_more_ranks_than_cores_share_them(simulator, parts):
    crowded = replace(parts, places=2)
    assert seconds(simulator, crowded, 2, 8).compute == 8.0
    assert seconds(simulator, crowded, 8, 8).compute == 8.0


def test_the_longest_user_and_the_slowest_rank_are_waited_for(simulator, parts):
    """8 users on 8 ranks take 2 s; with costs from 1 to 7 the longest takes 3.5 s; with one rank at half speed, 4 s."""
    assert seconds(simulator, parts, 8, 8).compute == 2.0
    assert seconds(simulator, replace(parts, cost_deviation=3.0), 8, 8).compute == 3.5
    assert seconds(simulator, replace(parts, unsteadiness=0.5), 8, 8).compute == 4.0


def test_the_table_holds_what_was_measured_beside_what_was_predicted(simulator, parts, tmp_path, monkeypatch, capsys):
    own = {"users_per_round": 8, "parts": {**parts.__dict__}}
    (tmp_path / "parts.json").write_text(json.dumps(own))
    (tmp_path / "measured.json").write_text(
        json.dumps({"users_per_round": 8, "runs": [{"ranks": 2, "users_per_second": 0.77}]})
    )
    words = ["--parts", str(tmp_path / "parts.json"), "--measured", str(tmp_path / "measured.json"), "--most", "4"]
    monkeypatch.setattr(sys, "argv", ["simulator", *words])
    simulator.main()
    page = capsys.readouterr().out
    assert [line.split("|")[4].strip() for line in page.splitlines() if line.startswith("| ")][2:] == ["", "0.77", ""]


def test_another_device_is_a_line_through_its_whole_rounds(simulator, parts):
    """The prediction for rounds of 100 and of 1,250 users equals the measured speeds in speeds.toml."""
    there = simulator.on_device(parts, "NVIDIA H200")
    known = {s.users_per_round: s.users_per_second for s in simulator.measured_speeds() if s.of == "whole rounds"}
    for users, speed in known.items():
        assert users / seconds(simulator, there, 1, users).seconds == pytest.approx(speed)
