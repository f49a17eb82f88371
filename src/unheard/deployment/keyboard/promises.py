"""What each model promises, in two sentences for whoever is typing.

In: a finished model with its statement. Out: a headline, a grade for colour, sentences. Every number is the statement's.
"""

import math
from typing import Any

from unheard.deployment.model import LoadedModel

STRONG, WEAK = 1.0, 8.0
"""Where we say that an epsilon promises much, and where that it promises little: custom, not theory. The number stands beside."""


def about(model: LoadedModel) -> dict[str, Any]:
    """What the page shows under the model's name."""
    told = model.statement
    epsilon, delta = float(told["claimed"]["epsilon"]), float(told["delta"])
    grade = "none" if math.isinf(epsilon) else "strong" if epsilon <= STRONG else "fair" if epsilon <= WEAK else "weak"
    sentences = _sentences(grade, epsilon, delta)
    headline = _HEADLINES[grade]
    if grade != "none" and any("REPRODUCIBLE NOISE" in warning for warning in told["warnings"]):
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
        "badge": "one person's"
        if model.kind == "personal"
        else f"ε = {'∞' if math.isinf(epsilon) else f'{epsilon:.3g}'}",
        "headline": headline,
        "sentences": sentences,
        "claim": told["claim"],
        "warnings": [w[0].upper() + w[1:] for w in told["warnings"] if "epsilon is infinite" not in w],
    }


_HEADLINES = {
    "none": "No privacy guarantee",
    "weak": "A guarantee, but a weak one",
    "fair": "A guarantee for every person",
    "strong": "A strong guarantee for every person",
    "seeded": "An experiment: no guarantee against whoever knows the seed",
    "personal": "A personal model",
}


def _sentences(grade: str, epsilon: float, delta: float) -> list[str]:
    if grade == "none":
        return ["It was trained without protection: what one person wrote may be read out of it."]
    found = [
        "Whether or not a person took part, with everything they wrote, no outcome becomes more than "
        f"{_factor(epsilon)} times as likely by it, up to a remainder of δ = {_small(delta)}."
    ]
    if grade == "weak":
        found.append("That factor is so large that the guarantee says little by itself.")
    return found


def _factor(epsilon: float) -> str:
    """e^epsilon, rounded up: a bound that is rounded down is no bound."""
    factor = math.exp(min(epsilon, 700.0))
    if factor < 100:
        return f"{math.ceil(10 * factor) / 10:g}"
    if factor < 10_000:
        return f"{math.ceil(factor):,}"
    power = math.floor(epsilon / math.log(10))
    return f"{math.ceil(10 * math.exp(epsilon - power * math.log(10))) / 10:g} × 10{str(power).translate(_RAISED)}"


def _small(delta: float) -> str:
    return f"{delta:.2g}" if delta >= 1e-3 else "{}·10⁻{}".format(*_mantissa(delta))


def _mantissa(delta: float) -> tuple[str, str]:
    number, _, power = f"{delta:.1e}".partition("e-")
    return number.removesuffix(".0"), str(int(power)).translate(_RAISED)


_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
