"""All recipes: the runs that each table and figure of the paper needs.

The functions (`baseline`, `clipped`, `noised`, `traded`, `variant`) build runs with systematic names: `noised(15,
0.003).name` is `flat-S15-sigma0.003`. `RUNS` has the runs of each recipe. `recipes.toml` has the texts: title, location
in the paper, conclusion and rule. `RECIPES` combines both. It has the tables and figures of the paper, statements of
the paper without a figure, recommendations that the paper did not test, and our own questions.

>>> RECIPES["noised-vs-baseline"].location
'Figure 1'

Most plots of the paper do not print the values of the setting that they vary. In this case we chose values that cover
the range that the text discusses.
"""

import tomllib
from dataclasses import replace
from pathlib import Path

from reproduction.recipe import PaperRun, Recipe
from reproduction.verdict import NEARLY, SMALL, TRAINED, points

LONG, SWEEP = 5000, 3000
"""Rounds of the main comparison, and rounds of a sweep."""
ROUNDS_BEFORE, ROUNDS_AFTER = 4885, 6000
"""Number of rounds before and after the noise and the clip are adjusted (Figure 4)."""
TRADES = (6.3, 7.9, 10, 12.6, 15.9, 20)
"""Values of S in the trade-off between noise and clipping (Figure 8)."""
TRADES_PER_LAYER = (7.9, 12.6, 20)
"""Values of S that are also tried with per-layer clipping (Figure 4)."""


UNCLIPPED = ("clip.kind=none", "noise.kind=none")
"""The changes that remove clip and noise from a run."""


def baseline(users: int = 100, rounds: int = LONG) -> PaperRun:
    """Return the non-private baseline: fixed-size sample, true average, no clip, no noise.

    Args:
        users: Users per round.
        rounds: Rounds of the run.
    """
    name = "baseline" if users == 100 else f"baseline-C{users}"
    changes = (
        "sampling.kind=fixed_size",
        f"sampling.users_per_round={users}",
        "estimator.kind=true_average",
        *UNCLIPPED,
    )
    return PaperRun(name=name, changes=changes, rounds=rounds)


def clipped(norm: float, kind: str = "flat", rounds: int = SWEEP) -> PaperRun:
    """Return a run with a clip and without noise. Sampling and estimator are those of the common configuration.

    Args:
        norm: S.
        kind: `flat` or `per_layer`.
        rounds: Rounds of the run.
    """
    return PaperRun(name=f"{_dashed(kind)}-S{norm:g}", changes=(*_clip(kind, norm), "noise.kind=none"), rounds=rounds)


def noised(norm: float, sigma: float, kind: str = "flat", users: int = 100, rounds: int = SWEEP) -> PaperRun:
    """Return a run with a clip and noise.

    Args:
        norm: S.
        sigma: The standard deviation of the noise on the average.
        kind: `flat` or `per_layer`.
        users: Users per round.
        rounds: Rounds of the run.
    """
    name = f"{_dashed(kind)}-S{norm:g}-sigma{sigma:g}" + ("" if users == 100 else f"-C{users}")
    changes = (*_clip(kind, norm), f"noise.noise_std={sigma:g}")
    if users != 100:
        changes = (f"sampling.users_per_round={users}", *changes)
    return PaperRun(name=name, changes=changes, rounds=rounds)


def traded(norm: float, kind: str = "flat", after: str | None = None) -> PaperRun:
    """Return a run with S and sigma in a fixed ratio. The ratio is z = 0.06 with 100 users per round, or 1 with 1,667.

    Args:
        norm: S.
        kind: `flat` or `per_layer`.
        after: The name of the run whose last model this run starts from; None to start from scratch.
    """
    sigma = round(norm * 0.06 / 100, 6)
    run = noised(norm, sigma, kind, rounds=ROUNDS_BEFORE if after is None else ROUNDS_AFTER)
    if after is None:
        return run
    return PaperRun(name=f"then-{run.name}", changes=run.changes, rounds=ROUNDS_AFTER, after=after)


