"""Which runs go side by side: those of one model and one shape of batch, of about the same length, no more than fill the device.

In: jobs that could begin now, in the order of how much they are wanted. Out: the next group of them. No torch.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from unheard.paper.schedule import Job

MOST_RUNS = 16
MOST_USERS = 2_000
"""Users of all runs of a group in one turn. More would be no faster, and stopping would be coarser."""
LIKE_LENGTH = 2.0
"""The longest run of a group has at most so many times the rounds of its first one left."""


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """A job with what decides its company."""

    job: Job
    key: Hashable
    left: int
    """Rounds that it still lacks."""
    users: int
    """Users a round."""


def next_group(waiting: Sequence[Waiting], is_ready: Callable[[Job], bool] = lambda job: True) -> list[Waiting]:
    """The most wanted job that can begin, and those in line that fit beside it."""
    ready = [one for one in waiting if is_ready(one.job)]
    if not ready:
        return []
    first, *others = ready
    group, users = [first], first.users
    for one in others:
        fits = len(group) < MOST_RUNS and users + one.users <= MOST_USERS
        if fits and one.key == first.key and _alike(one.left, first.left):
            group.append(one)
            users += one.users
    return group


def _alike(one: int, other: int) -> bool:
    return max(one, other) <= LIKE_LENGTH * max(min(one, other), 1)
