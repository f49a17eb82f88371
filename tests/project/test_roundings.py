"""Every rounding of a number on which the guarantee depends is in the table below, with its direction.

If q, z, delta or epsilon is rounded between the run file and the mechanism, the ledger or a statement, the proof is about
another number. The test scans the source for calls that round. It fails for a call without a row, and for a row without a
call.
"""

import ast
from collections import Counter
from pathlib import Path

import unheard

SRC = Path(unheard.__file__).parent
SCANNED = ("audit", "federated", "mechanism", "privacy", "report", "training", "tuning", "updates")
FILES = ("config.py", "randomness.py", "run_folder.py", "corpus/private_vocabulary.py", "corpus/store.py")
ROUNDS = {"round", "rint", "floor", "ceil", "trunc", "around", "fix", "quantize"}
ROUNDS |= {"round_", "floor_", "ceil_", "trunc_"}
TABLE = {
    "audit/one_run.py:audit_one_run": ("float(f)", "the signal of a round, to count equal rounds together"),
    "corpus/private_vocabulary.py:release": ("rint", "noise to whole votes, which the proof of the release covers"),
    "corpus/private_vocabulary.py:threshold": ("ceil", "up: fewer words pass"),
    "federated/node.py:_updates": ("round", "a weight back to the integer that it was made from"),
    "federated/server.py:_parties": ("ceil ceil", "the number of nodes that are asked"),
    "mechanism/aggregation.py:_largest": ("floor", "down: the largest square of the integers of one user"),
    "mechanism/aggregation.py:_quotient_grid": ("floor", "the exponent of a power of two"),
    "mechanism/aggregation.py:_whole_units": ("rounding_mode", "towards zero: truncation cannot raise a norm"),
    "mechanism/aggregation.py:average": ("round", "the quotient, whose rounding is part of the sensitivity"),
    "mechanism/aggregation.py:noised_grid": ("floor", "the exponent of a power of two"),
    "mechanism/clipping.py:next_norm": ("round", "the noise of the count to whole numbers"),
    "mechanism/exact_normal.py:round_exactly": ("round", "a first guess, which is then decided exactly"),
    "mechanism/exact_normal.py:_tail": ("floor ceil", "outwards: an interval that holds the value"),
    "mechanism/exact_normal.py:rounded": ("rint", "where float64 decides it"),
    "mechanism/correlated.py:rounded_onto_grid": ("round", "noise to whole units"),
    "privacy/accountants.py:_a_little_worse": ("floor ceil", "z down and q up: the cost rises"),
    "privacy/budget.py:_rounded_up": ("floor", "the next number of rounds in the table, at least one more"),
    "privacy/budget.py:limit": ("ceil", "up: the next doubling"),
    "privacy/budget.py:odometer": ("ceil", "up: the next filter"),
    "privacy/noise_choice.py:_least_multiplier": ("ceil", "up: more noise"),
    "privacy/planner.py:_largest": ("floor", "a number of rounds or users to try"),
    "privacy/planner.py:_scale": ("floor float(f)", "numbers to try, each of which is then verified"),
    "privacy/statement.py:rounded_up": ("floor", "the last digit, to which one is added: up, for print"),
    "report/page.py:_success_rate": ("ceil", "up, for print"),
    "training/new_run_file.py:new_run_file": ("float(f)", "delta as it is written, to which z is solved"),
    "tuning/output.py:users_for": ("ceil", "up: more users, less noise than was tried"),
    "updates/user_update.py:units": ("floor", "down: a weight of at most 1"),
}


def roundings(path: Path) -> Counter[tuple[str, str]]:
    """Return the calls that round, in each function of a file."""
    counted: Counter[tuple[str, str]] = Counter()

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef):
            function = node.name
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name == "float" and any(isinstance(argument, ast.JoinedStr | ast.Call) for argument in node.args):
                counted[function, "float(f)"] += any(isinstance(part, ast.JoinedStr) for part in ast.walk(node))
            elif name in ROUNDS:
                counted[function, name] += 1
        if isinstance(node, ast.keyword) and node.arg in ("ndigits", "decimals", "rounding_mode"):
            counted[function, node.arg] += 1
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(path.read_text()), "")
    return counted


def test_every_rounding_is_in_the_table_and_every_row_is_a_rounding():
    paths = [path for folder in SCANNED for path in (SRC / folder).rglob("*.py") if "kernels" not in path.name]
    paths += [SRC / name for name in FILES]
    scanned: Counter[tuple[str, str]] = Counter()
    for path in paths:
        for (function, operation), times in roundings(path).items():
            scanned[f"{path.relative_to(SRC).as_posix()}:{function}", operation] += times
    listed = Counter((where, one) for where, (operations, _) in TABLE.items() for one in operations.split())
    assert scanned - listed == Counter(), "list these calls in TABLE, with their direction, or do not round"
    assert listed - scanned == Counter()
