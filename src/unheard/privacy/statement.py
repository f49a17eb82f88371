"""The privacy statement of a run: what may be claimed, under which assumptions, and what the guarantee does not cover.

    statement("runs/first")                     the statement of a run folder, as plain JSON data (`unheard.statement`)
    compute_statement(facts, entries)           the same from the facts and entries of a ledger
    render_text(compute_statement(...))         the statement as about 40 lines of text

A statement is computed from the ledger only; `train` writes it to `statement.json`. `render` in `statement_formats.py`
turns it into reports for reviewers and registries. In a statement, infinity is the word "infinity", which Python's
`float()` can read. Paper: Definition 1 (user-adjacent data sets), Theorem 1. Why statements should be published: Dwork,
Kohli and Mulligan, "Differential Privacy in Practice: Expose your Epsilons!" (2019).

>>> from unheard.privacy.events import PoissonGaussian
>>> rounds = [PoissonGaussian(sampling_prob=0.01, noise_multiplier=1.0)] * 10
>>> compute_statement({"population": 10_000, "delta": 1e-6}, rounds)["claim"]
'(0.5924, 1e-06)-differential privacy for every user, by pld'
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from unheard.errors import InvalidValue, RunFolderMissing
from unheard.privacy.accountants import (
    ACCOUNTANTS,
    CLAIMED,
    best_epsilon,
    claim_rule,
    epsilons,
    versions,
)
from unheard.privacy.budget import ADAPTIVE, DECLARED, PUBLIC_START, WHY, Claim, claim_of_run, default_delta
from unheard.privacy.events import (
    CorrelatedGaussian,
    DistributedGaussian,
    Event,
    ExampleGaussian,
    FailureProbability,
    Gaussian,
    NonPrivate,
    PoissonGaussian,
    Selection,
    accounted,
    against_server,
    to_record,
)
from unheard.privacy.ledger import Entry
from unheard.privacy.run_ledger import is_alone, read_run_ledger
from unheard.run_folder import RunFolder

CURVE_POINTS = 12
NOT_DECLARED = "not declared"
MOST_ROWS = 8

RELEASED = [
    "every model after every round, all intermediate models included",
    "anything computed from those models without looking at the users again",
]
# `unheard verify` compares these sentences, and those of `cautions`, with statement.json of older runs: do not reword.
NOT_COVERED = [
    "tuning and other runs on these users: this is about one run; `unheard statement --all-runs` adds up all of them",
    "evaluation: metrics on held-out users are computed without noise; those users have no guarantee",
    "other uses of these people's text, in other runs or elsewhere",
    "what is true of many users at once: the guarantee is about any one of them taking part or not",
]

SYNTHETIC = (
    "SYNTHETIC TEXT: the users of this store are not people. Their text was made without noise from that of other "
    "users, who have NO GUARANTEE."
)
_BEGAN_SYNTHETIC = (
    "SYNTHETIC TEXT: the run that this one began from learned from text that was made without noise from that of other "
    "users. They have NO GUARANTEE, even if they are users of this run."
)

ALONE = (
    "only the ledger was read: there are no other files of the run, so missing charges at its end cannot be detected. "
    "State the whole run folder."
)


def statement(folder: str | Path, *, delta: float | None = None) -> dict[str, Any]:
    """Compute the privacy statement of a run from its ledger.

    >>> import unheard
    >>> unheard.statement("runs/first")["unit"]
    'user'

    Args:
        folder: A run folder. The numbers come from its ledger.jsonl; the checkpoints, the model and the population's
            ledger serve to check that no entry of that ledger is missing.
        delta: The delta of the claim. None: the delta that the run declared.

    Returns:
        The statement as plain JSON data: the claim, epsilon by each accountant, what was charged, and warnings.

    Raises:
        RunFolderMissing: The folder has no ledger.
        LedgerError: The ledger is damaged, shortened, rolled back or belongs to another run.
    """
    path = Path(folder) / "ledger.jsonl"
    if not path.is_file():
        raise RunFolderMissing(f"{folder} holds no ledger.jsonl: name the folder that `unheard train --out` wrote.")
    ledger, alone = read_run_ledger(folder), is_alone(RunFolder(Path(folder)))
    return compute_statement(ledger.facts, ledger.entries, delta=delta, is_alone=alone)


def compute_statement(
    facts: Mapping[str, Any],
    events: Sequence[Entry | Event],
    *,
    delta: float | None = None,
    epsilon: float | None = None,
    is_alone: bool = False,
    accountants: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Compute the statement of a run from its ledger.

    Args:
        facts: The public facts of the run, from its ledger. A fact that is missing appears as "not declared".
        events: Everything that was charged, in order. With entries instead of events, the statement also says how many
            rounds were charged twice.
        delta: The delta of the claim. None: the declared delta, or users^-1.1 if none is declared.
        epsilon: An epsilon for which the statement shall also give the delta.
        is_alone: Whether the ledger was read without the other files of its run. The statement then has a warning.
        accountants: The names of the accountants; None for all. The claim is the smallest bound of those among them that
            may be claimed.

    Returns:
        The statement as plain JSON data.

    Raises:
        InvalidValue: No delta is given, and the facts declare neither a delta nor a population.
    """
    charged = [item.event if isinstance(item, Entry) else item for item in events]
    delta = _delta(facts, delta)
    claimed = claim_of_run(facts, events, delta)
    if accountants is not None and not set(CLAIMED) <= set(accountants):
        claimed = claimed.by(accountants)
    replaced = claimed.replace_one()
    return plain(
        {
            "claim": _claim(claimed.epsilon, delta, claimed.accountant, charged, protected(is_synthetic(facts))),
            "unit": "user",
            "adjacency": "add or remove one user with everything they wrote",
            "delta": delta,
            "epsilon": epsilons(charged, delta, accountants),
            "claimed": {
                "epsilon": claimed.epsilon,
                "accountant": claimed.accountant,
                "of": claimed.accountant if claimed.basis == ADAPTIVE else claim_rule(claimed.among),
            },
            "basis": {"of": claimed.basis, "why": WHY[claimed.basis], **_claimed_events(claimed)},
            "replace_one": {"epsilon": replaced.epsilon, "accountant": replaced.accountant},
            **_server(claimed),
            "curve": _curve(claimed),
            "asked": None if epsilon is None else {"epsilon": epsilon, "delta": claimed.delta_at(epsilon)},
            "population": facts.get("population", NOT_DECLARED),
            "sampling": facts.get("sampling", NOT_DECLARED),
            "weights": facts.get("weights", NOT_DECLARED),
            "estimator": facts.get("estimator", NOT_DECLARED),
            "update": facts.get("update", NOT_DECLARED),
            "phases": facts.get("phases", NOT_DECLARED),
            **{name: facts[name] for name in ("correlated_noise", "federated") if name in facts},
            "rounds": _rounds(events),
            "composed": _composed(charged),
            "vocabulary": facts.get("vocabulary", NOT_DECLARED),
            "vocabulary_cost": _vocabulary_cost(charged, delta, claimed.among),
            "start": facts.get("start", NOT_DECLARED),
            "randomness": facts.get("randomness", NOT_DECLARED),
            "released": RELEASED,
            "not_covered": NOT_COVERED,
            "warnings": [*cautions(facts, charged, delta), *[ALONE] * is_alone],
            "versions": versions(),
            "software": facts.get("software", NOT_DECLARED),
            "ledger": _ledger(events),
        }
    )


