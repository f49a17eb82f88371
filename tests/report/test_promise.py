"""The sentences about the guarantee of a run."""

import math
import re
from dataclasses import replace

import pytest

import unheard
from tests.report.builders import with_statement
from tests.stores import uncharged_copy
from unheard.deployment.card import model_card
from unheard.errors import UnprovenCombination
from unheard.formatting import odds_factor, small
from unheard.privacy.statement import SYNTHETIC
from unheard.report.comparison import Comparison
from unheard.report.page import HEADLINES, STRONG, WEAK, _paragraphs, describe_promise, render_page
from unheard.report.run_record import RunRecord


@pytest.mark.parametrize(
    ("epsilon", "grade", "text"),
    [
        (math.log(3), "moderate", "more than 3 times as likely"),
        (
            math.log(3),
            "moderate",
            "right at most 75.1 times in 100",
        ),  # 75 % plus a small term for delta, rounded up
        (math.log(2.001), "strong", "more than 2.01 times as likely"),
        (0.1, "strong", "right at most 52.6 times in 100"),
        (20.0, "weak", "promises little"),
    ],
)
def test_the_guarantee_in_words(compared, epsilon, grade, text):
    private = replace(compared.records[1], population_ledger=None)
    statement = {**private.statement, "claimed": {"epsilon": epsilon, "accountant": "pld"}, "delta": 1e-4}
    words = describe_promise(with_statement(private, statement))
    assert words.grade == grade
    assert text in " ".join(words.paragraphs)


def test_a_seeded_run_has_no_guarantee_against_who_knows_the_seed(compared):
    private = replace(compared.records[1], population_ledger=None)
    statement = {**private.statement, "claimed": {"epsilon": 0.5, "accountant": "pld"}, "delta": 1e-4}
    seeded = {**statement, "warnings": ["REPRODUCIBLE NOISE: the noise was drawn from a known seed."]}
    assert describe_promise(with_statement(private, {**statement, "warnings": []})).grade == "strong"
    words = describe_promise(with_statement(private, seeded))
    assert (words.grade, words.headline) == ("none", "An experiment: no guarantee against anyone who knows the seed")


@pytest.mark.parametrize("ledger", ["own", "elsewhere"])
def test_a_run_on_synthetic_text_has_no_headline_of_a_guarantee(run, tmp_path, ledger):
    for name in ("first", "second"):
        list(unheard.train(replace(run, ledger=tmp_path / "people.jsonl"), tmp_path / name))
    record = RunRecord.read(tmp_path / "first")
    record = record if ledger == "own" else replace(record, population_ledger=None)
    words = describe_promise(with_statement(record, {**record.statement, "warnings": [SYNTHETIC]}))
    assert (words.grade, words.headline) == ("synthetic", HEADLINES["synthetic"])
    assert SYNTHETIC in words.warnings


def test_the_guarantee_counts_other_runs_on_the_same_users(compared):
    """`plain` added no noise, so over all runs epsilon is infinite, as `unheard statement --all-runs` says."""
    private = compared.records[1]
    assert "plain" in private.other_runs
    assert private.all_runs["claimed"]["epsilon"] == "infinity"
    words = describe_promise(private)
    assert words.grade == "none"
    assert words.headline == "No guarantee over all runs on these users"
    without_noise = re.search(r"Over all these runs ε is infinite \(without noise: ([^)]*)\)", words.paragraphs[0])
    assert "plain" in without_noise.group(1).split(", ")  # other tests may train more runs on this store
    assert "nothing of the other runs" in words.paragraphs[1]
    page = render_page(Comparison(records=[private], baseline=private))
    assert "for this run alone" in page
    assert words.headline in page


def test_the_guarantee_over_private_runs_is_their_composition(run, tmp_path):
    """The total is stated at the smallest delta that a run declared, and the run alone at its own delta."""
    for name, delta in (("first", 2.3e-3), ("second", 4.5e-4)):
        list(unheard.train(replace(run, ledger=tmp_path / "people.jsonl", delta=delta), tmp_path / name))
    record = RunRecord.read(tmp_path / "first")
    total = record.all_runs["claimed"]["epsilon"]
    assert total > record.epsilon
    words = describe_promise(record)
    assert f"Over all these runs ε = {total:.3g}"[:-1] in words.paragraphs[0]
    assert "(second)" in words.paragraphs[0]
    assert f"the ε of this run alone holds: {record.epsilon:.3g}"[:-1] in words.paragraphs[-1]
    with_accountant = r"[\d.]+ by (PLD|RDP|an RDP odometer)\b[^.]* at δ = "
    assert all(re.search(with_accountant, words.paragraphs[number]) for number in (0, -1))
    of_all, of_run = f"δ = {small(4.5e-4)}", f"δ = {small(2.3e-3)}"
    *together, alone = words.paragraphs
    assert of_all in together[0]
    assert of_run not in " ".join(together)
    assert of_run in alone
    assert tuple(together[1:]) == _paragraphs(total, 4.5e-4) != _paragraphs(record.epsilon, record.delta)


