"""Small real runs, made once for the session and read by many tests."""

from pathlib import Path

import pytest

import unheard
from tests.report.making import make_runs


@pytest.fixture(scope="session")
def runs(store, model, plan, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    run = unheard.Run(corpus=store.path, model=model, plan=plan, training=unheard.Training(rounds=1))
    return make_runs(run, tmp_path_factory.mktemp("runs"))
