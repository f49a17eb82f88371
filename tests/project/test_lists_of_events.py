"""Every expression that takes a part of a list of events, phases, members or ledgers is in a table with its reason.

If an event is lost between a ledger and a statement, a selected run or a total, its cost is not stated. If a phase is
lost, it is not checked. The test scans the source for slices of such lists and for calls that drop repeated or later
items. It fails for an expression without a row, and for a row without an expression.
"""

import ast
import re
from pathlib import Path

import unheard

SRC = Path(unheard.__file__).parent
SCANNED = ("audit", "federated", "mechanism", "privacy", "report", "training", "tuning")
FILES = ("pipeline", "private_vocabulary", "store", "transform", "vocabulary")
LISTS = re.compile(
    r"(events(\(\))?|entries|records|charged|charges|items|members|phases|schedule|noises|trials|candidates|runs|ledgers)$"
)
COPIES = {"list", "tuple", "sorted", "reversed", "enumerate"}
DROPS = {"set", "frozenset", "fromkeys", "islice", "takewhile", "dropwhile", "unique", "Counter"}
TABLE = {
    "audit/lower_bound.py": {
        "Counter(events)": "counts equal rounds",
    },
    "audit/verification.py": {
        "entries[:past]": "the charges before the first round",
        "entries[past:]": "the rounds",
    },
    "privacy/budget.py": {
        "charged[:past]": "the charges before the first round",
        "entries[past:]": "the rounds so far, whose cost is claimed with that of the rounds to come",
        "items[past or 0:]": "the rounds, beside all that was charged",
        "self.phases[1:]": "the end of each phase is the beginning of the next",
    },
    "privacy/population_ledger.py": {
        "other._records[max(shared - 1, 0):]": "the lines that a copy of the ledger does not share",
        "entries[charged:]": "what a run was charged and its population was not",
    },
    "privacy/population_statement.py": {
        "own.events[:selected]": "the selection, which comes before the rounds",
        "own.events[selected:]": "the rounds that were added",
        "takewhile(lambda event: isinstance(event, Selection), own.events)": "counts the selection",
    },
    "privacy/run_ledger.py": {
        "ledger.entries[:source.length]": "what was charged before a model was saved",
    },
    "privacy/saved_statement.py": {
        "entries[:max(0, position['charges'])]": "the charges that a statement covers, to compare it with them",
    },
    "privacy/statement.py": {
        "items[:most]": "rows that are printed; the next row says how many there are",
    },
    "report/run_record.py": {
        "entries[self._seen:]": "charges since the last look, added to those before",
    },
    "report/tracking.py": {
        "items[first:first + 100]": "settings, a hundred at a time",
        "items[same:]": "evaluations that a tracker does not have yet",
        "records[1:]": "the records of TensorBoard's file without the first, which names the format",
    },
    "training/noise_state.py": {
        "entries[position:]": "the attempts of the newest mechanism",
    },
}


def parts_of_lists(path: Path) -> set[str]:
    """Return the slices of lists of events in a file, and the calls that drop items of such a list."""

    def is_list(node: ast.AST) -> bool:
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in COPIES and node.args:
            return is_list(node.args[0])
        return isinstance(node, ast.Name | ast.Attribute | ast.Call) and bool(LISTS.search(ast.unparse(node)))

    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice) and is_list(node.value):
            parts.add(ast.unparse(node))
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).split(".")[-1] in DROPS
            and any(map(is_list, node.args))
        ):
            parts.add(ast.unparse(node))
    return parts


def test_every_part_of_a_list_of_events_is_in_the_table_with_its_reason():
    paths = [path for folder in SCANNED for path in (SRC / folder).rglob("*.py") if "kernels" not in path.name]
    paths += [SRC / "corpus" / f"{name}.py" for name in FILES]
    scanned = {path.relative_to(SRC).as_posix(): parts_of_lists(path) for path in paths}
    listed = {file: set(rows) for file, rows in TABLE.items()}
    assert {file: parts for file, parts in scanned.items() if parts} == listed
