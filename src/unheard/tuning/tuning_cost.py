"""The privacy cost of a tuning itself: the composition of all its trials, read from their ledgers.

A sweep without noise has epsilon infinity for the users it was done on, whatever is trained afterwards. `tuning_cost`
computes the figure, and its `sentences` must accompany every choice. `check_other_population` checks, as far as stores
can tell, that a proxy corpus holds other users than the run's own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unheard.corpus.store import TokenStore
from unheard.engines.distributed.store_replicas import store_fingerprint
from unheard.errors import InvalidValue
from unheard.privacy.accountants import Bound, best_epsilon
from unheard.privacy.events import Event, NonPrivate
from unheard.privacy.population_ledger import FILE, PopulationLedger
from unheard.privacy.run_ledger import read_run_ledger
from unheard.run_folder import RunFolder
from unheard.training.run import Run
from unheard.tuning.trials import Trial


@dataclass(frozen=True, kw_only=True)
class TuningCost:
    """The cost of all trials together.

    Attributes:
        corpus: The name of the corpus whose users were charged.
        is_proxy: Whether that is a proxy corpus and not the run's own.
        runs: The number of trials.
        charges: The number of rounds that were charged.
        without_noise: How many of these rounds had no noise.
        delta: The delta of both bounds.
        bound: Epsilon of all charges.
        noised: Epsilon of the charges with noise alone, as if the others had not happened.
    """

    corpus: str
    is_proxy: bool
    runs: int
    charges: int
    without_noise: int
    delta: float
    bound: Bound
    noised: Bound

    def record(self) -> dict[str, Any]:
        """Returns the cost for `tuning.json`."""
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
        """The cost in words, and what it means for the users of the corpus."""
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
                "It was charged to the users of the proxy corpus, who are not protected by it. The users of the run's own corpus "
                "took part in no trial and paid nothing.",
            ]
        return [
            spent,
            "It was charged to the same users that the plan is for. Whatever the plan's own statement will say, over all runs "
            "they have no guarantee (unheard statement --all-runs). Tune on public or proxy text: --corpus PROXY --population N.",
            "No smaller bound holds for a sweep: a bound for the best of several private runs needs a number of trials that the "
            "tool itself draws (unheard tune --select).",
        ]


def tuning_cost(trials: Sequence[Trial], *, is_proxy: bool) -> TuningCost:
    """Computes the cost of the trials from their ledgers.

    Args:
        trials: All trials; each has a run folder.
        is_proxy: Whether they were trained on a proxy corpus.
    """
    ledgers = [read_run_ledger(RunFolder.open(trial.folder)) for trial in trials]
    events: list[Event] = [event for ledger in ledgers for event in ledger.events]
    delta = min(ledger.facts["delta"] for ledger in ledgers)
    noised = [event for event in events if not isinstance(event, NonPrivate)]
    return TuningCost(
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
    """Raises `InvalidValue` if a proxy is the run's own corpus, a copy of it, or charged to the same ledger.

    Nothing can be checked for a corpus that is not on this machine.
    """
    own = Path(run.corpus)
    is_same = proxy.resolve() == own.resolve()
    if not is_same and (own / "corpus.json").is_file() and (proxy / "corpus.json").is_file():
        stores = [TokenStore.open(path) for path in (own, proxy)]
        is_copy = bool(
            (store_fingerprint(stores[0], stores[0].train) == store_fingerprint(stores[1], stores[1].train)).all()
        )
        ledger = _ledger_path(proxy)
        is_same = is_copy or (ledger is not None and ledger in (_ledger_path(own), _ledger_path(run.ledger)))
    if is_same:
        # DP: what is said of a proxy's tuning, that the run's own people paid nothing, would be false.
        raise InvalidValue(
            f"{proxy} is the run's own corpus, or holds the same users, and no proxy for it. Leave out --corpus and --population, "
            "or give text of other users."
        )


def _ledger_path(path: str | Path | None) -> Path | None:
    """Returns the ledger that a store's users are charged in, following it if it was joined with another."""
    file = None if path is None else Path(path) / FILE if Path(path).is_dir() else Path(path)
    return PopulationLedger.read(file).path if file is not None and file.is_file() else None
