"""The guarantee of a model in two sentences, as the keyboard shows it."""

from dataclasses import replace

import pytest

from unheard.deployment.keyboard.server import describe_model
from unheard.deployment.model import LoadedModel
from unheard.errors import ModelError
from unheard.privacy.statement import SYNTHETIC


def description(model: LoadedModel, epsilon, delta=1e-6, **more) -> dict:
    return describe_model(
        replace(
            model, statement={"claimed": {"epsilon": epsilon}, "delta": delta, "claim": "c", "warnings": [], **more}
        )
    )


def test_epsilon_is_described_in_words(two_models):
    model = two_models[0]
    assert description(model, "infinity")["grade"] == "none"
    assert "without protection" in description(model, "infinity")["sentences"][0]
    strong = description(model, 0.5)
    assert strong["grade"] == "strong"
    assert "1.65 times as likely" in strong["sentences"][0]  # e^0.5 = 1.6487, rounded up
    assert "δ = 10⁻⁶" in strong["sentences"][0]
    assert "20.1 times" in description(model, 3.0)["sentences"][0]  # e^3 = 20.0855
    assert "2,990 times" in description(model, 8.0)["sentences"][0]  # e^8 = 2980.96, in three digits
    weak = description(model, 22.74, 6.88e-4)
    assert weak["grade"] == "weak"
    assert "10¹⁰ times" in weak["sentences"][0]  # e^22.74 = 7.51e9
    assert "says little" in weak["sentences"][1]
    assert description(model, 1.0, warnings=["seeded"])["warnings"] == ["Seeded"]


def test_the_badge_names_the_accountant(two_models):
    for accountant, shown in (("rdp", "RDP"), ("pld of the declared rounds", "PLD of the declared rounds")):
        claimed = {"epsilon": 1.083, "accountant": accountant}
        assert description(two_models[0], 0.0, claimed=claimed)["badge"] == f"ε = 1.08 ({shown})"


def test_the_headline_of_a_seeded_model_states_no_guarantee(two_models):
    """Epsilon is small, but the seed is known: the page must not call that a strong guarantee."""
    seeded = "REPRODUCIBLE NOISE: the noise was drawn from a known seed. THE GUARANTEE DOES NOT HOLD against anyone who knows it."
    shown = description(two_models[0], 0.5, warnings=[seeded])
    assert shown["grade"] == "none"
    assert shown["headline"] == "An experiment: no guarantee against anyone who knows the seed"
    assert "times as likely" in shown["sentences"][0]
    assert shown["warnings"] == [seeded]


def test_the_headline_of_a_model_of_synthetic_text_states_no_guarantee(two_models):
    shown = description(two_models[0], 0.5, warnings=[SYNTHETIC])
    assert (shown["grade"], shown["warnings"]) == ("none", [SYNTHETIC])
    assert shown["headline"] == "No guarantee for the people from whose text the synthetic text was made"


def test_the_headline_of_a_personal_model_says_that_it_is_personal(two_models):
    shown = description(replace(two_models[0], kind="personal"), 0.5)
    assert shown["headline"] == "A personal model"
    assert shown["sentences"][0].startswith("It has learned from one person's own text")
    assert shown["sentences"][1].startswith("For everybody else: whether")
    assert shown["grade"] == "none"
    assert "ε" not in shown["badge"]


BROKEN = {
    "no claim": {"claim": None},
    "no figure": {"claimed": {"accountant": "pld"}},
    "no delta": {"delta": None},
    "no warnings": {"warnings": None},
    "a warning that is no text": {"warnings": [1]},
    "epsilon below zero": {"claimed": {"epsilon": -1.0}},
    "epsilon is no number": {"claimed": {"epsilon": "nan"}},
    "delta is zero": {"delta": 0.0},
    "delta is one": {"delta": 1.0},
}


@pytest.mark.parametrize("changes", BROKEN.values(), ids=BROKEN)
def test_a_model_whose_statement_lacks_a_part_is_not_opened(two_models, changes):
    """An incomplete statement must not be shown as a model without warnings or without a claim."""
    whole = dict(two_models[0].statement)
    broken = {key: value for key, value in (whole | changes).items() if value is not None}
    with pytest.raises(ModelError, match="its privacy statement cannot be read"):
        replace(two_models[0], statement=broken)


@pytest.mark.parametrize("epsilon", [0.5, 22.0, "infinity"])
def test_every_warning_is_shown_but_the_one_that_the_headline_repeats(two_models, epsilon):
    warnings = ["epsilon is infinite: no noise", "rounds were charged twice", "delta is large"]
    shown = description(two_models[0], epsilon, warnings=warnings)["warnings"]
    assert shown == ["Rounds were charged twice", "Delta is large"]
