"""The default measurements of a benchmark, and the order of its reports."""

import pytest
import torch

import unheard
from unheard.performance import benchmark
from unheard.performance.benchmark import Settings, run_benchmark


@pytest.mark.parametrize(
    ("device", "precisions", "users", "runs"),
    [("cpu", ("float32",), (4,), 0), ("cuda", ("bfloat16", "float32"), (100, 1024), 16)],
)
def test_defaults_depend_on_the_device(device, precisions, users, runs):
    filled = Settings().for_device(torch.device(device))
    assert (filled.precisions, filled.users, filled.runs) == (precisions, users, runs)


def test_given_values_replace_the_defaults():
    filled = Settings(precisions=("bfloat16",), users=(7,), rounds=(0,), short=(9,), runs=0).for_device(
        torch.device("cuda")
    )
    assert (filled.precisions, filled.users, filled.rounds, filled.short, filled.runs) == (
        ("bfloat16",), (7,), (0,), (9,), 0,
    )  # fmt: skip


def test_every_measurement_is_announced_and_reported(monkeypatch):
    limits = benchmark.Machine(device="M", bytes_per_second=1e9, float32_per_second=1e9, bfloat16_per_second=1e9)
    monkeypatch.setattr(benchmark, "machine", lambda device: limits)
    monkeypatch.setattr(
        benchmark, "user_updates", lambda model, choice, n: {"users_per_second": 2.0, "bytes_per_number": 4}
    )
    monkeypatch.setattr(
        benchmark,
        "whole_rounds",
        lambda model, choice, n, **how: {"users_per_second": 1.0, "users": n, "tokens": how["tokens"], **how},
    )
    begun, reported = [], []
    settings = Settings(engines=("stacked", "vectorised"), users=(2,), rounds=(3, 0), short=(5,), runs=2)
    result = run_benchmark(
        unheard.TiedLSTM(vocabulary_size=50, embedding_size=4, hidden_size=5),
        unheard.EngineChoice(device="cpu"),
        settings,
        begin=begun.append,
        report=lambda title, row: reported.append(title),
    )
    assert begun == ["the machine's own limits", *reported]
    assert len(result["updates"]) == 2
    assert all(row["share_of_memory_limit"] > 0 for row in result["updates"])
    assert [(row["users"], row["tokens"], row["runs"]) for row in result["rounds"]] == [
        (3, 1600, 1),
        (5, 80, 1),
        (100, 1600, 2),
    ]
    assert [row["is_evaluated"] for row in result["rounds"]] == [False, False, True]
