"""Fixtures for the tests of federated runs."""

import pytest

import unheard.training.loop


@pytest.fixture
def statements() -> None:
    """A fixture for tests that need the statement of their runs."""


@pytest.fixture(autouse=True)
def _only_wanted_statements(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the statement unless a test requests `statements`: it takes five times as long as the run."""
    if "statements" not in request.fixturenames:
        monkeypatch.setattr(unheard.training.loop, "write_statement", lambda folder, ledger: {})
