"""What the tests of federated runs share."""

import pytest

import unheard.training.loop


@pytest.fixture
def statements() -> None:
    """Named by a test that needs the statement of its runs."""


@pytest.fixture(autouse=True)
def _only_wanted_statements(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs write no statement: its epsilons take five times as long as the run. `statements` writes it."""
    if "statements" not in request.fixturenames:
        monkeypatch.setattr(unheard.training.loop, "write_statement", lambda folder, ledger: {})
