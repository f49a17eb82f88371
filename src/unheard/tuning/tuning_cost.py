"""What the tuning itself has cost the people it was done on: the composition of all its runs, read from their ledgers.

In: trials with their folders. Out: epsilon of all of them together, and the sentences that must stand beside a choice made on
people's own text. A stage without noise makes it infinite, whatever is trained afterwards.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unheard.corpus.store import TokenStore
from unheard.engines.distributed.store_replicas import identity
from unheard.errors import InvalidValue
from unheard.privacy.accountants import Bound, best_epsilon
from unheard.privacy.events import Event, NonPrivate
from unheard.privacy.ledger import Ledger
from unheard.privacy.population_ledger import FILE, PopulationLedger
from unheard.run_folder import RunFolder
from unheard.training.run import Run
from unheard.tuning.trials import Trial


@dataclass(frozen=True, kw_only=True)
class Spending:
    """The cost of every trial together, to whom, and at what delta."""

    corpus: str
    is_proxy: bool
    runs: int
    charges: int
    without_noise: int
    delta: float
    bound: Bound
    noised: Bound
    """Of the charges that had noise, alone: what would be left if the others had not happened."""

    def record(self) -> dict[str, Any]:
        return {
            "corpus": self.corpus,
            "is_proxy": self.is_proxy,
            "runs": self.runs,
            "charges": self.charges,
            "charges_without_noise": self.without_noise,
            "delta": self.delta,
            "epsilon": self.bound.epsilon,
            "accountant": self.bound.accountant,
            "epsilon_of_the_noised": self.noised.epsilon,
        }

    @property
    def sentences(self) -> list[str]:
        epsilon = (
            "infinity" if math.isinf(self.bound.epsilon) else f"{self.bound.epsilon:.4g} by {self.bound.accountant}"
        )
        spent = (
            f"What this tuning cost: ε = {epsilon} at δ = {self.delta:.2e}, the composition of its {self.runs} runs "
            f"({self.charges} charges, {self.without_noise} of them without noise)."
        )
        if self.is_proxy:
            return [
                spent,
                "It was charged to the people of the proxy corpus, who are not protected by it. The people of the run's own corpus "
                "had no part in any trial and paid nothing.",
            ]
        return [
            spent,
            "It was charged to the very people that the plan is for. Whatever the plan's own statement will say, over all runs "
            "they have no guarantee (unheard statement --all-runs). Tune on public or proxy text: --corpus PROXY --population N.",
            "No smaller bound holds for a sweep: one for the best of several private runs needs a number of trials that the tool "
            "itself draws (unheard tune --select).",
        ]


def spending(trials: Sequence[Trial], *, is_proxy: bool) -> Spending:
    """Read every trial's ledger; nothing about the cost is known from anywhere else."""
    ledgers = [Ledger.read(RunFolder.open(trial.folder).ledger) for trial in trials]
    events: list[Event] = [event for ledger in ledgers for event in ledger.events]
    delta = min(ledger.facts["delta"] for ledger in ledgers)
    noised = [event for event in events if not isinstance(event, NonPrivate)]
    return Spending(
        corpus=Path(trials[0].run.corpus).name,
        is_proxy=is_proxy,
        runs=len(ledgers),
        charges=len(events),
        without_noise=len(events) - len(noised),
        delta=delta,
        bound=best_epsilon(events, delta),
        noised=best_epsilon(noised, delta),
    )


def check_other_population(run: Run, proxy: Path) -> None:
    """As far as stores can tell: a proxy is neither the run's own corpus, nor a copy of it, nor charged to the same ledger. Nothing
    can be said of a corpus that is not on this machine."""
    own = Path(run.corpus)
    is_same = proxy.resolve() == own.resolve()
    if not is_same and (own / "corpus.json").is_file() and (proxy / "corpus.json").is_file():
        stores = [TokenStore.open(path) for path in (own, proxy)]
        is_copy = bool((identity(stores[0], stores[0].train) == identity(stores[1], stores[1].train)).all())
        is_same = is_copy or (_ledger(proxy) is not None and _ledger(proxy) in (_ledger(own), _ledger(run.ledger)))
    if is_same:
        # DP: what is said of a proxy's tuning, that the run's own people paid nothing, would be false.
        raise InvalidValue(
            f"{proxy} is the run's own corpus, or holds the same people, and no proxy for it. Leave out --corpus and --population, "
            "or give other people's text."
        )


def _ledger(place: str | Path | None) -> Path | None:
    """Where a store's people are charged, wherever their ledger has moved to."""
    file = None if place is None else Path(place) / FILE if Path(place).is_dir() else Path(place)
    return PopulationLedger.read(file).path if file is not None and file.is_file() else None