@pytest.mark.parametrize("seeded", ["first", "second"])
def test_a_known_seed_of_any_run_on_the_same_users_leaves_no_guarantee_over_all(run, tmp_path, seeded):
    """The report on either run warns of it, and names the run."""
    for name in ("first", "second"):
        training = replace(run.training, reproducible_seed=7 if name == seeded else None)
        list(unheard.train(replace(run, ledger=tmp_path / "people.jsonl", training=training), tmp_path / name))
    for name in ("first", "second"):
        record = RunRecord.read(tmp_path / name)
        assert math.isfinite(record.all_runs["claimed"]["epsilon"])
        words = describe_promise(record)
        assert (words.grade, words.headline) == ("none", HEADLINES["none"])
        assert any(f"REPRODUCIBLE NOISE in run '{seeded}'" in warning for warning in words.warnings)
        assert set(words.warnings) >= {warning[0].upper() + warning[1:] for warning in record.all_runs["warnings"]}
        assert "REPRODUCIBLE NOISE in run" in render_page(Comparison(records=[record], baseline=record))


def test_a_seed_that_only_the_statement_of_the_run_tells_leaves_no_guarantee_over_all(run, tmp_path):
    for name in ("first", "second"):
        list(unheard.train(replace(run, ledger=tmp_path / "people.jsonl"), tmp_path / name))
    record = RunRecord.read(tmp_path / "first")
    assert describe_promise(record).grade != "none"
    warnings = ["REPRODUCIBLE NOISE: the noise was drawn from a known seed."]
    words = describe_promise(with_statement(record, {**record.statement, "warnings": warnings}))
    assert (words.grade, words.headline) == ("none", HEADLINES["none"])
    assert set(warnings) <= set(words.warnings)


def test_a_page_and_a_card_say_that_runs_on_these_users_were_charged_in_another_ledger(run, tmp_path):
    uncharged_copy(run.corpus, tmp_path / "store")
    for name, ledger in (("first", None), ("second", tmp_path / "people.jsonl")):
        list(unheard.train(replace(run, corpus=tmp_path / "store", ledger=ledger), tmp_path / name))
    for name in ("first", "second"):
        record = RunRecord.read(tmp_path / name)
        assert record.other_runs == []
        (warning,) = (text for text in describe_promise(record).warnings if text.startswith("NOT COUNTED HERE"))
        assert warning.removesuffix(".") in model_card(tmp_path / name)


def test_the_guarantee_of_a_single_run_says_that_it_is_for_one_run(compared):
    alone = replace(compared.records[1], population_ledger=None)
    assert "ledger of its store is not on this machine" in describe_promise(alone).paragraphs[-1]


def test_runs_with_the_same_cohorts_have_no_joint_guarantee(compared):
    copy = replace(compared.records[1])

    class Refusing(type(copy)):
        @property
        def all_runs(self):
            raise UnprovenCombination("they drew the same cohorts")

    words = describe_promise(Refusing(**{name: getattr(copy, name) for name in copy.__dataclass_fields__}))
    assert words.grade == "none"
    assert "same cohorts" in words.paragraphs[0]


def among(record: RunRecord, others: list[str], total: dict | None) -> RunRecord:
    """Return a copy of a record on whose users other runs with these names were trained, and the total of all."""

    class Among(RunRecord):
        other_runs = others  # pyright: ignore[reportAssignmentType]

    copy = Among(**{name: getattr(record, name) for name in record.__dataclass_fields__})
    copy.__dict__.update(all_runs=total, statement=record.statement)
    return copy


EPSILONS = (0.7, 0.9, 3.0, 5.0, 9.5, 12.0)


