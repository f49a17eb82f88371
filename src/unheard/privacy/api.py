"""The privacy functions of the public API: `unheard.epsilon`, `unheard.plan` and `unheard.statement`.

They need neither torch nor a corpus. The command line offers the same as `unheard plan` and `unheard statement`.

    unheard.epsilon(users=100_000, users_per_round=1000, noise_multiplier=1.0, rounds=1000)      # what would it cost?
    unheard.plan(users=100_000, users_per_round=1000, rounds=1000, epsilon=2.0)                  # how much noise?
    unheard.statement("runs/first")                                                              # what did it cost?
"""

from pathlib import Path
from typing import Any

from unheard.errors import RunFolderMissing
from unheard.privacy.planner import CostEstimate, Solution, default_delta, solve
from unheard.privacy.run_ledger import read_run_ledger
from unheard.privacy.statement import statement as ledger_statement


def epsilon(
    *,
    users: int,
    users_per_round: float,
    noise_multiplier: float,
    rounds: int,
    delta: float | None = None,
    accountant: str = "best",
) -> float:
    """The epsilon that a run with Poisson sampling and Gaussian noise would have. Hypothetical: no run is needed.

    The paper's headline figure (section 1) by its own accountant, and by a tighter one:

    >>> import unheard
    >>> paper = dict(users=763_430, users_per_round=5000, noise_multiplier=1.0, rounds=5000, delta=1e-9)
    >>> round(unheard.epsilon(**paper, accountant="moments"), 3)
    4.634
    >>> round(unheard.epsilon(**paper, accountant="rdp"), 3)
    4.183

    Args:
        users: The population: how many users there are, as you may say in public.
        users_per_round: The expected number of users in a round. Each user is drawn with probability users_per_round /
            users.
        noise_multiplier: z, the standard deviation of the noise in units of the sensitivity.
        rounds: Rounds of training.
        delta: The delta of the guarantee, below 1 / users. None: users^-1.1, as in the paper.
        accountant: "moments" (the paper's), "rdp", "pld", or "best" for the smallest valid bound.

    Returns:
        Epsilon at delta, for adding or removing one user with everything that the user wrote.

    Raises:
        InvalidValue: A value is out of its range.
    """
    estimate = CostEstimate(
        population=users,
        users_per_round=users_per_round,
        noise_multiplier=noise_multiplier,
        rounds=rounds,
        delta=default_delta(users) if delta is None else delta,
    )
    return estimate.bound(accountant).epsilon


def plan(
    *,
    users: int,
    epsilon: float,
    users_per_round: float | None = None,
    noise_multiplier: float | None = None,
    rounds: int | None = None,
    delta: float | None = None,
    accountant: str = "best",
) -> Solution:
    """Find the value that meets a target epsilon: the least noise, the most users per round, or the most rounds.

    >>> import unheard
    >>> solution = unheard.plan(users=100_000, users_per_round=1000, rounds=1000, epsilon=2.0, accountant="rdp")
    >>> solution.solved_for
    'noise_multiplier'
    >>> solution.bound.epsilon <= 2.0
    True

    Args:
        users: The population: how many users there are, as you may say in public.
        epsilon: The target.
        users_per_round: The expected number of users in a round.
        noise_multiplier: z, the standard deviation of the noise in units of the sensitivity.
        rounds: Rounds of training. Leave out exactly one of these three: it is solved for.
        delta: The delta of the guarantee, below 1 / users. None: users^-1.1, as in the paper.
        accountant: "moments" (the paper's), "rdp", "pld", or "best" for the smallest valid bound.

    Returns:
        The cheapest solution that was found and its bound. Hypothetical: it belongs to a run that has not happened.

    Raises:
        InvalidValue: Not exactly one value is left out, a value is out of its range, or the target is out of reach.
    """
    return solve(
        population=users,
        epsilon=epsilon,
        users_per_round=users_per_round,
        noise_multiplier=noise_multiplier,
        rounds=rounds,
        delta=delta,
        accountant=accountant,
    )


def statement(folder: str | Path, *, delta: float | None = None) -> dict[str, Any]:
    """The privacy statement of a run, computed from its ledger alone.

    >>> import unheard
    >>> unheard.statement("runs/first")["unit"]
    'user'

    Args:
        folder: A run folder. The statement follows from its ledger.jsonl; the checkpoints, the model and the
            population's ledger are asked whether that ledger is whole.
        delta: The delta of the claim. None: the declared one.

    Returns:
        The statement as plain JSON data: the claim, epsilon by each accountant, what was charged, and warnings.

    Raises:
        RunFolderMissing: The folder has no ledger.
        LedgerError: The ledger is damaged, shortened, rolled back or of another run.
    """
    path = Path(folder) / "ledger.jsonl"
    if not path.is_file():
        raise RunFolderMissing(f"{folder} holds no ledger.jsonl: name the folder that `unheard train --out` wrote.")
    ledger = read_run_ledger(folder)
    return ledger_statement(ledger.facts, ledger.entries, delta=delta)