def plain(value: Any) -> Any:
    """Convert a value to strict JSON values: infinity becomes the word "infinity", which Python's `float()` can read.

    >>> plain({"epsilon": math.inf})
    {'epsilon': 'infinity'}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return "infinity" if value > 0 else "-infinity"
    return value


def _delta(facts: Mapping[str, Any], delta: float | None) -> float:
    """Return the given delta, or the declared delta, or the default for the declared population."""
    if delta is not None:
        return delta
    if facts.get("delta") is not None:
        return facts["delta"]
    if facts.get("population") is not None:
        return default_delta(facts["population"])
    raise InvalidValue("The ledger declares neither a delta nor a population: give a delta (--delta).")


def is_synthetic(facts: Mapping[str, Any]) -> bool:
    """Whether a run, or one that it began from, learned from synthetic text that was fitted to other users."""
    start = facts.get("start")
    return bool(facts.get("synthetic") or (isinstance(start, Mapping) and start.get("synthetic")))


def protected(is_synthetic: bool) -> str:
    """Return whom a claim is about, in words."""
    # DP: synthetic text is an exact function of the text that it was fitted to.
    return "every user except those to whom the synthetic text was fitted" if is_synthetic else "every user"


def _claim(epsilon: float, delta: float, accountant: str, events: Sequence[Event], users: str) -> str:
    """Return the guarantee for `users` as one line of text."""
    if math.isinf(epsilon):
        reasons = sorted({event.reason for event in events if isinstance(event, NonPrivate)})
        why = "; ".join(reasons) or "no epsilon holds at this delta for the noise that was added"
        return f"no guarantee: epsilon is infinite ({why})"
    # DP: rounded up: a claim with smaller numbers than the bound would be false.
    pair = f"({rounded_up(epsilon)}, {rounded_up(delta, 3)})"
    return f"{pair}-differential privacy for {users}, by {accountant}"


def _server(claimed: Claim) -> dict[str, Any]:
    """Return the epsilon against the server of a federated run with distributed noise; empty for every other run."""
    events = [item if isinstance(item, tuple) else (item, 1) for item in claimed.events]
    if not any(isinstance(event, DistributedGaussian) for event, _ in events):
        return {}
    # DP: computed from the same events as the claim against readers; a run that was stopped early claims all declared
    # rounds.
    seen = [(against_server(event), times) for event, times in events]
    bound = claimed.cost(seen)
    return {"against_server": {"epsilon": bound.epsilon, "accountant": bound.accountant, "amplified": False}}


def _claimed_events(claimed: Claim) -> dict[str, Any]:
    """Return the events of a claim that covers all declared rounds, not only the charged ones; else an empty table."""
    return {"composed": _composed(claimed.events)} if claimed.basis == DECLARED else {}


def _curve(claimed: Claim) -> list[dict[str, float]]:
    """Return points of delta(epsilon), from a quarter of the claimed epsilon to twice the claimed epsilon.

    The list is empty if the claimed epsilon is 0 or infinite.
    """
    if math.isinf(claimed.epsilon) or claimed.epsilon == 0:
        return []
    points = [claimed.epsilon * (0.25 + 1.75 * i / (CURVE_POINTS - 1)) for i in range(CURVE_POINTS)]
    return [{"epsilon": point, "delta": claimed.delta_at(point)} for point in points]


def _rounds(events: Sequence[Entry | Event]) -> dict[str, Any]:
    """Return the number of charged rounds, and how many of these charges repeat a round number."""
    numbers = [item.round for item in events if isinstance(item, Entry) and _is_a_round(item.event)]
    charged = [item.event if isinstance(item, Entry) else item for item in events]
    rounds = sum(event.rounds if isinstance(event, Selection) else _is_a_round(event) for event in charged)
    return {"charged": rounds, "redone": len(numbers) - len(set(numbers))}


def _ledger(events: Sequence[Entry | Event]) -> dict[str, Any]:
    """Return the number of charges and the hash of the last one. They identify the ledger that was read."""
    last = events[-1] if events else None
    return {"charges": len(events), "head": last.hash if isinstance(last, Entry) else NOT_DECLARED}


def _vocabulary_cost(events: Sequence[Event], delta: float, among: Sequence[str] = CLAIMED) -> dict[str, Any]:
    """Return the cost of the vocabulary alone: of the events that are not rounds. The claim includes this cost."""
    outside = [event for event in events if isinstance(event, Gaussian | FailureProbability)]
    if not outside:
        return {"events": 0}
    alone = best_epsilon(outside, delta, among)
    return {"events": len(outside), "epsilon": alone.epsilon, "delta": delta, "accountant": alone.accountant}


def _is_a_round(event: Event) -> bool:
    return isinstance(event, PoissonGaussian | CorrelatedGaussian | ExampleGaussian | NonPrivate)


def _composed(events: Sequence[Event | tuple[Event, int]]) -> list[dict[str, Any]]:
    """Return the records of the events that cost something, each with the number of times it happened."""
    counted: Counter[Event] = Counter()
    for item in events:
        event, times = item if isinstance(item, tuple) else (item, 1)
        if (charge := accounted(event)) is not None:
            counted[charge] += times
    return [{**to_record(event), "times": times} for event, times in sorted(counted.items(), key=repr)]


def cautions(facts: Mapping[str, Any], events: Sequence[Event], delta: float) -> list[str]:
    """Return a warning for each fact of a run that weakens its guarantee.

    Args:
        facts: The facts of the run's ledger, or some of them.
        events: The events that the run was charged for.
        delta: The delta of the claim.
    """
    warnings = []
    start = facts.get("start")
    start = start if isinstance(start, Mapping) else {}
    warnings += [SYNTHETIC] * bool(facts.get("synthetic")) + [_BEGAN_SYNTHETIC] * bool(start.get("synthetic"))
    for where, source in (("", facts), (" of the run that this one began from", start)):
        randomness = source.get("randomness")
        if isinstance(randomness, Mapping) and randomness.get("mode") == "reproducible":
            warnings.append(
                f"REPRODUCIBLE NOISE: the noise{where} was drawn from a known seed. "
                "THE GUARANTEE DOES NOT HOLD against anyone who knows the seed."
            )
        if source.get("drop_duplicates"):
            warnings.append(
                "posts that stood under several users were dropped before training, so one user's posts could depend on "
                "another's: the guarantee is about the corpus after dropping."
            )
    if PUBLIC_START in (start.get("from"), start.get("base")):
        warnings.append(
            "it began from a model that was declared public: that no user here had a part in it is taken on trust. "
            "The people of that public corpus are not protected by this guarantee."
        )
    population = facts.get("population")
    if isinstance(population, int) and population > 0 and delta >= 1 / population:
        warnings.append(
            f"delta {delta:.3g} is not below 1/users = {1 / population:.3g}: such a guarantee says very little."
        )
    for event in (event for event in events if isinstance(event, Selection)):
        warnings.append(
            f"it is the best of a secret number of runs ({event.drawn_from}, {event.mean_trials:g} on average): the guarantee is "
            "about this one alone, as long as nothing of the others is shown, nor how many there were."
        )
    if most := max((event.examples_per_user for event in events if isinstance(event, ExampleGaussian)), default=0):
        warnings.append(
            f"examples were drawn, not users, and at most {most} examples of each user were used: the guarantee is for a user "
            "with all of them. It is bounded by pld alone; rdp and moments have no bound for it."
        )
    if any(isinstance(event, NonPrivate) for event in events):
        warnings.append("not every round was private: epsilon is infinite.")
    return warnings


def render_text(statement: Mapping[str, Any]) -> str:
    """Render a statement as a page of plain text.

    Args:
        statement: The data of `statement.json`.
    """
    return "\n".join(_lines(statement)) + "\n"


def _lines(statement: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the statement as text."""
    yield "PRIVACY STATEMENT"
    yield ""
    yield f"  {statement['claim']}"
    for warning in statement["warnings"]:
        yield f"  !! {warning}"
    yield ""
    yield row("unit", statement["unit"])
    yield row("adjacency", statement["adjacency"])
    yield row("population", statement["population"])
    for name in ("sampling", "weights", "estimator", "update"):
        yield row(name, _in_words(statement[name]))
    rounds = statement["rounds"]
    again = f", {rounds['redone']} of them for rounds charged before (done again, or of the run that it began from)"
    yield row("rounds charged", f"{rounds['charged']}{again if rounds['redone'] else ''}")
    yield from _list("phases", _without_repeats(statement["phases"]))
    if "correlated_noise" in statement:
        yield row("correlated noise", _correlated_noise(statement["correlated_noise"]))
    yield row("vocabulary", _in_words(statement["vocabulary"]))
    yield row("vocabulary cost", _vocabulary_cost_in_words(statement["vocabulary_cost"]))
    yield row("randomness", _in_words(statement["randomness"]))
    yield ""
    yield from epsilon_rows(statement, has_notes=True)
    if "basis" in statement:  # not in statements of version 0.1
        yield row("why this claim", statement["basis"]["why"])
    replaced = statement["replace_one"]
    yield row("replace one user", f"{rounded_up(replaced['epsilon'])} (by {replaced['accountant']})")
    if server := statement.get("against_server"):
        yield row(
            "against server", f"{rounded_up(server['epsilon'])} (by {server['accountant']}): it knows who was drawn"
        )
    if statement["asked"]:
        asked = statement["asked"]
        yield row("asked", f"delta {rounded_up(asked['delta'])} at epsilon {rounded_up(asked['epsilon'])}")
    points = [f"{rounded_up(p['epsilon'])}: {rounded_up(p['delta'])}" for p in statement["curve"]]
    yield from _list("delta(epsilon)", points, most=99)
    yield ""
    yield from _list("covered", statement["released"])
    yield from _list("not covered", statement["not_covered"])
    yield row("computed with", _in_words(statement["versions"]))


