"""Exhibits of made-up results, with a quick accountant in the place of PLD, which takes seconds for Table 1."""

import pytest
from reproduction.results import ResultSet

from reproduction import printed as recomputed
from tests.reproduction.builders import world
from unheard.privacy.accountants import Bound, epsilon


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch):
    """`ε today` by RDP, in tests that are not about it."""
    monkeypatch.setattr(
        recomputed,
        "best_epsilon",
        lambda events, delta: Bound(epsilon=epsilon(events, delta, "rdp"), accountant="rdp"),
    )
    recomputed.best_epsilon_today.cache_clear()
    yield
    recomputed.best_epsilon_today.cache_clear()


@pytest.fixture(scope="session")
def everything() -> ResultSet:
    return world()
