"""Mutants still fit the code, and every line marked `# DP:` has one. `make mutants` runs them."""

from pathlib import Path

from tests.mutants.run import ROOT, mutants

import unheard

SRC = Path(unheard.__file__).parent
NEAR = range(-3, 10)
"""Lines around a `# DP:` comment within which a mutant breaks what the comment says."""


def broken_lines() -> dict[Path, set[int]]:
    """For each file, the numbers of the lines that some mutant changes."""
    lines: dict[Path, set[int]] = {}
    for mutant in mutants():
        path = SRC / mutant.file
        source = path.read_text()
        for before, _ in mutant.edits:
            first = source[: source.index(before)].count("\n") + 1
            lines.setdefault(path, set()).update(range(first, first + before.count("\n") + 1))
    return lines


def test_the_text_that_a_mutant_changes_is_in_the_code_exactly_once():
    problems = []
    for mutant in mutants():
        try:
            source = (SRC / mutant.file).read_text()
            if mutant.broken(source) == source:
                problems.append(f"{mutant.name}: changes nothing")
        except (LookupError, OSError, SyntaxError) as error:
            problems.append(f"{mutant.name}: {error}")
    assert problems == []


def test_the_tests_that_must_fail_for_a_mutant_exist():
    problems = []
    for mutant in mutants():
        for test in mutant.tests:
            path, _, name = test.partition("::")
            if not (ROOT / path).is_file() or f"def {name}" not in (ROOT / path).read_text():
                problems.append(f"{mutant.name}: {test}")
    assert problems == []


def test_every_mutant_has_its_own_name():
    names = [mutant.name for mutant in mutants()]
    assert len(set(names)) == len(names) > 100


def test_every_line_that_the_guarantee_rests_on_has_a_mutant():
    broken = broken_lines()
    alone = []
    for path in sorted(SRC.rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if "# DP:" in line and not broken.get(path, set()) & {number + near for near in NEAR}:
                alone.append(f"{path.relative_to(SRC)}:{number}: {line.strip()}")
    assert not alone, "no mutant breaks:\n" + "\n".join(alone)
