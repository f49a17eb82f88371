"""Compare several runs: compute everything that the tables, the plots and the page show.

A `Comparison` reads the run folders and chooses one of the runs as the baseline:

    compared = Comparison.read(["runs/plain", "runs/private"], as_if_users=1_000_000)
    compared.baseline.name          # 'plain': the first run without privacy
    compared.compute_costs          # the computation that each run needed to reach the baseline's accuracy
    compared.cautions               # sentences that say why the comparison may be unfair
    compared.as_json()              # all of this as plain data

**Cost of computation.** `compute_costs` counts the rounds and user updates that a run needs to become as accurate as
the baseline. In the paper, section 1, the baseline reaches 17.5 % in 4,120 rounds of 100 users, and the private run in
4,980 rounds of about 5,000 users: "a significant computational cost of roughly 60x".

    baseline = choose_baseline(records)
    for cost in compute_costs(records, baseline):
        print(cost.run, cost.rounds, cost.updates, cost.times)

**Hypothetical epsilon.** `hypothetical_epsilon` computes the epsilon that a run would have with the same rounds, clip
and noise if its users were drawn from a larger population. The paper does this in section 3, "Estimating the accuracy
of private models for large datasets": it trains with 100 users per round at some sigma, and accounts for 5,000 users
per round. That run did not happen, so the result is always labelled hypothetical.

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
from unheard.formatting import accountant_title, colour_numbers, epsilon_text, printable, small
from unheard.privacy.accountants import best_epsilon
from unheard.privacy.budget import default_delta
from unheard.privacy.events import PoissonGaussian
from unheard.privacy.statement import plain
from unheard.report.run_record import RunRecord, accuracy_points, epsilon_points, final_accuracy, read_runs


@dataclass(frozen=True, kw_only=True)
class ComputeCost:
    """The computation that one run needed until its smoothed AccuracyTop1 first reached a target."""

    run: str
    """The name of the run."""
    target: float
    """The AccuracyTop1 to reach."""
    best: float | None
    """The highest smoothed AccuracyTop1 of the run; None before the first evaluation."""
    rounds: int | None
    """The round of the first evaluation that reached the target; None if no evaluation reached it."""
    updates: float | None
    """The expected number of user updates in these rounds: `rounds` times the declared users per round."""
    times: float | None
    """`updates` divided by the updates of the baseline; None if either run did not reach the target."""


def choose_baseline(records: Sequence[RunRecord], name: str | None = None) -> RunRecord:
    """Return the run with which the others are compared.

    Args:
        records: The compared runs.
        name: The name or folder of the run. By default the first run without privacy is chosen, or the first run if all
            are private.

    Raises:
        InvalidValue: No run has the name.
    """
    if name is not None:
        name = printable(name)  # as the names of the records
        last = name.rstrip("/").split("/")[-1]
        named = [record for record in records if record.name == name.rstrip("/")]
        named += [record for record in records if record.name.split("/")[-1] == last]
        if named:
            return named[0]
        raise InvalidValue(f"--baseline {name} is not one of the runs: {', '.join(r.name for r in records)}.")
    return next((record for record in records if not record.is_private), records[0])


def compute_costs(
    records: Sequence[RunRecord], baseline: RunRecord, accuracy: float | None = None
) -> list[ComputeCost]:
    """Return the computation that each run needed to reach the same accuracy.

    Args:
        records: The runs.
        baseline: One of the runs; its updates are the unit of `ComputeCost.times`.
        accuracy: The target. By default the final smoothed accuracy of the baseline.

    Returns:
        One item per run; empty if `accuracy` is None and the baseline has not been evaluated.
    """
    target = final_accuracy(baseline) if accuracy is None else accuracy
    if target is None:
        return []
    costs, unit = [], _updates(baseline, _first_round_reaching(baseline, target))
    for record in records:
        rounds = _first_round_reaching(record, target)
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


def _first_round_reaching(record: RunRecord, target: float) -> int | None:
    """Return the round of the first evaluation whose smoothed AccuracyTop1 reaches the target; None if none does."""
    return next((int(point["round"]) for point in accuracy_points(record) if point["smoothed"] >= target), None)


def _updates(record: RunRecord, rounds: int | None) -> float | None:
    """Return the expected number of user updates in a number of rounds."""
    return None if rounds is None else rounds * record.users_per_round


@dataclass(frozen=True, kw_only=True)
class Hypothetical:
    """The guarantee that a run would have if its users were drawn from a larger population. That run did not happen."""

    run: str
    """The name of the real run, whose rounds, clip and noise are used."""
    users: int
    """The population of the hypothetical run."""
    users_per_round: float
    """The expected number of users per round of the hypothetical run."""
    epsilon: float
    """The smaller of the bounds of the RDP and PLD accountants, at `delta`."""
    delta: float
    """The default delta for a population of `users`."""
    accountant: str
    """The name of the accountant that computed `epsilon`."""

    @property
    def figure(self) -> str:
        """The epsilon and its accountant, for a table cell."""
        return f"{epsilon_text(self.epsilon)} by {accountant_title(self.accountant)}"

    @property
    def words(self) -> str:
        """A sentence with the epsilon that describes the hypothetical run and says that it did not happen."""
        return (
            f"Hypothetical: the same rounds, clip and noise, with about {self.users_per_round:,.10g} users per round drawn from "
            f"{self.users:,}, would cost ε = {self.figure} at δ = {small(self.delta)}. That run did not happen."
        )

    @property
    def words_for_several(self) -> str:
        """A sentence without the epsilon, for a table row with the hypothetical epsilons of several runs."""
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
        The hypothetical guarantee. None if nothing was charged, or if a ledger entry is not a round with Poisson
        sampling and independent Gaussian noise: the calculation is valid only for such rounds.

    Raises:
        InvalidValue: There are more users per round than users.
    """
    per_round = users_per_round or record.users_per_round
    if not 0 < per_round <= users:
        raise InvalidValue(
            f"{per_round:g} users per round cannot be drawn from {users:g} users: name more users, or fewer users per "
            "round."
        )
    events = Counter(entry.event for entry in record.entries)
    growth = per_round / record.users_per_round
    # An adaptive clip also releases a noisy count of the clipped updates. If its standard deviation is a fixed number,
    # that part of the cost stays the same when the number of users per round grows.
    count_noise_std = record.tables.get("clip", {}).get("count_noise_std")
    fixed = 0.0 if count_noise_std is None else (2 * count_noise_std) ** -2
    would_be = []
    for event, times in events.items():
        if not isinstance(event, PoissonGaussian):
            return None
        # Sigma and the clip norm stay the same and the denominator grows, so the noise multiplier of the average grows
        # in proportion to the users per round.
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
    """Several runs that are compared with one of them, the baseline."""

    records: Sequence[RunRecord]
    """The runs, in the order in which they are shown."""
    baseline: RunRecord
    """The run with which the others are compared; one of `records`."""
    accuracy: float | None = None
    """The AccuracyTop1 up to which computation is counted; None for the final accuracy of the baseline."""
    as_if_users: int | None = None
    """The population of the hypothetical runs; None if no hypothetical epsilon is wanted."""
    as_if_users_per_round: float | None = None
    """The users per round of the hypothetical runs; None for the users per round of each run."""

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
            baseline: The name or folder of the baseline. By default `choose_baseline` chooses it.
            options: The other fields of `Comparison`: `accuracy`, `as_if_users`, `as_if_users_per_round`.

        Raises:
            InvalidValue: There is no folder, a folder is named twice, or the baseline is not one of the runs.
            RunFolderError: A path is not a run folder, or a file in it is damaged.
            LedgerError: A ledger is damaged or was edited.
        """
        records = read_runs(paths)
        return cls(records=records, baseline=choose_baseline(records, baseline), **options)

    @cached_property
    def compute_costs(self) -> list[ComputeCost]:
        """The computation that each run needed to reach the target accuracy.

        The target is `accuracy`, or else the final accuracy of the baseline. Empty if there is no target because the
        baseline has not been evaluated.
        """
        return compute_costs(self.records, self.baseline, self.accuracy)

    @cached_property
    def hypotheticals(self) -> list[Hypothetical]:
        """The hypothetical epsilons of the private runs for which they can be computed; empty without `as_if_users`."""
        if self.as_if_users is None:
            return []
        private = (record for record in self.records if record.is_private)
        results = (hypothetical_epsilon(r, self.as_if_users, self.as_if_users_per_round) for r in private)
        return [result for result in results if result is not None]

    @cached_property
    def colours(self) -> dict[str, int]:
        """The colour number of each run, by run name (`formatting.colour_numbers`)."""
        numbers = colour_numbers([record.is_private for record in self.records])
        return {record.name: number for record, number in zip(self.records, numbers, strict=True)}

    @property
    def measured(self) -> dict[str, dict[str, Any]]:
        """The full measures by run name. Runs whose newest model has not been measured are left out."""
        return {record.name: dict(record.measures) for record in self.records if record.measures}

    @property
    def cautions(self) -> list[str]:
        """Sentences that say why the comparison may be unfair or incomplete."""
        cautions = []
        if len({record.facts.get("corpus") for record in self.records}) > 1:
            cautions.append(
                "These runs were not measured on the same corpus: their accuracies are about different text."
            )
        if len({(m["max_tokens"], m["unroll"]) for m in self.measured.values()}) > 1:
            cautions.append(
                "The full measures used different amounts of held-out text: measure again with the same --max-tokens."
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
        """Return the comparison as plain JSON data. An infinite number becomes the word "infinity"."""
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
    """Return the figures of one run for `Comparison.as_json`."""
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
