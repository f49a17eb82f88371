"""How numbers are written, in tables, sentences and captions alike.

In: a number. Out: text. An epsilon that does not exist is ∞, a figure that is missing is a dash.
"""

import math

NOTHING = "—"
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def percent(value: float | None, digits: int = 2) -> str:
    return NOTHING if value is None else f"{100 * value:.{digits}f} %"


def in_points(difference: float | None, *, signed: bool = False) -> str:
    """A difference of two shares in points: 0.13, −0.02. What rounds to nothing has no side: 0.00."""
    if difference is None:
        return NOTHING
    rounded = round(100 * difference, 2) + 0.0  # -0.0 + 0.0 is 0.0
    return f"{rounded:{'+' if signed and rounded else ''}.2f}".replace("-", "−")


def epsilon_text(value: float) -> str:
    if math.isinf(value):
        return "∞"
    return f"{value:#.3g}".rstrip(".") if value < 1000 else f"{value:,.0f}"


def small(value: float) -> str:
    """1.6e-9 as people write it."""
    digits, _, power = f"{value:.1e}".partition("e")
    digits = digits.removesuffix(".0")
    return f"10{raised(int(power))}" if digits == "1" else f"{digits} × 10{raised(int(power))}"


def raised(power: int) -> str:
    return str(power).translate(_RAISED)


def number(value: float | None) -> str:
    return NOTHING if value is None or math.isnan(value) else f"{value:,.4g}"


def shown_word(word: str) -> str:
    """The end of a sentence is a suggestion too; it has no letters of its own."""
    return "⟨end⟩" if word == "<EOS>" else word
