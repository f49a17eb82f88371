"""Print a table of the error of independent and correlated noise at equal epsilon, for seven settings.

    python -m benchmarks.correlated_noise                       # all rows; about five minutes on one CPU core
    python -m benchmarks.correlated_noise --rows 1 3
    python -m benchmarks.correlated_noise --jax-privacy         # also compute each error with jax-privacy

The error is the root mean square, over the rounds, of the noise in one coordinate of the sum of all updates so far, in
units of S (for independent noise: z sqrt((T + 1) / 2)). "no sampling" means that users take part with a minimum
separation instead of being sampled. z is the smallest multiple of 0.001 whose epsilon, by the smaller of PLD and RDP,
is at most the target.
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np

from unheard.privacy.noise_choice import NoiseOption, compare_noise

ROWS = (
    (342_477, 1000, 2052, 8.0, 1e-6),
    (342_477, 1000, 2052, 2.0, 1e-6),
    (10_782, 100, 3000, 8.0, 1e-5),
    (763_430, 5000, 5000, 3.9, 1e-9),
    (750_000, 1000, 1500, 2.0, 3.4e-7),
    (750_000, 1000, 1500, 1.0, 3.4e-7),
    (8815, 1000, 300, 8.0, 1e-5),
)
"""The settings: users, users per round, rounds, epsilon, delta."""
HEADER = (
    "| users, per round, rounds, ε, δ | independent | banded, cyclic Poisson | banded, no sampling | BLT, no sampling |\n"
    "| --- | ---: | ---: | ---: | ---: |"
)


def cell(option: NoiseOption | None, independent: NoiseOption) -> str:
    """Return the cell of one kind of noise: error, change against independent noise, separation b and z."""
    if option is None:
        return "-"
    if option is independent:
        return f"{option.rms_error:.2f} (z {option.noise_multiplier:g})"
    assert option.factorisation is not None
    change = option.rms_error / independent.rms_error - 1
    return f"{option.rms_error:.2f} ({change:+.0%}, b {option.factorisation.separation}, z {option.noise_multiplier:g})"


def compare_with_jax_privacy(option: NoiseOption) -> str:
    """Return a line with the error and sensitivity of the option's matrix as jax-privacy computes them.

    For a banded matrix the line also has the error of the matrix that jax-privacy finds for as many bands.
    """
    import jax
    from jax_privacy.matrix_factorization import buffered_toeplitz, toeplitz

    matrix = option.factorisation
    assert matrix is not None
    rounds = matrix.rounds
    with jax.enable_x64():
        if matrix.strategy == "blt":
            blt = buffered_toeplitz.BufferedToeplitz.build(matrix.decays, matrix.scales)
            column = np.asarray(blt.toeplitz_coefs(rounds))
            sensitivity = math.sqrt(
                toeplitz.minsep_sensitivity_squared(column, matrix.separation, max_participations=matrix.participations)
            )
            best = ""
        else:
            column = np.array(matrix.coefficients)
            sensitivity = math.sqrt(toeplitz.sensitivity_squared(column, n=rounds))
            theirs = toeplitz.optimize_banded_toeplitz(n=rounds, bands=len(column), max_optimizer_steps=250)
            best = f", its optimum {option.noise_multiplier * math.sqrt(toeplitz.loss(strategy_coef=theirs, n=rounds)):.4f}"
        error = math.sqrt(np.mean(np.asarray(toeplitz.per_query_error(strategy_coef=column, n=rounds))))
    figure = option.noise_multiplier * sensitivity * error
    return f"{option.kind}: {option.rms_error:.4f}, by jax-privacy {figure:.4f} (sensitivity {sensitivity:.6f}){best}"


def main() -> None:
    """Print the rows of the table and, on request, write the results to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", type=int, nargs="+", default=list(range(1, len(ROWS) + 1)), help="rows to compute, from 1 to 7"
    )
    parser.add_argument("--accountant", default="best")
    parser.add_argument("--most-bands", type=int, default=1024)
    parser.add_argument("--jax-privacy", action="store_true")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    print(HEADER, flush=True)
    results = []
    for number in options.rows:
        users, per_round, rounds, epsilon, delta = ROWS[number - 1]
        began = time.monotonic()
        compared = compare_noise(
            population=users,
            users_per_round=per_round,
            rounds=rounds,
            epsilon=epsilon,
            delta=delta,
            accountant=options.accountant,
            most_bands=options.most_bands,
        )
        by_kind = {(option.kind, option.sampling): option for option in compared}
        kinds = (
            ("independent", "poisson"),
            ("banded", "cyclic_poisson"),
            ("banded", "min_separation"),
            ("blt", "min_separation"),
        )
        cells = [cell(by_kind.get(kind), compared[0]) for kind in kinds]
        print(f"| {users:,}, {per_round:,}, {rounds:,}, {epsilon:g}, {delta:g} | {' | '.join(cells)} |", flush=True)
        results.append(
            {
                "row": number,
                "seconds": round(time.monotonic() - began, 1),
                "options": [
                    {
                        "kind": option.kind,
                        "sampling": option.sampling,
                        "noise_multiplier": option.noise_multiplier,
                        "epsilon": option.epsilon,
                        "accountant": option.accountant,
                        "rms_error": option.rms_error,
                        "vectors": option.vectors,
                        "matrix": option.factorisation and option.factorisation.to_record(),
                    }
                    for option in compared
                ],
            }
        )
        if options.jax_privacy:
            for option in compared[1:]:
                print("   ", compare_with_jax_privacy(option), flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
