"""The command line in this process: what it prints, and how it ends."""

import sys
from dataclasses import dataclass

import pytest

from unheard.cli.main import main


@dataclass
class Done:
    status: int
    said: str
    """Both streams together."""


@pytest.fixture
def unheard_command(capsys, monkeypatch):
    """`main` as the shell would call it; anything but an exit is a traceback, and fails the test."""

    def run_words(*words: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["unheard", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        return Done(int(left.value.code or 0), out + err)

    return run_words
