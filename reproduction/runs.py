"""Every run that the paper's tables and figures ask for, by name: what it changes in the common setting.

Where in the paper: section 3 and its appendices. Where a figure's own values are not printed (most plots), the grid is ours, and
spans the ranges that the text speaks of.
"""

from dataclasses import replace

from reproduction.recipe import PaperRun

LONG, SWEEP = 5000, 3000
FIRST, THEN = 4885, 6000
"""Rounds before and after the noise and the clip are adjusted."""
TRADES = (6.3, 7.9, 10, 12.6, 15.9, 20)
"""S of the trade-offs between noise and clip."""


def baseline(users: int = 100, rounds: int = LONG) -> PaperRun:
    """Fixed-size sample, true average, no clip, no noise."""
    name = "baseline" if users == 100 else f"baseline-C{users}"
    changes = (
        "sampling.kind=fixed_size",
        f"sampling.users_per_round={users}",
        "estimator.kind=true_average",
        "clip.kind=none",
        "noise.kind=none",
    )
    return PaperRun(name=name, changes=changes, rounds=rounds)


def clipped(norm: float, kind: str = "flat", rounds: int = SWEEP) -> PaperRun:
    """A clip without noise, from a variable sample over the fixed denominator."""
    return PaperRun(name=f"{_dashed(kind)}-S{norm:g}", changes=(*_clip(kind, norm), "noise.kind=none"), rounds=rounds)


def noised(norm: float, sigma: float, kind: str = "flat", users: int = 100, rounds: int = SWEEP) -> PaperRun:
    """A clip and noise of a given deviation on the average."""
    name = f"{_dashed(kind)}-S{norm:g}-sigma{sigma:g}" + ("" if users == 100 else f"-C{users}")
    changes = (*_clip(kind, norm), f"noise.noise_std={sigma:g}")
    if users != 100:
        changes = (f"sampling.users_per_round={users}", *changes)
    return PaperRun(name=name, changes=changes, rounds=rounds)


def traded(norm: float, kind: str = "flat", after: str | None = None) -> PaperRun:
    """S and sigma moved together, z = 0.06 with 100 users (z = 1 with 1,667), from the beginning or after the first run."""
    sigma = round(norm * 0.06 / 100, 6)
    run = noised(norm, sigma, kind, rounds=FIRST if after is None else THEN)
    if after is None:
        return run
    return PaperRun(name=f"then-{run.name}", changes=run.changes, rounds=THEN, after=after)


def variant(name: str, run: PaperRun, *changes: str, corpus: str = "main") -> PaperRun:
    """The same run of another model, or on another corpus."""
    return replace(run, name=f"{name}-{run.name}", changes=(*changes, *run.changes), corpus=corpus)


def _clip(kind: str, norm: float) -> tuple[str, ...]:
    return (f"clip.kind={kind}", f"clip.norm={norm:g}")


def _dashed(kind: str) -> str:
    return kind.replace("_", "-")


MAIN = (
    baseline(),
    noised(15, 0.003, rounds=LONG),
    noised(10, 0.006, rounds=LONG),
    noised(15, 0.012, rounds=LONG),
)
"""The main comparison: no privacy, and the three rows of Table 2."""
