"""Describe the privacy guarantee of a model in two sentences for whoever is typing.

    describe_model(model)["headline"]           # 'A guarantee for every person'

Every number comes from the model's privacy statement. Bounds are rounded up, never down.
"""

import math
from collections.abc import Mapping
from typing import Any

from unheard.deployment.model import LoadedModel
from unheard.formatting import TIMES, epsilon_text, raised, small

STRONG, WEAK = 1.0, 8.0
"""Up to STRONG an epsilon is called strong, above WEAK weak. A convention: the number is always shown too."""


def describe_model(model: LoadedModel) -> dict[str, Any]:
    """The description of a model that the page shows under its name, as JSON data.

    Returns:
        `name`, `kind`, `is_private`, `words` (size of the vocabulary), `grade` (`none`, `weak`, `fair` or `strong`, for
        the colour), `badge`, `headline`, `sentences`, `claim` and `warnings`.
    """
    statement = model.statement
    epsilon, delta = float(statement["claimed"]["epsilon"]), float(statement["delta"])
    grade = "none" if math.isinf(epsilon) else "strong" if epsilon <= STRONG else "fair" if epsilon <= WEAK else "weak"
    sentences = _sentences(grade, epsilon, delta)
    headline = _HEADLINES[grade]
    if grade != "none" and any("REPRODUCIBLE NOISE" in warning for warning in statement["warnings"]):
        grade, headline = "none", _HEADLINES["seeded"]  # the sentences hold against those who do not know the seed
    if model.kind == "personal":
        sentences = ["It has learned from one person's own text, and is for that person alone.", *sentences]
        sentences[1] = f"Of everybody else: {sentences[1][0].lower()}{sentences[1][1:]}"
        grade, headline = "none", _HEADLINES["personal"]
    return {
        "name": model.name,
        "kind": {"run": "trained here", "export": "exported for devices", "personal": "personal"}[model.kind],
        "words": len(model.vocabulary),
        "grade": grade,
        "is_private": math.isfinite(epsilon),
        "badge": "one person's" if model.kind == "personal" else f"ε = {epsilon_text(epsilon)}{_accountant(statement)}",
        "headline": headline,
        "sentences": sentences,
        "claim": statement["claim"],
        "warnings": [w[0].upper() + w[1:] for w in statement["warnings"] if "epsilon is infinite" not in w],
    }


_HEADLINES = {
    "none": "No privacy guarantee",
    "weak": "A guarantee, but a weak one",
    "fair": "A guarantee for every person",
    "strong": "A strong guarantee for every person",
    "seeded": "An experiment: no guarantee against whoever knows the seed",
    "personal": "A personal model",
}


def _accountant(statement: Mapping[str, Any]) -> str:
    """The accountant of the claim, in brackets; nothing for an infinite epsilon, which no accountant computed."""
    claimed = statement["claimed"]
    is_known = math.isfinite(float(claimed["epsilon"])) and "accountant" in claimed
    return f" ({claimed['accountant'].upper()})" if is_known else ""


def _sentences(grade: str, epsilon: float, delta: float) -> list[str]:
    if grade == "none":
        return ["It was trained without protection: what one person wrote may be read out of it."]
    sentences = [
        "Whether or not a person took part, with everything they wrote, no outcome becomes more than "
        f"{_factor(epsilon)} times as likely by it, up to a remainder of δ = {small(delta)}."
    ]
    if grade == "weak":
        sentences.append("That factor is so large that the guarantee says little by itself.")
    return sentences


def _factor(epsilon: float) -> str:
    """e^epsilon, rounded up."""
    factor = math.exp(min(epsilon, 700.0))
    if factor < 100:
        return f"{math.ceil(10 * factor) / 10:g}"
    if factor < 10_000:
        return f"{math.ceil(factor):,}"
    power = math.floor(epsilon / math.log(10))
    return f"{math.ceil(10 * math.exp(epsilon - power * math.log(10))) / 10:g} {TIMES} 10{raised(power)}"