def variant(name: str, run: PaperRun, *changes: str, corpus: str = "main") -> PaperRun:
    """Return a variant of a run, with another model, another update or another corpus.

    Args:
        name: The prefix of the name of the new run.
        run: The run.
        *changes: Changes in the form `table.key=value`. They come before the run's own changes, which overwrite them.
        corpus: The role of the corpus.
    """
    return replace(run, name=f"{name}-{run.name}", changes=(*changes, *run.changes), corpus=corpus)


def _clip(kind: str, norm: float) -> tuple[str, ...]:
    """Return the changes that set the kind of the clip and its S."""
    return (f"clip.kind={kind}", f"clip.norm={norm:g}")


def _dashed(kind: str) -> str:
    """Return the kind of a clip as part of a run's name: `per-layer` for `per_layer`."""
    return kind.replace("_", "-")


MAIN = (
    baseline(),
    noised(15, 0.003, rounds=LONG),
    noised(10, 0.006, rounds=LONG),
    noised(15, 0.012, rounds=LONG),
)
"""The main comparison: no privacy, and the three rows of Table 2."""


SEEDS = (1, 2, 3)
"""Seeds of the runs that are repeated because their difference is small."""
CLIPS = (2.5, 5, 10, 15, 20, 30, 40)
"""Values of S in Figure 2."""
NOISES = (0.003, 0.006, 0.012, 0.024, 0.048, 0.2)
"""Values of sigma in Figure 3."""
SWEPT_CLIPS = (5, 10, 15, 20, 30)
"""Values of S in Figure 11."""
SWEPT_NOISES = (0.003, 0.006, 0.012, 0.024, 0.048)
"""Values of sigma in Figure 12."""
S20 = traded(20)
"""The run of Figure 8 that the adjusted runs of Figure 4 start from."""
VARIABLE = PaperRun(name="variable-true-average", changes=("estimator.kind=true_average", *UNCLIPPED), rounds=SWEEP)
"""Poisson sampling with the true average, without clip and noise: the reference of the clipping sweeps."""


def _fedsgd(run: PaperRun) -> PaperRun:
    """Return the FedSGD variant of a run, with 50 users per round and one gradient step per user over all their data.

    The batch size of 200 windows holds all data of a user of blogs: 1,600 tokens and the BOS of each sentence are 160
    to 192 windows of 10 tokens.
    """
    return variant("fedsgd", run, "update.kind=fedsgd", "update.batch_size=200", "sampling.users_per_round=50")


def _dictionaries(*runs: PaperRun) -> tuple[PaperRun, ...]:
    """Return the runs with the two larger dictionaries, and with the main one for comparison."""
    return (*(variant(size, run, corpus=size) for size in ("20k", "30k") for run in runs), *runs)


GAP_NORMS = (15, 20, 30)
"""Values of S in `closing-the-gap`."""
PLAIN_CLIPPED_NOISED = (baseline(rounds=SWEEP), clipped(15), noised(15, 0.003))
"""The three runs that `other-models` repeats for each model."""
PUBLIC = variant("other", replace(baseline(), rounds=1500), corpus="other")
"""The baseline on the other corpus: the public model of `public-start`."""


