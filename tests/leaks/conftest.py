"""A fixture that runs commands of `unheard` in this process."""

import sys
from dataclasses import dataclass

import pytest

from unheard.cli.main import main


@dataclass
class Done:
    status: int
    said: str
    """Standard output followed by standard error."""


@pytest.fixture
def unheard_command(capsys, monkeypatch):
    """Return a function that calls `main` with arguments, as a shell does. An exception other than SystemExit fails the test."""

    def run_words(*words: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["unheard", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        return Done(int(left.value.code or 0), out + err)

    return run_words
