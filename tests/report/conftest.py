"""Small real runs, trained once per session and read by many tests."""

from pathlib import Path

import pytest

import unheard
from tests.report.builders import make_runs
from unheard.report.comparison import Comparison


@pytest.fixture(scope="session")
def runs(store, model, plan, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    run = unheard.Run(corpus=store.path, model=model, plan=plan, training=unheard.Training(rounds=1))
    return make_runs(run, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def compared(runs) -> Comparison:
    """Compare both runs, with a hypothetical epsilon for a million users."""
    return Comparison.read(runs, as_if_users=1_000_000)
