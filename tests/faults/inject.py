"""Fault injection: kill a child process, or make its disk full, at the n-th step that writes a file or is part of a round.

The child is a fork, because importing torch takes seconds and there are about a hundred steps. In the child, the few
functions that all writes and all rounds call are replaced. The parent is not affected.
"""

import errno
import os
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from unheard.engines.reference import ReferenceEngine
from unheard.evaluation.next_word import HeldOutText
from unheard.mechanism import noise
from unheard.mechanism.aggregation import FixedDenominator
from unheard.mechanism.noise import NoNoise
from unheard.mechanism.sampling import PoissonSampling
from unheard.training import round as one_round

Fault = Callable[[], None]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def disk_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_only() -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


class Steps:
    """Counts steps. At step number `at` the fault happens: before the step, or in the middle of it if it is a write."""

    def __init__(self, at: int, fault: Fault, *, half: bool = False, writes_only: bool = False) -> None:
        self.at, self.fault, self.half, self.writes_only = at, fault, half, writes_only
        self.names: list[str] = []

    def here(self, name: str, *, write_half: Callable[[], Any] | None = None) -> None:
        if self.writes_only and not name.startswith("file"):
            return
        self.names.append(name)
        if len(self.names) - 1 == self.at:
            if self.half and write_half is not None:
                write_half()
            self.fault()


def install(steps: Steps) -> None:
    """Replace, in this process, the functions that write files and the functions that make up a round."""
    real = {name: getattr(os, name) for name in ("write", "fsync", "replace", "ftruncate", "unlink")}

    def before(name: str) -> Callable[..., Any]:
        def step(*args: Any, **more: Any) -> Any:
            steps.here(f"file: {name}")
            return real[name](*args, **more)

        return step

    def write(descriptor: int, data: bytes) -> int:
        steps.here("file: write", write_half=lambda: real["write"](descriptor, data[: len(data) // 2]))
        return real["write"](descriptor, data)

    for name in ("fsync", "replace", "ftruncate", "unlink"):
        setattr(os, name, before(name))
    os.write = write  # pyright: ignore[reportAttributeAccessIssue]
    for owner, name in (
        (PoissonSampling, "draw"),
        (ReferenceEngine, "sum_updates"),
        (FixedDenominator, "average"),
        (NoNoise, "add"),
        (one_round, "step"),
        (HeldOutText, "start"),
    ):
        setattr(owner, name, _stepping(getattr(owner, name), name, steps))


def _stepping(function: Callable[..., Any], name: str, steps: Steps) -> Callable[..., Any]:
    def step(*args: Any, **more: Any) -> Any:
        steps.here(f"round: {name}")
        return function(*args, **more)

    return step


def in_a_child(work: Callable[[], Any]) -> int:
    """Run `work` in a fork. Return 0 if it succeeded, 3 if it raised, and minus the signal number if it was killed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        status = 3
        noise._threads.cache_clear()  # a fork has none of its parent's threads
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    _, ended = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(ended)


def output_of_a_child(work: Callable[[], str]) -> str:
    """Run `work` in a fork and return its result, or the name and message of its exception."""
    read, write = os.pipe()

    def say() -> None:
        real_write = os.write
        try:
            output = work()
        except BaseException as error:
            output = f"{type(error).__name__}: {error}"
        real_write(write, output.encode())

    in_a_child(say)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        return pipe.read().decode()


def every(names: list[str]) -> Iterator[tuple[int, bool]]:
    """Yield each step once, and each write a second time with a fault in the middle of it."""
    for at, name in enumerate(names):
        yield at, False
        if name == "file: write":
            yield at, True
