"""Curves over rounds, smoothed as the paper plots them.

Paper, section 3: "We evaluate accuracy every 20 rounds and plot metrics smoothed over 5 evaluations (100 rounds)". A
smoothed value is the mean of an evaluation and the four before it, so it does not depend on later evaluations.
"""

import math
import statistics
from collections.abc import Sequence

SMOOTHED_OVER = 5
Points = tuple[tuple[float, float], ...]


def smoothed(values: Sequence[float], over: int = SMOOTHED_OVER) -> list[float]:
    """Return the running mean of each value and up to `over - 1` values before it.

    >>> smoothed([1.0, 2.0, 6.0], over=2)
    [1.0, 1.5, 4.0]
    """
    windows = (values[max(0, i + 1 - over) : i + 1] for i in range(len(values)))
    return [math.fsum(window) / len(window) for window in windows]


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of two or more values and its standard error."""
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
