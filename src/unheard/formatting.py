"""Format numbers and words in the same way in all tables, sentences, captions and plots.

Most functions take a number and return text. An infinite epsilon is written ∞, a missing figure as a dash, a power of
ten with ×, and parts of one line are separated by ·. `colour_numbers` gives private runs and runs without privacy the
same colours in every plot.

>>> percent(0.1234), epsilon_text(4.634), small(1.6e-9)
('12.34 %', '4.63', '1.6 × 10⁻⁹')

`smoothed` computes the curves that the paper plots. Paper, section 3: "We evaluate accuracy every 20 rounds and plot
metrics smoothed over 5 evaluations (100 rounds)". A smoothed value is the mean of an evaluation and the four before it,
so it does not depend on later evaluations.
"""

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

NOTHING = "—"
TIMES = "×"
SEPARATOR = " · "
END = "⟨end⟩"
"""The text that stands for `<EOS>`, the end of a sequence, in a list of suggested words."""
# Control characters (C0 without tab and line feed, DEL, C1), marks that change the direction of writing, and the line and
# paragraph separators of Unicode, and code points that are no characters: halves of surrogate pairs, U+FFFE and U+FFFF.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\u2028\u2029\ud800-\udfff\ufffe\uffff]"
)
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def percent(value: float | None, digits: int = 2) -> str:
    """Format a share, for example 0.1234, as a percentage, 12.34 %. None gives a dash."""
    return NOTHING if value is None else f"{100 * value:.{digits}f} %"


def epsilon_text(value: float | None) -> str:
    """Format an epsilon with three significant digits, from 1,000 on as a whole number; ∞ if it is infinite or None."""
    if value is None or math.isinf(value):
        return "∞"
    return f"{value:#.3g}".rstrip(".") if value < 999.5 else f"{value:,.0f}"


def accountant_title(name: str) -> str:
    """Format the name of an accountant for a sentence: `rdp` and `pld` are written in capitals, `moments` is not.

    Words that follow the name are kept.

    >>> accountant_title("pld of the declared rounds")
    'PLD of the declared rounds'
    """
    first, space, rest = name.partition(" ")
    return f"{first.upper()}{space}{rest}" if first in ("pld", "rdp") else name


def small(value: float) -> str:
    """Format a small number in scientific notation with a raised exponent: 1.6 × 10⁻⁹."""
    digits, _, power = f"{value:.1e}".partition("e")
    digits = digits.removesuffix(".0")
    return f"10{raised(int(power))}" if digits == "1" else f"{digits} {TIMES} 10{raised(int(power))}"


def raised(power: int) -> str:
    """Format an exponent in superscript digits.

    >>> raised(-12)
    '⁻¹²'
    """
    return str(power).translate(_RAISED)


def odds_factor(epsilon: float) -> str:
    """Format e^epsilon, the largest factor by which one user's text changes the odds of an outcome.

    The number is rounded up, to three digits up to a million and to a power of ten above.

    >>> odds_factor(0.5), odds_factor(8.0), odds_factor(20.0)
    ('1.65', '2,990', '10⁹')
    """
    if epsilon > math.log(1e6):
        return f"10{raised(math.ceil(epsilon / math.log(10)))}"
    factor = math.exp(epsilon)
    unit = 10.0 ** (math.floor(math.log10(factor)) - 2)
    return f"{math.ceil(factor / unit - 1e-9) * unit:,.10g}"


def number(value: float | None) -> str:
    """Format a number with four significant digits and thousands separators, or a dash for None and NaN."""
    return NOTHING if value is None or math.isnan(value) else f"{value:,.4g}"


def duration(seconds: float) -> str:
    """Format seconds in the two largest units.

    >>> duration(3725), duration(65), duration(4.2)
    ('1 h 02 min', '1 min 05 s', '4 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def shown_word(word: str) -> str:
    """Format a suggested word for a terminal. `<EOS>`, the end of a sequence, is shown as ⟨end⟩."""
    return END if word == "<EOS>" else printable(word)


def printable(text: str) -> str:
    r"""Return a text that is safe to print on a terminal: control characters are escaped, line feeds and tabs are kept.

    A word of a vocabulary, the name of a file or a message of another program may contain control sequences that move
    the cursor, rename the window or write to the clipboard. Everything that commands print goes through this function.

    >>> printable("\x1b]0;new title\x07")
    '\\x1b]0;new title\\x07'
    """
    return _UNPRINTABLE.sub(lambda mark: mark.group().encode("unicode_escape").decode(), text)


def colour_numbers(are_private: Sequence[bool]) -> list[int]:
    """Return the number of each run's colour, counted from 1, in the order of the runs.

    The first private run has colour 1 and the first run without privacy has colour 2, in every plot, page and terminal.
    The other runs get the numbers from 3 on.

    >>> colour_numbers([False, True]), colour_numbers([True, True, False])
    ([2, 1], [1, 3, 2])

    Args:
        are_private: For each run, whether it is private.
    """
    numbers: list[int] = []
    for is_private in are_private:
        own = 1 if is_private else 2
        numbers.append(own if own not in numbers else max([2, *numbers]) + 1)
    return numbers


SMOOTHED_OVER = 5
"""The number of evaluations in one smoothed value, as in the paper."""
Points = tuple[tuple[float, float], ...]


def smoothed(values: Sequence[float], over: int = SMOOTHED_OVER) -> list[float]:
    """Return the running mean of each value and up to `over - 1` values before it.

    >>> smoothed([1.0, 2.0, 6.0], over=2)
    [1.0, 1.5, 4.0]
    """
    windows = (values[max(0, i + 1 - over) : i + 1] for i in range(len(values)))
    return [math.fsum(window) / len(window) for window in windows]


def text_templates(package: str, **options: Any) -> "Environment":
    """Return a Jinja2 environment with the templates in the folder `templates` of a package, for text and Markdown.

    A template that uses a value which the caller does not pass raises `jinja2.UndefinedError`. A line that contains only
    a template tag leaves no empty line in the output.

    Args:
        package: The package, for example "unheard.privacy".
        options: Further arguments of `jinja2.Environment`.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader(package),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        **options,
    )
