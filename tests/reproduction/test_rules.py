"""The pre-registered rules: complete, consistent with each other, and equal to the page rules.md."""

import tomllib

import pytest
from reproduction.render_rules import HERE, TARGET, load, render

RULES = load()
EXHIBITS = [f"Table {number}" for number in range(1, 4)] + [f"Figure {number}" for number in range(1, 13)]
TEXTS = [
    *("id", "counts", "exhibit", "sentence", "where", "corpus", "measure", "unit", "threshold_reason"),
    *("holds", "fails", "cannot_tell", "old_growing", "old_projected", "changed"),
]
NUMBERS = ["users_per_round", "rounds", "threshold", "seeds"]


def test_the_page_is_generated_from_the_rules():
    assert TARGET.read_text(encoding="utf-8") == render(RULES)


@pytest.mark.parametrize("rule", RULES["rule"], ids=lambda rule: rule["id"])
def test_every_rule_is_complete(rule):
    assert all(isinstance(rule[key], str) and rule[key].strip() for key in TEXTS)
    assert all(isinstance(rule[key], int | float) for key in NUMBERS)
    assert rule["runs"]
    assert rule["counts"] in ("paper", "expectation")
    assert rule["corpus"] == "none" or rule["corpus"] in {corpus["name"] for corpus in RULES["corpus"]}
    if rule["corpus"] != "none":
        assert rule["read_at"]
        assert rule["users_per_round"] > 0
        assert rule["seeds"] >= (3 if rule["counts"] == "paper" else 1)
        assert max(rule["read_at"]) <= rule["rounds"]


def test_every_table_and_figure_has_a_rule():
    exhibits = " ".join(
        rule["exhibit"].replace("Figures ", "Figure ").replace(" and ", " Figure ") for rule in RULES["rule"]
    )
    named = set(exhibits.replace(",", " ").split("Figure "))
    figures = {part.split()[0] for part in named if part.split()}
    for exhibit in EXHIBITS:
        kind, number = exhibit.split()
        assert exhibit in exhibits or (kind == "Figure" and number in figures), exhibit


def test_ids_and_sentences_of_the_paper_are_counted_once():
    ids = [rule["id"] for rule in RULES["rule"]]
    sentences = [rule["sentence"] for rule in RULES["rule"] if rule["counts"] == "paper"]
    assert len(ids) == len(set(ids))
    assert len(sentences) == len(set(sentences))


def test_nearly_is_a_quarter_point():
    assert RULES["terms"]["nearly"] == 0.25


def test_the_schedule_names_every_rule():
    steps = tomllib.loads((HERE / "schedule.toml").read_text(encoding="utf-8"))["step"]
    named = {rule for step in steps for rule in step["rules"]}
    assert named == {rule["id"] for rule in RULES["rule"]}
    assert all(step["minutes"] >= 0 and step["corpus"] for step in steps)
