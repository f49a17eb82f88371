"""A saved statement is compared with the ledger in full; only what its version did not write may be missing."""

import json

import pytest

from unheard.errors import RunFolderError
from unheard.privacy import saved_statement
from unheard.privacy.events import Gaussian, PoissonGaussian
from unheard.privacy.ledger import Entry
from unheard.privacy.saved_statement import EPSILON_SLACK, SMALLEST_FIGURE, check_saved_statement
from unheard.privacy.statement import compute_statement

ROUND = PoissonGaussian(sampling_prob=1.0, noise_multiplier=9.0)
ENTRIES = [Entry(event=ROUND, round=i, hash=f"hash {i}") for i in range(4)]
FACTS = {"population": 100, "delta": 1.23456e-3}
VERSIONS = (None, "0.1.0", "0.1.7", "0.2.0", "0.10.0", "1.0.0", "nothing", 7)
"""Versions of the package that a table can name. Without one, the newest is assumed."""


def is_old(version) -> bool:
    return version in ("0.1.0", "0.1.7")


def table(version) -> dict | None:
    return None if version is None else {"unheard": version}


@pytest.fixture
def check(tmp_path):
    """Return a function that says which entries of a statement differ from the ledger."""

    def checked(saved, facts, entries=ENTRIES, **more) -> set[str]:
        path = tmp_path / "statement.json"
        path.write_text(saved if isinstance(saved, str) else json.dumps(saved))
        message = ""
        try:
            check_saved_statement(path, facts, entries, **more)
        except RunFolderError as error:
            message = str(error)
        assert not message or (str(path) in message and "Delete it" in message)
        names = message.partition("differ in: ")[2].partition(". The ledger gives")[0]
        return set(names.split(", ")) if names else {"damaged"} if message else set()

    return checked


@pytest.mark.parametrize("of_ledger", VERSIONS)
@pytest.mark.parametrize("of_statement", VERSIONS)
def test_only_if_ledger_and_statement_are_of_version_0_1_may_entries_be_missing(check, of_ledger, of_statement):
    """One of the two can be changed by hand; the newer one counts."""
    facts = {**FACTS, "software": table(of_ledger)}
    saved = {**compute_statement(facts, ENTRIES), "versions": table(of_statement)}
    assert check(saved, facts) == set()
    for name in ("ledger", "basis", "curve", "replace_one"):
        less = {key: value for key, value in saved.items() if key != name}
        is_fine = is_old(of_ledger) and is_old(of_statement) and name in ("ledger", "basis")
        assert check(less, facts) == (set() if is_fine else {name})
    for name in ("federated", "against_server", "correlated_noise", "audited"):  # nothing in the ledger says it
        assert check({**saved, name: {"epsilon": 0.1}}, facts) == {name}
    for name in ("ledger", "basis"):  # if the entry is there, it is compared
        assert check({**saved, name: {"of": "another"}}, facts) == {name}


@pytest.mark.parametrize("version", ["0.1.0", "0.2.0"])
@pytest.mark.parametrize("has_basis", [True, False])
@pytest.mark.parametrize("factor", [0.0, 0.5, 0.999, 1.0, 1.001, 2.0, "infinity", None])
def test_an_old_statement_may_have_a_larger_epsilon_of_replacing_a_user_and_never_a_smaller_one(
    check, version, has_basis, factor
):
    facts = {**FACTS, "software": table(version)}
    saved = {**compute_statement(facts, ENTRIES), "versions": table(version)}
    epsilon = saved["replace_one"]["epsilon"]
    changed = factor if factor is None or isinstance(factor, str) else factor * epsilon
    accountant = saved["replace_one"]["accountant"] if changed == epsilon else "another"
    saved["replace_one"] = {"epsilon": changed, "accountant": accountant}
    if not has_basis:
        del saved["basis"]
    is_larger = factor == "infinity" or (isinstance(factor, float) and factor > 1)
    is_fine = changed == epsilon or (is_larger and version == "0.1.0" and not has_basis)
    differ = check(saved, facts) - {"basis"}
    assert differ == (set() if is_fine else {"replace_one"})
    if not is_fine:
        assert check({**saved, "replace_one": changed}, facts) - {"basis"} == {"replace_one"}