def epsilon_rows(statement: Mapping[str, Any], *, has_notes: bool) -> Iterator[str]:
    """Yield the rows with delta, the epsilon of each accountant, and the claim.

    Args:
        statement: The statement of a run or of a population.
        has_notes: Whether the row of an accountant that is not claimed ends with its note (`Accountant.note`).
    """
    claimed = statement["claimed"]
    yield row("delta", rounded_up(statement["delta"]))
    for accountant, epsilon in statement["epsilon"].items():
        note = "  <- claimed" if accountant == claimed["accountant"] else ""
        if has_notes and not note and accountant in ACCOUNTANTS and ACCOUNTANTS[accountant].note:
            note = f"  ({ACCOUNTANTS[accountant].note})"
        yield row(f"epsilon, {accountant}", rounded_up(epsilon) + note)
    if claimed["accountant"] not in statement["epsilon"]:
        yield row("epsilon, claimed", f"{rounded_up(claimed['epsilon'])}  (by {claimed['accountant']})")


def row(name: str, value: Any) -> str:
    """Format one line of a statement: a name and its value in aligned columns."""
    return f"  {name:<18}{value}"


def _list(name: str, items: Any, most: int = MOST_ROWS) -> Iterator[str]:
    """Yield one row per item, with the name in the first row. After `most` rows, a last row says how many are left."""
    if not isinstance(items, list):
        yield row(name, _in_words(items))
        return
    for i, item in enumerate(items[:most]):
        yield row(name if i == 0 else "", _in_words(item))
    if len(items) > most:
        yield row("", f"... and {len(items) - most} more, in the JSON form")


