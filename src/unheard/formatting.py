"""How numbers are written in tables, sentences and captions.

In: a number. Out: text. An infinite epsilon is written ∞, a missing figure as a dash.

>>> percent(0.1234), in_points(0.0013, signed=True), epsilon_text(4.634), small(1.6e-9)
('12.34 %', '+0.13', '4.63', '1.6 × 10⁻⁹')
"""

import math

NOTHING = "—"
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def percent(value: float | None, digits: int = 2) -> str:
    """Format a share as a percentage, or a dash for None."""
    return NOTHING if value is None else f"{100 * value:.{digits}f} %"


def in_points(difference: float | None, *, signed: bool = False) -> str:
    """Format a difference of two shares in percentage points: 0.13, −0.02.

    Args:
        difference: The difference, or None for a dash.
        signed: Whether a positive difference has a plus sign. A difference that rounds to 0.00 has no sign.
    """
    if difference is None:
        return NOTHING
    rounded = round(100 * difference, 2) + 0.0  # -0.0 + 0.0 is 0.0
    return f"{rounded:{'+' if signed and rounded else ''}.2f}".replace("-", "−")


def epsilon_text(value: float) -> str:
    """Format an epsilon with three significant digits; ∞ if it is infinite."""
    if math.isinf(value):
        return "∞"
    return f"{value:#.3g}".rstrip(".") if value < 1000 else f"{value:,.0f}"


def small(value: float) -> str:
    """Format a small number in scientific notation with a raised exponent: 1.6 × 10⁻⁹."""
    digits, _, power = f"{value:.1e}".partition("e")
    digits = digits.removesuffix(".0")
    return f"10{raised(int(power))}" if digits == "1" else f"{digits} × 10{raised(int(power))}"


def raised(power: int) -> str:
    """Format an exponent in raised digits.

    >>> raised(-12)
    '⁻¹²'
    """
    return str(power).translate(_RAISED)


def number(value: float | None) -> str:
    """Format a number with four significant digits and thousands separators, or a dash for None and NaN."""
    return NOTHING if value is None or math.isnan(value) else f"{value:,.4g}"


def shown_word(word: str) -> str:
    """Format a suggested word. The end of a sentence can be suggested too, and is shown as ⟨end⟩."""
    return "⟨end⟩" if word == "<EOS>" else word
