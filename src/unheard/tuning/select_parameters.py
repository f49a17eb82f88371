"""What to choose from a sweep: the smallest S that costs little, then the largest noise that costs little.

In: results. Out: the one chosen, and remarks on how far the choice may be trusted. Both S and sigma are chosen against the
baseline, so that what is allowed is what the private model may lose in all. Where in the paper: section 3, "choosing S in [10, 20]
has at most a small effect", "a small decrease past sigma = 0.012".
"""

from collections.abc import Sequence
from dataclasses import dataclass

from unheard.errors import InvalidValue
from unheard.tuning.results import Margin, Result


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One result, what it costs against the baseline in points of AccuracyTop1, and what must be said about it."""

    result: Result
    loss: float
    remarks: tuple[str, ...]


def choose_norm(baseline: Result, clipped: Sequence[Result], allowed: float, margin: Margin) -> Choice:
    """The smallest S that costs less than `allowed` points: noise is in proportion to it."""
    in_order = sorted(clipped, key=lambda result: result.norm)
    return _first_allowed(in_order, baseline, allowed, margin, "S", "--norms", "--allow-clip-loss", "a smaller S")


def choose_noise(baseline: Result, noised: Sequence[Result], allowed: float, margin: Margin) -> Choice:
    """The largest sigma that costs less than `allowed` points: users per round are in proportion to 1 / sigma."""
    in_order = sorted(noised, key=lambda result: -result.noise_std)
    return _first_allowed(
        in_order,
        baseline,
        allowed,
        margin,
        "sigma",
        "--noise-stds",
        "--allow-loss",
        "more noise, and so fewer users a round,",
    )


def _first_allowed(
    in_order: Sequence[Result],
    baseline: Result,
    allowed: float,
    margin: Margin,
    what: str,
    option: str,
    allowance: str,
    further: str,
) -> Choice:
    """The first that costs less than allowed, coming from the side where privacy is cheapest."""
    losses = [result.loss_against(baseline) for result in in_order]
    place = next((i for i, loss in enumerate(losses) if loss < allowed), None)
    if place is None:
        least = min(losses)
        raise InvalidValue(
            f"Every {what} of the grid costs {allowed:g} points of AccuracyTop1 or more against the baseline (the least: "
            f"{least:.2f}, {in_order[losses.index(least)].name}). Nothing is chosen: try other values with {option}, train longer "
            f"with --rounds, or allow more with {allowance}."
        )
    chosen, loss, remarks = in_order[place], losses[place], []
    if place == 0:
        remarks.append(f"{chosen.name} is the edge of the grid: {further} might cost as little. Try it with {option}.")
    if margin.points is None or abs(allowed - loss) < margin.points:
        remarks.append(
            f"{chosen.name} costs {loss:+.2f} points, allowed are {allowed:g}: the difference is within noise, and another "
            "repetition could choose otherwise."
        )
    if place > 0 and margin.hides(losses[place - 1] - allowed):
        remarks.append(
            f"{in_order[place - 1].name} was passed over for {losses[place - 1]:.2f} points: within noise too."
        )
    return Choice(result=chosen, loss=loss, remarks=tuple(remarks))