def _without_repeats(phases: Any) -> Any:
    """Return the phases, without the `clip_norm` of a phase whose clip ends with the same number ("flat, S = 15")."""
    if not isinstance(phases, list):
        return phases
    kept = []
    for phase in phases:
        if isinstance(phase, Mapping) and str(phase.get("clip")).endswith(f", S = {figure(phase.get('clip_norm'))}"):
            phase = {key: value for key, value in phase.items() if key != "clip_norm"}
        kept.append(phase)
    return kept


def _correlated_noise(noise: Mapping[str, Any]) -> str:
    """Describe correlated noise in one line."""
    release = f"each {noise['block']} rounds are one release" if noise["strategy"] == "banded" else "one release in all"
    return (
        f"{noise['strategy']}, T = {noise['rounds']}, b = {noise['separation']}, k = {noise['participations']}, sensitivity "
        f"{figure(noise['sensitivity'])}, q = {figure(noise['sampling_prob'])}, z = {figure(noise['noise_multiplier'])}: {release}"
    )


def _vocabulary_cost_in_words(cost: Mapping[str, Any]) -> str:
    if not cost["events"]:
        return "nothing was charged for it"
    return f"epsilon {rounded_up(cost['epsilon'])} at delta {rounded_up(cost['delta'])} by itself, included below"


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_in_words(item)}" for key, item in value.items() if item is not None)
    return figure(value)


def figure(value: Any) -> str:
    """Format a float with four significant digits, and any other value with `str`."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def rounded_up(bound: float | str, digits: int = 4) -> str:
    """Format an upper bound with a few significant digits, rounded up so that the text is never below the bound.

    >>> rounded_up(0.0123411), rounded_up(2.0), rounded_up("infinity")
    ('0.01235', '2', 'infinity')
    """
    if not isinstance(bound, float) or bound <= 0:
        return figure(bound)
    text = f"{bound:.{digits}g}"
    if float(text) < bound:  # rounded down: add one unit of the last digit
        unit = 10.0 ** (math.floor(math.log10(float(text))) - digits + 1)
        text = f"{float(text) + unit:.{digits}g}"
    return text
