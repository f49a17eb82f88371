"""One check, one finding: its name, whether it fits, and plain words for a person.

In: a check that yields sentences, and raises when something does not fit. Out: a Finding that no trouble can escape from.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from unheard.errors import UnheardError


class Trouble(UnheardError):
    """Something does not fit."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """`fits` is None where the check could not be made, for a reason that is no fault of the run."""

    name: str
    fits: bool | None
    words: str


class Unknown(Trouble):
    """The check could not be made."""


def finding(name: str, check: Callable[[Any], Iterator[str]], about: Any) -> Finding:
    """Run one check. A refusal by any part of the library is a finding too, in that part's own words."""
    said: list[str] = []
    try:
        said.extend(check(about))
        return Finding(name=name, fits=True, words="; ".join(said))
    except Unknown as unknown:
        return Finding(name=name, fits=None, words=str(unknown))
    except UnheardError as trouble:
        return Finding(name=name, fits=False, words=str(trouble))
    except OSError as trouble:
        return Finding(name=name, fits=False, words=f"{trouble.strerror or trouble}: {trouble.filename or '?'}")
