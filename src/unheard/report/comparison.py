"""Compare several runs: everything that the terminal and the page show, computed once.

A `Comparison` reads the run folders and chooses a baseline among them:

    compared = Comparison.read(["runs/plain", "runs/private"], as_if_users=1_000_000)
    compared.baseline.name          # 'plain': the first run without privacy
    compared.compute_costs          # rounds and user updates to the baseline's accuracy
    compared.cautions               # sentences on what makes the comparison unfair
    compared.as_json()              # all of it as plain data

**The computation that privacy costs**: rounds and user updates until a run is as accurate as the baseline. Paper,
section 1: the baseline reaches 17.5 % in 4,120 rounds of 100 users, the private run in 4,980 rounds of about 5,000: "a
significant computational cost of roughly 60x".

    baseline = choose_baseline(records)
    for cost in compute_costs(records, baseline):
        print(cost.run, cost.rounds, cost.updates, cost.times)

**The epsilon of a run that did not happen**: the same rounds, clip and noise, with users drawn from a larger
population. Paper, section 3, "Estimating the accuracy of private models for large datasets": train with 100 users per
round at some sigma, and account for 5,000 users per round. The result is always labelled hypothetical.

    result = hypothetical_epsilon(RunRecord.read("runs/private"), users=1_000_000, users_per_round=5000)
    print(result.words)         # Hypothetical: the same rounds, clip and noise, ... That run did not happen.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from unheard.errors import InvalidValue
from unheard.formatting import accountant_title, colour_numbers, epsilon_text, small
from unheard.privacy.accountants import best_epsilon
from unheard.privacy.events import PoissonGaussian
from unheard.privacy.planner import default_delta
from unheard.privacy.statement import plain
from unheard.report.run_record import RunRecord, accuracy_points, epsilon_points, final_accuracy, read_runs


@dataclass(frozen=True, kw_only=True)
class ComputeCost:
    """The computation of one run until its smoothed AccuracyTop1 first reached the target."""

    run: str
    target: float
    """The AccuracyTop1 to reach."""
    best: float | None
    """The highest smoothed AccuracyTop1 of the run; None before the first evaluation."""
    rounds: int | None
    """None if the target has not been reached."""
    updates: float | None
    """Expected user updates up to that round: rounds times the declared users per round."""
    times: float | None
    """`updates` divided by the updates of the baseline."""


def choose_baseline(records: Sequence[RunRecord], name: str | None = None) -> RunRecord:
    """Return the run that the others are compared with: by default the first without privacy, else the first.

    Args:
        records: The compared runs.
        name: The name or folder of a run; None for the default.

    Raises:
        InvalidValue: No run has the name.
    """
    if name is not None:
        for record in records:
            if name.rstrip("/").split("/")[-1] == record.name.split("/")[-1] or name == record.name:
                return record
        raise InvalidValue(f"--baseline {name} is none of the runs: {', '.join(r.name for r in records)}.")
    return next((record for record in records if not record.is_private), records[0])


def compute_costs(
    records: Sequence[RunRecord], baseline: RunRecord, accuracy: float | None = None
) -> list[ComputeCost]:
    """Rounds and updates of each run to the same accuracy.

    Args:
        records: The runs.
        baseline: One of the runs; its updates are the unit of `ComputeCost.times`.
        accuracy: The target. By default the final smoothed accuracy of the baseline.

    Returns:
        One item per run; empty if there is no target because the baseline has not been evaluated.
    """
    target = final_accuracy(baseline) if accuracy is None else accuracy
    if target is None:
        return []
    costs, unit = [], _updates(baseline, _first_round(baseline, target))
    for record in records:
        rounds = _first_round(record, target)
        updates = _updates(record, rounds)
        costs.append(
            ComputeCost(
                run=record.name,
                target=target,
                best=max((point["smoothed"] for point in accuracy_points(record)), default=None),
                rounds=rounds,
                updates=updates,
                times=updates / unit if updates is not None and unit else None,
            )
        )
    return costs


def _first_round(record: RunRecord, target: float) -> int | None:
    return next((int(point["round"]) for point in accuracy_points(record) if point["smoothed"] >= target), None)


def _updates(record: RunRecord, rounds: int | None) -> float | None:
    return None if rounds is None else rounds * record.users_per_round


@dataclass(frozen=True, kw_only=True)
class Hypothetical:
    """The guarantee that a run would have with more users."""

    run: str
    """The run whose rounds, clip and noise are taken."""
    users: int
    """The population of the hypothetical run."""
    users_per_round: float
    epsilon: float
    delta: float
    accountant: str
    """The accountant of the smallest bound."""

    @property
    def figure(self) -> str:
        """The epsilon and its accountant."""
        return f"{epsilon_text(self.epsilon)} by {accountant_title(self.accountant)}"

    @property
    def words(self) -> str:
        """The epsilon in a sentence that describes the run it would belong to. Shown wherever the number is shown."""
        return (
            f"Hypothetical: the same rounds, clip and noise, with about {self.users_per_round:,.10g} users per round drawn from "
            f"{self.users:,}, would cost ε = {self.figure} at δ = {small(self.delta)}. That run did not happen."
        )

    @property
    def words_for_several(self) -> str:
        """`words` for a row with the figures of several runs."""
        return (
            f"Hypothetical: the same rounds, clip and noise of each run, with users drawn from {self.users:,}, at δ = "
            f"{small(self.delta)}. Those runs did not happen."
        )


def hypothetical_epsilon(record: RunRecord, users: int, users_per_round: float | None = None) -> Hypothetical | None:
    """Compute the epsilon that a run would have if its users were drawn from a larger population.

    Args:
        record: The run.
        users: The population of the hypothetical run. Its delta is the default for that population.
        users_per_round: Expected users per round of the hypothetical run. By default those of the run.

    Returns:
        None for a run with an event other than Poisson sampling with Gaussian noise, to which the calculation does not
        apply.

    Raises:
        InvalidValue: More users per round than users.
    """
    per_round = users_per_round or record.users_per_round
    if not 0 < per_round <= users:
        raise InvalidValue(
            f"{per_round:g} users per round cannot be drawn from {users:g} users: name more users, or fewer."
        )
    events = Counter(entry.event for entry in record.entries)
    growth = per_round / record.users_per_round
    # With an adaptive clip the noise on the count of clipped updates may be a fixed number: it does not grow with the
    # users.
    count_noise_std = record.tables.get("clip", {}).get("count_noise_std")
    fixed = 0.0 if count_noise_std is None else (2 * count_noise_std) ** -2
    would_be = []
    for event, times in events.items():
        if not isinstance(event, PoissonGaussian):
            return None
        # sigma and S stay and the denominator grows, so the noise multiplier grows in proportion to the users per
        # round.
        z = ((event.noise_multiplier**-2 - fixed) / growth**2 + fixed) ** -0.5
        would_be.append((PoissonGaussian(sampling_prob=per_round / users, noise_multiplier=z), times))
    if not would_be:
        return None
    delta = default_delta(users)
    bound = best_epsilon(would_be, delta)
    return Hypothetical(
        run=record.name,
        users=users,
        users_per_round=per_round,
        epsilon=bound.epsilon,
        delta=delta,
        accountant=bound.accountant,
    )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Several runs, one of which is the baseline."""

    records: Sequence[RunRecord]
    baseline: RunRecord
    accuracy: float | None = None
    """The accuracy to which computation is compared; None: the baseline's final accuracy."""
    as_if_users: int | None = None
    """Population of the hypothetical runs; None: there are none."""
    as_if_users_per_round: float | None = None
    """Users per round of the hypothetical runs; None: as in each run."""

    @classmethod
    def read(
        cls,
        paths: Sequence[str | Path],
        *,
        baseline: str | None = None,
        **options: Any,
    ) -> "Comparison":
        """Read run folders and compare them.

        Args:
            paths: Run folders, each named once.
            baseline: Name of the run to compare with. By default the first run without privacy, else the first run.
            options: The other fields of `Comparison`: `accuracy`, `as_if_users`, `as_if_users_per_round`.

        Raises:
            InvalidValue: No folder, a folder named twice, or a baseline that is none of the runs.
            RunFolderError: A path is not a run folder.
            LedgerError: A ledger is damaged or was edited.
        """
        records = read_runs(paths)
        return cls(records=records, baseline=choose_baseline(records, baseline), **options)

    @cached_property
    def compute_costs(self) -> list[ComputeCost]:
        """Computation to the same accuracy, one item per run; empty before the first evaluation of the baseline."""
        return compute_costs(self.records, self.baseline, self.accuracy)

    @cached_property
    def hypotheticals(self) -> list[Hypothetical]:
        """The hypothetical epsilon of each private run, if `as_if_users` is set."""
        if self.as_if_users is None:
            return []
        private = (record for record in self.records if record.is_private)
        results = (hypothetical_epsilon(r, self.as_if_users, self.as_if_users_per_round) for r in private)
        return [result for result in results if result is not None]

    @cached_property
    def colours(self) -> dict[str, int]:
        """The number of each run's colour by its name (`formatting.colour_numbers`)."""
        numbers = colour_numbers([record.is_private for record in self.records])
        return {record.name: number for record, number in zip(self.records, numbers, strict=True)}

    @property
    def measured(self) -> dict[str, dict[str, Any]]:
        """The full measures by run name, of the runs that have them."""
        return {record.name: dict(record.measures) for record in self.records if record.measures}

    @property
    def cautions(self) -> list[str]:
        """Sentences on what makes the comparison unfair or incomplete."""
        cautions = []
        if len({record.facts.get("corpus") for record in self.records}) > 1:
            cautions.append(
                "These runs were not measured on the same corpus: their accuracies are about different text."
            )
        if len({(m["max_tokens"], m["unroll"]) for m in self.measured.values()}) > 1:
            cautions.append(
                "The full measures read different amounts of held-out text: measure again with one --max-tokens."
            )
        if len({record.rounds for record in self.records}) > 1:
            cautions.append("These runs have different numbers of rounds.")
        for record in self.records:
            planned = record.tables.get("training", {}).get("rounds")
            if isinstance(planned, int) and record.rounds < planned:
                cautions.append(f"{record.name} is at round {record.rounds:,} of {planned:,}.")
            if not record.measures:
                cautions.append(f"{record.name} has no full measures of its newest model: unheard evaluate --full.")
        return cautions

    def as_json(self) -> dict[str, Any]:
        """The comparison as plain JSON data; infinity is written as the word."""
        return plain(
            {
                "baseline": self.baseline.name,
                "cautions": self.cautions,
                "runs": [_run(record) for record in self.records],
                "reach": [vars(cost) for cost in self.compute_costs],
                "hypothetical": [{**vars(result), "note": result.words} for result in self.hypotheticals],
            }
        )


def _run(record: RunRecord) -> dict[str, Any]:
    """One run as values that JSON can hold."""
    return {
        "run": record.name,
        "rounds": record.rounds,
        "users_per_round": record.users_per_round,
        "epsilon": record.epsilon,
        "delta": record.delta,
        "accountant": record.statement["claimed"]["accountant"],
        "accuracy_by_round": accuracy_points(record),
        "epsilon_by_round": epsilon_points(record),
        "measures": record.measures,
    }
