"""Chooses the smallest S, then the largest sigma, that cost little accuracy.

A small S and a large sigma make privacy cheap: users per round of the private run grow with S / sigma. Both are chosen
by their loss against the baseline, so the allowance for sigma is what the private model may lose in all. The paper
chooses in the same way (section 3): "choosing S in [10, 20] has at most a small effect", "a small decrease past sigma =
0.012".
"""

from collections.abc import Sequence
from dataclasses import dataclass

from unheard.errors import InvalidValue
from unheard.tuning.results import Margin, Result


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A chosen setting.

    Attributes:
        result: The setting and its accuracy.
        loss: What it loses against the baseline, in percentage points of AccuracyTop1.
        remarks: Sentences on how far the choice may be trusted.
    """

    result: Result
    loss: float
    remarks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Parameter:
    """The words in which messages speak of S or sigma."""

    symbol: str
    grid_option: str
    allowance_option: str
    beyond_the_grid: str


_NORM = _Parameter(
    symbol="S", grid_option="--norms", allowance_option="--allow-clip-loss", beyond_the_grid="a smaller S"
)
_NOISE = _Parameter(
    symbol="sigma",
    grid_option="--noise-stds",
    allowance_option="--allow-loss",
    beyond_the_grid="more noise, and so fewer users per round,",
)


def choose_norm(baseline: Result, clipped: Sequence[Result], allowed: float, margin: Margin) -> Choice:
    """Chooses the smallest S that loses less than `allowed` points against the baseline.

    Args:
        baseline: The result without clip and noise.
        clipped: The results of each S, without noise.
        allowed: The allowance in percentage points of AccuracyTop1.
        margin: How far two results may differ by chance; it only adds remarks.

    Raises:
        InvalidValue: Every S loses more.
    """
    return _first_allowed(sorted(clipped, key=lambda result: result.norm), baseline, allowed, margin, _NORM)


def choose_noise(baseline: Result, noised: Sequence[Result], allowed: float, margin: Margin) -> Choice:
    """Chooses the largest sigma that loses less than `allowed` points against the baseline; arguments as in
    `choose_norm`."""
    return _first_allowed(sorted(noised, key=lambda result: -result.noise_std), baseline, allowed, margin, _NOISE)


def _first_allowed(
    ordered: Sequence[Result], baseline: Result, allowed: float, margin: Margin, parameter: _Parameter
) -> Choice:
    """Chooses the first result that loses less than allowed; `ordered` begins with the setting that is best for
    privacy."""
    losses = [result.loss_against(baseline) for result in ordered]
    index = next((i for i, loss in enumerate(losses) if loss < allowed), None)
    if index is None:
        least = min(losses)
        raise InvalidValue(
            f"Every {parameter.symbol} of the grid costs {allowed:g} points of AccuracyTop1 or more against the baseline (the "
            f"least: {least:.2f}, {ordered[losses.index(least)].name}). Nothing is chosen: try other values with "
            f"{parameter.grid_option}, train longer with --rounds, or allow more with {parameter.allowance_option}."
        )
    chosen, loss, remarks = ordered[index], losses[index], []
    if index == 0:
        remarks.append(
            f"{chosen.name} is the edge of the grid: {parameter.beyond_the_grid} might cost as little. Try it with "
            f"{parameter.grid_option}."
        )
    if margin.hides(allowed - loss):
        remarks.append(
            f"{chosen.name} costs {loss:+.2f} points, allowed are {allowed:g}: the difference is within noise, and another "
            "repetition could choose otherwise."
        )
    if index > 0 and margin.hides(losses[index - 1] - allowed):
        remarks.append(
            f"{ordered[index - 1].name} was rejected for its {losses[index - 1]:.2f} points: within noise too."
        )
    return Choice(result=chosen, loss=loss, remarks=tuple(remarks))
