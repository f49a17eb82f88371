"""How fast a group of runs goes, and when it must stop so that all of it is saved and recorded in time.

In: a clock and the user updates that were done. Out: user updates a second, and whether the time is up. A group's first turn is not
counted towards its pace: it compiles kernels and fills memory.
"""

from collections.abc import Callable

CLOSING_SECONDS = 1.0
"""To save, state and measure one run when its group ends: a first guess, then as measured."""

Clock = Callable[[], float]


class Pace:
    """One for a sitting; `begin` for each group."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._closing = CLOSING_SECONDS
        self.begin()

    def begin(self) -> None:
        self._began = self._turned = self._ended = self._clock()
        self._last, self._turns = -1, 0
        self._updates = {"first turn": 0, "later": 0}

    def count(self, number: int, updates: int) -> None:
        """Run `number` of the group has done a round. Runs report in their order, so a turn begins where numbers fall."""
        if number <= self._last or not self._turns:
            self._turns += 1
        self._last, self._ended = number, self._clock()
        if self._turns == 1:
            self._turned = self._ended
        self._updates["first turn" if self._turns == 1 else "later"] += updates

    @property
    def is_first_turn(self) -> bool:
        return self._turns == 1

    def settled(self) -> None:
        """The device has finished the first turn, of which it may only have been told when the runs reported."""
        self._turned = self._ended = self._clock()

    @property
    def updates_per_second(self) -> float:
        """Of the group; 0 if it did nothing."""
        if self._updates["later"]:
            return self._updates["later"] / max(self._ended - self._turned, 1e-9)
        return self._updates["first turn"] / max(self._ended - self._began, 1e-9)

    def closed(self, runs: int) -> None:
        """All runs of the group are recorded: the next one knows what that takes."""
        self._closing = (self._clock() - self._ended) / max(runs, 1)

    def is_over(self, until: float | None, runs: int) -> bool:
        """Whether so many runs must be closed now to be done in time."""
        return until is not None and self._clock() + runs * self._closing >= until
