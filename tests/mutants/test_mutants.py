"""The mutants can still be applied: their texts are in the code, their tests exist. (`make mutants` runs them.)"""

from pathlib import Path

import pytest

import unheard
from tests.mutants.run import ROOT, mutants

SRC = Path(unheard.__file__).parent
MUTANTS = mutants()
by_mutant = pytest.mark.parametrize("mutant", MUTANTS, ids=[m.name for m in MUTANTS])


@by_mutant
def test_the_text_that_a_mutant_breaks_is_in_the_code_exactly_once(mutant):
    source = (SRC / mutant.file).read_text()
    assert mutant.broken(source) != source


@by_mutant
def test_the_tests_that_must_fail_for_it_exist(mutant):
    for test in mutant.tests:
        path, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / path).read_text()


def test_there_are_enough_and_each_has_a_name_of_its_own():
    assert len({m.name for m in MUTANTS}) == len(MUTANTS) >= 22