RUNS: dict[str, tuple[PaperRun, ...]] = {
    "noised-vs-baseline": (*(run.with_seed(seed) for run in MAIN[:2] for seed in SEEDS), *MAIN[2:]),
    "table-accuracy": MAIN,
    "users-100-vs-1250": (MAIN[3], noised(15, 0.012, users=1250)),
    "private-for-real": (MAIN[1], MAIN[3], noised(15, 0.012, users=1250), noised(15, 0.003, users=5000)),
    "trade-offs": (*(traded(norm) for norm in TRADES), S20.with_seed(2)),
    "trade-offs-adjusted": (
        S20,
        *(traded(norm, after=S20.name) for norm in TRADES),
        *(traded(norm, "per_layer", after=S20.name) for norm in TRADES_PER_LAYER),
    ),
    "head-words": (*MAIN, noised(20, 0.024), noised(20, 0.048), noised(15, 0.012, users=1250)),
    "clipping": (*(clipped(norm, kind) for kind in ("flat", "per_layer") for norm in CLIPS), VARIABLE),
    "noise": (
        *(noised(20, sigma, kind) for kind in ("flat", "per_layer") for sigma in NOISES),
        clipped(20),
        clipped(20, "per_layer"),
    ),
    "estimators": (
        baseline(),
        VARIABLE,
        PaperRun(name="variable-fixed-denominator", changes=UNCLIPPED, rounds=SWEEP),
        PaperRun(
            name="variable-clipped-denominator",
            changes=("estimator.kind=clipped_denominator", "estimator.min_total_weight=POPULATION", *UNCLIPPED),
            rounds=SWEEP,
        ),
    ),
    "users-per-round": tuple(baseline(users, LONG if users == 100 else SWEEP) for users in (10, 30, 100, 300, 1000)),
    "fedsgd-clipping": (*(_fedsgd(clipped(norm)) for norm in (0.5, 1, 2, 5, 20)), clipped(2), clipped(20)),
    "fedsgd-noise": (
        *(_fedsgd(noised(20, sigma)) for sigma in (0.001, 0.002, 0.006, 0.024)),
        _fedsgd(clipped(20)),
        _fedsgd(noised(2, 0.002)),
        clipped(20),
        *(noised(20, sigma) for sigma in (0.002, 0.006, 0.024)),
    ),
    "dictionaries-clipping": _dictionaries(*(clipped(norm) for norm in SWEPT_CLIPS), VARIABLE),
    "dictionaries-noise": _dictionaries(clipped(20), *(noised(20, sigma) for sigma in SWEPT_NOISES)),
    "closing-the-gap": (*MAIN[:2], *(run for norm in GAP_NORMS for run in (clipped(norm), noised(norm, 0.003)))),
    "update-penalty": (
        clipped(15),
        *(
            replace(variant("", clipped(15), f"update.update_penalty={penalty}"), name=f"flat-S15-penalty{penalty}")
            for penalty in ("0.001", "0.01")
        ),
    ),
    "tied-embeddings": (baseline(), variant("untied", baseline(rounds=SWEEP), "model.tied=false")),
    "unit-norm": tuple(
        each
        for run in (baseline(rounds=SWEEP), clipped(15))
        for each in (run, variant("free-norm", run, "model.unit_norm=false"))
    ),
    "another-corpus": (baseline(), MAIN[1], PUBLIC),
    "public-start": (
        PUBLIC,
        MAIN[1],
        replace(MAIN[1], name="after-public-" + MAIN[1].name, rounds=1500, after=PUBLIC.name, is_after_public=True),
    ),
    "adaptive-clipping": (
        *(traded(norm) for norm in TRADES),
        PaperRun(
            name="adaptive-z0.06",
            changes=("clip.kind=adaptive", "clip.initial_norm=10", "noise.noise_multiplier=0.06"),
            rounds=SWEEP,
        ),
    ),
    "other-models": (
        *(variant("gru", run, "model.kind=tied_gru") for run in PLAIN_CLIPPED_NOISED),
        *(variant("characters", run, corpus="characters") for run in PLAIN_CLIPPED_NOISED),
    ),
    "cost": (
        replace(noised(15, 0.012, users=1250), name="cost-C1250", corpus="synthetic", rounds=20),
        replace(noised(15, 0.003, users=5000), name="cost-C5000", corpus="synthetic", rounds=10),
    ),
}
"""The runs of each recipe by its name. Table 1 needs no runs and is not listed."""


def _read_recipes() -> dict[str, Recipe]:
    """Read `recipes.toml`, insert the tolerances and limits into the rules, and add the runs."""
    content = tomllib.loads((Path(__file__).parent / "recipes.toml").read_text(encoding="utf-8"))
    tolerances = {"nearly": points(NEARLY), "small": points(SMALL), "trained": TRAINED, **content["text"]}
    recipes = {}
    for name, words in content["recipe"].items():
        rule = words.pop("rule").format(**tolerances, **words.get("limits", {}))
        recipes[name] = Recipe(name=name, runs=RUNS.get(name, ()), rule=rule, **words)
    return recipes


RECIPES = _read_recipes()
"""All recipes by name."""
