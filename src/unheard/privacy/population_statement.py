"""The privacy statement of a population: what may be claimed about its users after all runs together.

Input: the population's ledger. Output: the epsilon of everything that was charged to these users, and the epsilon of
each run alone, as data (`all_runs`) and as text (`render_all_runs`). The operator may choose a run after looking at the
results of earlier runs, so the claim is that of a privacy filter or of an odometer (`budget.py`).

    print(render_all_runs(all_runs(PopulationLedger.read("corpora/posts/ledger.jsonl"))))
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from unheard.errors import InvalidValue, LedgerError
from unheard.privacy.accountants import (
    Bound,
    Events,
    claim_rule,
    collapse,
    epsilon,
    epsilons,
    running_accountant,
    versions,
)
from unheard.privacy.budget import WHY, Budget, claim_of_run, odometer
from unheard.privacy.events import Event, ExampleGaussian, NonPrivate, Selection, from_record, has_rounds
from unheard.privacy.ledger import Entry, run_id
from unheard.privacy.population_ledger import (
    FILE,
    FORMAT,
    ChargedRun,
    PopulationLedger,
    charged_elsewhere,
    check_joined,
    check_one_ledger,
    known_ledgers,
    known_position,
    read_corpus_record,
    read_population_ledger,
    vocabulary_run,
)
from unheard.privacy.run_ledger import population_of, read_run_ledger
from unheard.privacy.statement import (
    SYNTHETIC,
    cautions,
    epsilon_rows,
    figure,
    is_synthetic,
    plain,
    protected,
    rounded_up,
    row,
)
from unheard.privacy.trade_off import figures, figures_of_pair
from unheard.run_folder import RunFolder

NOT_COVERED = [
    "runs that were not charged to this ledger: on copies of the store, or on other stores with the same users",
    "held-out users: metrics are exact functions of their text",
]


def other_runs(population: PopulationLedger, run: str, corpus: str) -> list[str]:
    """Return the names of the other runs that were charged to the users of a run.

    Args:
        population: The ledger of the users.
        run: The id of the run.
        corpus: The name of its corpus, whose private vocabulary is not another run.
    """
    own = (run, vocabulary_run(corpus))
    others = [
        charged_run for charged_run in population.runs.values() if charged_run.events and charged_run.id not in own
    ]
    return [str(charged_run.facts.get("name", charged_run.id)) for charged_run in others]


def charges_elsewhere(population: PopulationLedger) -> list[str]:
    """Return a warning if runs on the store of a ledger were also charged in another ledger; an empty list if not."""
    if population.store is None or not charged_elsewhere(population.store, population.path, population):
        return []
    return [_CHARGED_ELSEWHERE]


def all_runs(population: "PopulationLedger | _VocabularyCharges", *, delta: float | None = None) -> dict[str, Any]:
    """Compute the statement about all runs on one population.

    Args:
        population: The population's ledger.
        delta: The delta of the claim. None: the delta of the budget, or without a budget the smallest delta that a run
            declared.

    Returns:
        The statement as plain JSON data.

    Raises:
        InvalidValue: No delta is given, set or declared.
        UnprovenCombination: Several runs drew the same cohorts, so their rounds are not independent.
    """
    population.check_cohorts()
    events = population.events
    delta = _delta(population, delta)
    best, why, covered = _claimed(population, delta)
    attacker = figures_of_pair(best.epsilon, delta) if covered is None else figures(covered, delta)
    return plain(
        {
            "claim": _claim(best.epsilon, delta, best.accountant, population),
            "unit": "user",
            "adjacency": "add or remove one user with everything they wrote",
            "delta": delta,
            "epsilon": epsilons(events, delta),
            "claimed": {"epsilon": best.epsilon, "accountant": best.accountant, "of": claim_rule()},
            "basis": {"why": why},
            "attacker": {**attacker.record, "method": attacker.method},
            "charges": len(events),
            "runs": [_run_share(charged_run, delta) for charged_run in population.runs.values()],
            "budget": _budget(population),
            "warnings": _warnings(population, delta),
            "not_covered": NOT_COVERED,
            "ledger": population.position,
            "versions": versions(),
        }
    )


def store_statement(store: str | Path, *, delta: float | None = None) -> dict[str, Any]:
    """Compute the statement about a store before the first run: the cost of its vocabulary.

    Args:
        store: The folder of a token store that has no ledger yet.
        delta: The delta of the claim. None: the delta at which the vocabulary was released.

    Returns:
        The data of `all_runs`. For a public vocabulary, only a claim that nothing was charged.

    Raises:
        LedgerError: The store is a part of another store, its ledger is missing, or `corpus.json` cannot be read.
    """
    path = Path(store) / "corpus.json"
    if (path.parent / "part.json").is_file():
        raise LedgerError(f"{store} is a part of a store: what its users have spent is in the ledger of the whole one.")
    # DP: the store had a ledger, which is missing; a statement about the vocabulary alone would omit its charges.
    if known_position(path.parent, path.parent / FILE) is not None:
        raise LedgerError(
            f"{path.parent / FILE} is missing: what these users have spent was recorded there. Put it back."
        )
    # DP: these users were charged in a ledger outside the store.
    if elsewhere := known_ledgers(path.parent):
        raise LedgerError(
            f"The users of {store} were charged in {elsewhere[0]}, which its run files name. State that ledger: unheard statement "
            f"{elsewhere[0]}."
        )
    check_joined(path.parent)
    record = read_corpus_record(path.parent)
    try:
        vocabulary = record["vocabulary"]
        events = [from_record(record) for record in vocabulary.get("events", [])]
        kind = str(vocabulary["kind"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise LedgerError(
            f"{path} cannot be read, so what the vocabulary of this store cost cannot be known. Put an intact copy back."
        ) from None
    if not events:
        public = "public" if kind == "public" else "declared public"
        return {
            "claim": f"nothing was charged to the users of this store: its vocabulary ({kind}) is {public}",
            "charges": 0,
            "runs": [],
            "warnings": [*[SYNTHETIC] * ("fitted_to" in record), _NO_LEDGER],
        }
    charged_run = ChargedRun(id="vocabulary", facts={"name": "the private vocabulary"}, events=events)
    spent = all_runs(
        _VocabularyCharges(runs={charged_run.id: charged_run}, store=path.parent),
        delta=vocabulary.get("delta") if delta is None else delta,
    )
    return {**spent, "warnings": [*spent["warnings"], _NO_LEDGER]}


_NO_LEDGER = (
    "this store has no ledger yet: the first run begins it. If a run was trained on these users before, its ledger was "
    "moved or removed, and what was spent is not counted here: put it back."
)


_CHARGED_ELSEWHERE = (
    "NOT COUNTED HERE: runs on the same store were also charged in another ledger. `unheard statement STORE` says which, "
    "and how to count all runs in one."
)
"""It names no path, because it may stand on a page or a card."""


@dataclass(frozen=True, kw_only=True)
class _VocabularyCharges:
    """Takes the place of a population's ledger before the first run. Has only the events of the store's vocabulary."""

    runs: dict[str, ChargedRun]
    store: Path
    budget: Budget | None = None
    position: dict[str, Any] = field(default_factory=dict)
    is_filter: bool = False

    def check_cohorts(self) -> None:
        """Do nothing: there are no runs that could have drawn the same cohorts."""

    @property
    def events(self) -> list[Event]:
        """The events of all runs, in the order of the runs."""
        return [event for charged_run in self.runs.values() for event in charged_run.events]


def _has_synthetic_text(population: "PopulationLedger | _VocabularyCharges") -> bool:
    """Whether the store of a ledger has synthetic text that was fitted to the users of another store."""
    folder = population.path.parent if population.store is None else population.store
    return (folder / "corpus.json").is_file() and "fitted_to" in read_corpus_record(folder)


def find_population_ledger(path: Path, wanted: bool) -> PopulationLedger | None:
    """Read the population ledger that belongs to a ledger file.

    Args:
        path: A population's ledger, or a run's ledger in its run folder.
        wanted: For a run's ledger, whether to look up the ledger of the run's population.

    Returns:
        The ledger at `path` if it is a population's; the ledger of the run's population if that is wanted; else None.

    Raises:
        LedgerError: The ledger of the run's population is not where the run file says, is damaged, does not list the
            run, or is not the only one that the store was charged in; or the run's own ledger is damaged.
    """
    first = _first_line(path)
    # A file in a store counts as a population's ledger even if its first line is damaged; reading it raises the error.
    if first.get("ledger") == FORMAT or (path.parent / "corpus.json").is_file():
        return _only_ledger(read_population_ledger(path.parent, path))
    if not wanted:
        return None
    folder = RunFolder(path.parent)
    ledger, population = read_run_ledger(folder), population_of(folder)
    if population is None:
        raise LedgerError(
            f"The ledger of the run's store is not where {folder.run_file} says. Name the store itself: unheard statement STORE."
        )
    # DP: a ledger that was created again after this run would give a total without it.
    if run_id(ledger) not in population.runs:
        raise LedgerError(
            f"{population.path} does not list this run: it belongs to other users, or was created again after the run. Put "
            "back the ledger to which the run was charged, or name a store: unheard statement STORE."
        )
    return _only_ledger(population)


def _only_ledger(population: PopulationLedger) -> PopulationLedger:
    """Return the ledger. Raise `LedgerError` if runs on its store were charged in another one too."""
    if population.store is not None:
        check_one_ledger(population.store, population.path, population)
    return population


def _claimed(population: "PopulationLedger | _VocabularyCharges", delta: float) -> tuple[Bound, str, Events | None]:
    """Return the bound that may be claimed for all runs together, the reason, and the events whose cost is claimed.

    The events are None if the claim is not the cost of a list of events at `delta`: with a filter, with an odometer,
    and for a run that is longer than declared.
    """
    budget = population.budget
    if budget is not None and population.is_filter and delta >= budget.delta:
        bound = Bound(epsilon=budget.epsilon, accountant="the declared budget, an RDP filter")
        why = (
            "the budget was declared before the first round, and every round was checked against it: it holds whatever "
            "was chosen after a look at results"
        )
        return bound, why, None
    with_rounds = [charged_run for charged_run in population.runs.values() if has_rounds(charged_run.events)]
    if len(with_rounds) > 1:
        counts, failure = collapse(population.events)
        why = (
            "the runs may have been chosen after a look at the results of earlier ones, and no budget was declared before "
            "the first: an odometer covers that, at a price. `unheard budget` before the first run costs less"
        )
        return odometer(counts, failure, delta), why, None
    own = with_rounds[0] if with_rounds else None
    past = [event for charged_run in population.runs.values() if charged_run is not own for event in charged_run.events]
    rounds: list[Entry] = []
    if own is not None:
        # DP: the charge for a selection comes before the rounds, as in the run's own ledger: further rounds of the
        # selected run may have been chosen after the selection.
        selected = sum(1 for _ in takewhile(lambda event: isinstance(event, Selection), own.events))
        past += own.events[:selected]
        numbered = enumerate(zip(own.events[selected:], own.rounds[selected:], strict=True))
        rounds = [Entry(event=event, round=i if round < 0 else round, hash="") for i, (event, round) in numbered]
    declared = None if own is None else own.facts.get("declared")
    facts: dict[str, Any] = {"start": {"charges": len(past)}, "run_id": "of the run", "declared": declared}
    entries = [*(Entry(event=event, round=0, hash="") for event in past), *rounds]
    claim = claim_of_run(facts, entries, delta)
    bound = Bound(epsilon=claim.epsilon, accountant=claim.accountant)
    return bound, WHY[claim.basis], claim.events if claim.delta == delta else None


def _first_line(path: Path) -> dict[str, Any]:
    """Read the first line of a file, to learn which kind of ledger it is. The line is not verified.

    Returns:
        The record of the line; empty if the line is not JSON.
    """
    try:
        with open(path, "rb") as file:
            record = json.loads(file.readline(1 << 24))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def render_all_runs(statement: Mapping[str, Any]) -> str:
    """Render the statement of `all_runs` as a page of plain text."""
    return "\n".join(_lines(statement)) + "\n"


def _delta(population: "PopulationLedger | _VocabularyCharges", delta: float | None) -> float:
    """Return the given delta, or the delta of the budget, or the smallest delta that a run declared.

    The smallest delta is the cautious choice: it gives the largest epsilon.
    """
    if delta is not None:
        return delta
    if population.budget is not None:
        return population.budget.delta
    declared = [m.facts["delta"] for m in population.runs.values() if isinstance(m.facts.get("delta"), float)]
    if not declared:
        raise InvalidValue("No run on this population has declared a delta: give one with --delta.")
    return min(declared)


def _claim(total: float, delta: float, accountant: str, population: "PopulationLedger | _VocabularyCharges") -> str:
    """Return the guarantee over all runs as one line of text."""
    if math.isinf(total):
        without_noise = sorted(str(m.facts.get("name", m.id)) for m in population.runs.values() if _has_no_noise(m))
        why = f"without noise: {', '.join(without_noise)}" if without_noise else "no epsilon holds at this delta"
        return f"no guarantee over all runs: epsilon is infinite ({why})"
    # DP: rounded up, as in the statement of a run.
    pair = f"({rounded_up(total)}, {rounded_up(delta, 3)})"
    facts = [charged_run.facts for charged_run in population.runs.values()]
    users = protected(_has_synthetic_text(population) or any(map(is_synthetic, facts)))
    return f"{pair}-differential privacy for {users} over all runs together, by {accountant}"


def _run_share(charged_run: ChargedRun, delta: float) -> dict[str, Any]:
    """Return the entry of one run in the statement, with the epsilon of this run alone."""
    return {
        "run": charged_run.id,
        "name": charged_run.facts.get("name", "not named"),
        "charges": len(charged_run.events),
        "alone": {
            "epsilon": epsilon(charged_run.events, delta, running_accountant(charged_run.events)),
            "accountant": running_accountant(charged_run.events),
        },
        "came_with": charged_run.facts.get("came_with", 0),
    }


def _budget(population: "PopulationLedger | _VocabularyCharges") -> dict[str, Any] | None:
    budget = population.budget
    if budget is None:
        return None
    return {**budget.record, "spent": budget.running(population.events).epsilon, "is_filter": population.is_filter}


def _has_no_noise(charged_run: ChargedRun) -> bool:
    return any(isinstance(event, NonPrivate) for event in charged_run.events)


def _warnings(population: "PopulationLedger | _VocabularyCharges", delta: float) -> list[str]:
    """Return a warning for each fact that weakens the guarantee, over all runs."""
    warnings = [SYNTHETIC] * _has_synthetic_text(population)
    if isinstance(population, PopulationLedger):
        # DP: the total is not one over all runs if some of them were charged elsewhere.
        warnings += charges_elsewhere(population)
    for charged_run in population.runs.values():
        name = charged_run.facts.get("name", charged_run.id)
        if (charged_run.facts.get("randomness") or {}).get("mode") == "reproducible":
            warnings.append(
                f"REPRODUCIBLE NOISE in run '{name}': THE GUARANTEE DOES NOT HOLD against anyone who knows the seed."
            )
            if charged_run.has_repeats:
                warnings.append(
                    f"run '{name}' was repeated: its folders share their noise. If it ran on several engines or kinds of "
                    "machine, release the models of one folder only: the difference of two has no noise in it."
                )
            if "streams" not in charged_run.facts["randomness"]:
                warnings.append(
                    f"run '{name}' was begun by an older version: it shares its noise with other runs of its seed on these "
                    "users, and the total does not cover the difference of their models."
                )
        if _has_no_noise(charged_run):
            warnings.append(f"run '{name}' added no noise: epsilon over all runs is infinite.")
        if any(isinstance(event, Selection) for event in charged_run.events):
            warnings.append(f"run '{name}' is the best of a secret number of runs: nothing of the others may be shown.")
        if charged_run.facts.get("came_with"):
            warnings.append(
                f"run '{name}' came here with {charged_run.facts['came_with']} charges from another ledger: whatever else that one "
                "holds is not counted here. Declare the two stores one population (unheard budget STORE --same-users OTHER)."
            )
        keys = ("population", "drop_duplicates", "start", "synthetic")
        facts = {key: charged_run.facts.get(key) for key in keys}
        examples = [event for event in charged_run.events if isinstance(event, ExampleGaussian)]
        warnings += [f"run '{name}': {caution}" for caution in cautions(facts, examples, delta)]
    return warnings


def _lines(statement: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the statement as text."""
    yield "PRIVACY STATEMENT OF A POPULATION: ALL RUNS TOGETHER"
    yield ""
    yield f"  {statement['claim']}"
    for warning in statement["warnings"]:
        yield f"  !! {warning}"
    if not statement["charges"]:
        return
    yield ""
    yield from epsilon_rows(statement, has_notes=False)
    yield row("why this claim", statement["basis"]["why"])
    attacker = statement["attacker"]
    if attacker["mu"] is not None:
        yield row("mu-GDP", f"{rounded_up(attacker['mu'])} for all deltas from {rounded_up(statement['delta'])} up")
    for rate in attacker["true_positive_rates"]:
        at = f"{100 * rate['false_positive_rate']:g} % false positives"
        yield row("attacker", f"at most {rounded_up(100 * rate['at_most'])} % true positives at {at}")
    if budget := statement["budget"]:
        spent = f"{rounded_up(budget['spent'])} of {figure(budget['epsilon'])} spent"
        yield row("budget", f"{spent} at delta {budget['delta']:.3g}, by {budget['accountant']}")
    else:
        yield row("budget", "none set for all runs (unheard budget STORE --epsilon E)")
    yield ""
    for i, run in enumerate(statement["runs"]):
        alone = f"epsilon {rounded_up(run['alone']['epsilon'])} alone by {run['alone']['accountant']}"
        charges = "1 charge" if run["charges"] == 1 else f"{run['charges']:,} charges"
        yield row("runs" if i == 0 else "", f"{run['name']}: {charges}, {alone}")
    for i, line in enumerate(statement["not_covered"]):
        yield row("not covered" if i == 0 else "", line)
