"""How many may work at once on this machine, and how work says how far it is.

In: nothing. Out: a number of cores, and the form of a progress call. Apart from the grouping, so that what makes or narrows a store
needs no database.
"""

import os
from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Called with a step's name and the part of it that is done."""


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
