"""Exhibits of invented results, with a fast accountant instead of PLD, which takes seconds for Table 1."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from reproduction.page import private_run
from reproduction.results import ResultSet

from reproduction import printed as recomputed
from reproduction import results as results_module
from tests.reproduction.builders import world
from unheard.privacy.accountants import Bound, epsilon


def by_rdp(events: Sequence, delta: float) -> Bound:
    return Bound(epsilon=epsilon(events, delta, "rdp"), accountant="rdp")


@contextlib.contextmanager
def quick_accountant() -> Iterator[None]:
    """Compute `ε today` by RDP in tests that do not check it."""
    recomputed.best_epsilon_today.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recomputed, "best_epsilon", by_rdp)
        yield
    recomputed.best_epsilon_today.cache_clear()


@pytest.fixture
def quick():
    with quick_accountant():
        yield


@pytest.fixture(scope="session")
def published() -> dict:
    """Return the first section of the page for the published results of the private run. It takes seconds to compute."""
    content = private_run(Path(results_module.__file__).parent / "results")
    assert content is not None
    return content


@pytest.fixture(scope="session")
def everything() -> ResultSet:
    return world()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of the reproduction with the system tests: it is not part of the installed package."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.system)