@pytest.mark.parametrize("charges", [*range(-2, 7), None, "2", 2.0, True])
@pytest.mark.parametrize("may_be_older", [True, False])
def test_a_statement_may_cover_only_the_first_charges_of_its_ledger_if_that_is_allowed(check, charges, may_be_older):
    number = charges if type(charges) is int else 4
    older = compute_statement(FACTS, ENTRIES[: max(0, number)])
    saved = {**older, "ledger": {**older["ledger"], "charges": charges}}
    differ = check(saved, FACTS, may_be_older=may_be_older)
    is_fine = charges == 4 or (type(charges) is int and 0 <= charges < 4 and may_be_older)
    assert (differ == set()) == is_fine
    if is_fine:
        head = {**saved, "ledger": {**saved["ledger"], "head": "another"}}
        assert check(head, FACTS, may_be_older=may_be_older) == {"ledger"}


@pytest.mark.parametrize("content", ["", "{", "[]", "7", "null", "[" * 100_000, '"x"'])
def test_a_file_that_is_no_statement_is_damaged(check, content):
    assert check(content, FACTS) == {"damaged"}


def test_the_claim_may_be_rounded_to_the_nearest_and_has_no_other_words_or_numbers(check):
    """Earlier versions wrote it so. Rounding up gives another text for these numbers."""
    content = compute_statement(FACTS, ENTRIES)
    epsilon, words = content["claimed"]["epsilon"], content["claim"].partition(")")[2]
    former = f"({epsilon:.4g}, {FACTS['delta']:.3g}){words}"
    assert former != content["claim"]
    assert check({**content, "claim": former}, FACTS) == set()
    others = [f"({epsilon:.3g}, {FACTS['delta']:.3g}){words}", f"({epsilon * 0.99:.4g}, {FACTS['delta']:.3g}){words}"]
    others += [f"({epsilon:.4g}, {FACTS['delta'] / 2:.3g}){words}", former + ".", former.replace("every", "each"), None]
    for claim in others:
        assert check({**content, "claim": claim}, FACTS) == {"claim"}
    free = compute_statement(FACTS, [Entry(event=Gaussian(noise_multiplier=1e-12), round=0, hash="")])
    assert free["claimed"]["epsilon"] == "infinity"
    assert check({**free, "claim": former}, FACTS, [Entry(event=Gaussian(noise_multiplier=1e-12), round=0, hash="")])


@pytest.mark.parametrize("expected", [1e-300, 1e-9, SMALLEST_FIGURE, 1e-3, 1.0, 50.0])
def test_two_computations_of_a_figure_may_differ_by_the_slack_and_no_more(expected):
    allowed = EPSILON_SLACK * max(expected, SMALLEST_FIGURE)
    for sign in (-1, 1):
        assert saved_statement._agree(expected + sign * 0.99 * allowed, expected)
        assert not saved_statement._agree(expected + sign * 1.01 * allowed, expected)
    for other in (str(expected), None, [expected], {"epsilon": expected}):
        assert not saved_statement._agree(other, expected)
        assert not saved_statement._agree(expected, other)


@pytest.mark.parametrize("delta", [6.4e-4, 1e-5, 3.4e-7, 1e-8])
def test_a_delta_that_is_a_fiftieth_larger_or_smaller_is_noticed(delta):
    for factor in (0.98, 1.02, 100):
        assert not saved_statement._agree(factor * delta, delta)
        assert not saved_statement._agree({"curve": [[1.0, factor * delta]]}, {"curve": [[1.0, delta]]})
