"""Every line that the guarantee rests on is broken by some mutant of `make mutants`, and every mutant still fits the code."""

from pathlib import Path

from tests.mutants.run import mutants

import unheard

SRC = Path(unheard.__file__).parent
REACH = range(-3, 10)
"""Lines around a `# DP:` within which a mutant breaks what it says: the condition before it, or what comes behind the comment."""


def broken_lines() -> dict[Path, set[int]]:
    found: dict[Path, set[int]] = {}
    for mutant in mutants():
        path = SRC / mutant.file
        source = path.read_text()
        for before, _ in mutant.edits:
            first = source[: source.index(before)].count("\n") + 1
            found.setdefault(path, set()).update(range(first, first + before.count("\n") + 1))
    return found


def test_every_mutant_still_breaks_something():
    for mutant in mutants():
        source = (SRC / mutant.file).read_text()
        assert mutant.broken(source) != source, mutant.name


def test_every_line_that_the_guarantee_rests_on_has_a_mutant():
    broken = broken_lines()
    alone = []
    for path in sorted(SRC.rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if "# DP:" in line and not broken.get(path, set()) & {number + near for near in REACH}:
                alone.append(f"{path.relative_to(SRC)}:{number}: {line.strip()}")
    assert not alone, "no mutant breaks:\n" + "\n".join(alone)