@pytest.mark.parametrize(("of_run", "of_all"), [(a, b) for a in EPSILONS for b in EPSILONS if a < b])
def test_each_sentence_about_all_runs_has_the_figures_of_all_runs_and_the_last_one_those_of_the_run(
    compared, of_run, of_all
):
    """Epsilon, delta, accountant and grade differ between the two, so that one in the place of the other is noticed."""
    deltas, private = {"run": 4.1e-3, "all": 3.2e-2}, compared.records[1]
    statement = {
        **private.statement,
        "claimed": {"epsilon": of_run, "accountant": "pld"},
        "epsilon": {"moments": 77.7, "rdp": 66.6, "pld": of_run},
        "delta": deltas["run"],
        "warnings": ["a warning of the run."],
    }
    total = {"claimed": {"epsilon": of_all, "accountant": "rdp"}, "delta": deltas["all"], "claim": "(…)"}
    total["warnings"] = ["a warning of all runs."]
    words = describe_promise(among(with_statement(private, statement), ["other"], total))
    together, *explained, alone = words.paragraphs
    assert f"ε = {of_all:#.3g} by RDP at δ = {small(deltas['all'])}" in together
    assert f"{of_run:#.3g} by PLD at δ = {small(deltas['run'])}" in alone
    assert f"({of_run:.4g}, {small(deltas['run'])})-differential privacy" in alone
    assert "77.7" in alone
    assert small(deltas["run"]) not in " ".join((together, *explained))
    assert small(deltas["all"]) not in alone
    right = (math.exp(of_all) + deltas["all"]) / (1 + math.exp(of_all))
    digits = 1 if right < 0.995 else 3
    share = math.ceil(right * 10 ** (2 + digits)) / 10**digits
    rate = f"{share:g} times in 100" if share < 100 else "nearly always"
    if of_all <= WEAK:
        assert f"a remainder of δ = {small(deltas['all'])}" in explained[0]
        assert f"right at most {rate}" in explained[1]
    else:
        assert "promises little" in explained[0]
        assert f"they are right {rate}" in explained[1]
    factor = odds_factor(of_all)
    assert (f"than {factor} times as" if of_all <= WEAK else f"a factor of {factor}.") in explained[0]
    assert words.grade == ("strong" if of_all <= STRONG else "moderate" if of_all <= WEAK else "weak")
    assert words.headline == HEADLINES[words.grade]
    assert words.warnings == ("A warning of the run.", "A warning of all runs.")


@pytest.mark.parametrize("number", [1, 2, 4, 5, 9])
@pytest.mark.parametrize("kind", ["finite", "infinite", "no total"])
def test_the_other_runs_on_the_same_users_are_named_and_counted(compared, monkeypatch, number, kind):
    """At most four by name, all in the number, whatever can be said about their total."""
    names = [f"run{letter}" for letter in "abcdefghi"[:number]]
    epsilon = {"finite": 2.0, "infinite": "infinity", "no total": 2.0}[kind]
    total = {"claimed": {"epsilon": epsilon, "accountant": "rdp"}, "delta": 1e-6, "warnings": []}
    total["claim"] = "no guarantee: epsilon is infinite (without noise: runa)"
    record = among(compared.records[1], names, total)
    if kind == "no total":

        def refuse(_):
            raise UnprovenCombination("they drew the same cohorts")

        record.__dict__.pop("all_runs")
        monkeypatch.setattr("unheard.report.run_record.all_runs", refuse)
    first = describe_promise(record).paragraphs[0]
    listed = ", ".join(names[:4]) + (f" and {number - 4} more" if number > 4 else "")
    assert f"charged for {'another run' if number == 1 else f'{number} other runs'} ({listed})." in first
    said = {"finite": "ε = 2.00 by RDP", "infinite": "is infinite (without noise: runa)", "no total": "same cohorts"}
    assert said[kind] in first


@pytest.mark.parametrize(
    ("epsilon", "grade"),
    [(STRONG, "strong"), (STRONG * 1.001, "moderate"), (WEAK, "moderate"), (WEAK * 1.001, "weak"), (math.inf, "none")],
)
def test_a_grade_ends_where_the_page_says(compared, epsilon, grade):
    private = replace(compared.records[1], population_ledger=None)
    claimed = {"epsilon": "infinity" if math.isinf(epsilon) else epsilon, "accountant": "pld"}
    statement = {**private.statement, "claimed": claimed, "delta": 1e-4, "warnings": ["A warning of its own."]}
    words = describe_promise(with_statement(private, statement))
    assert words.grade == grade
    if grade != "none":
        assert "A warning of its own." in words.warnings


@pytest.mark.parametrize("epsilon", [0.001, 0.5, 1.0, 8.0, 13.8, 13.9, 14.0, 16.2, 19.0, 20.7, 20.8, 50.0, 699.0])
def test_the_factor_of_the_odds_is_never_rounded_down_and_hardly_up(epsilon):
    text = odds_factor(epsilon)
    raised = text.removeprefix("10").translate(str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789"))
    is_power = text != "10" and any(digit in text for digit in "⁰¹²³⁴⁵⁶⁷⁸⁹")
    shown = int(raised) * math.log(10) if is_power else math.log(float(text.replace(",", "")))
    assert is_power is (epsilon > math.log(1e6))
    assert epsilon - 1e-9 <= shown <= epsilon + (math.log(10) if is_power else math.log(1.01))
