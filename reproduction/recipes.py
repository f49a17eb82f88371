"""All recipes: the runs that each table and figure of the paper needs, and the conclusion that the paper draws from it.

The functions (`baseline`, `clipped`, `noised`, `traded`, `variant`) build runs with systematic names: `noised(15,
0.003).name` is `flat-S15-sigma0.003`. `FIGURES` are the tables and figures of the paper; `BEYOND_THE_PAPER` are
statements without a figure, recommendations that the paper did not carry out, and open questions. `RECIPES` has all
of them by name.

>>> RECIPES["noised-vs-baseline"].location
'Figure 1'

`Recipe.location` says where each is in the paper. Most plots do not print their values; the grids are then ours, and
cover the ranges that the text discusses.
"""

from dataclasses import replace

from reproduction.recipe import PaperRun, Recipe

LONG, SWEEP = 5000, 3000
"""Rounds of the main comparison, and rounds of a sweep."""
ROUNDS_BEFORE, ROUNDS_AFTER = 4885, 6000
"""Rounds before and after the noise and the clip are adjusted (Figure 4)."""
TRADES = (6.3, 7.9, 10, 12.6, 15.9, 20)
"""Values of S in the trade-off between noise and clipping (Figure 8)."""


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
        "clip.kind=none",
        "noise.kind=none",
    )
    return PaperRun(name=name, changes=changes, rounds=rounds)


def clipped(norm: float, kind: str = "flat", rounds: int = SWEEP) -> PaperRun:
    """Return a run with a clip and without noise, with a variable sample and the fixed denominator.

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
    """Return a run with S and sigma in a fixed ratio: z = 0.06 with 100 users per round, which is z = 1 with 1,667.

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
    """Return the same run with another model or on another corpus.

    Args:
        name: The prefix of the name of the new run.
        run: The run.
        *changes: Changes to the run file, as `table.key=value`; those of the run come after them.
        corpus: The role of the corpus.
    """
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


SEEDS = (1, 2, 3)
"""Seeds of the two runs whose difference is small."""
CLIPS = (2.5, 5, 10, 15, 20, 30, 40)
"""Values of S in Figure 2."""
NOISES = (0.003, 0.006, 0.012, 0.024, 0.048, 0.2)
"""Values of sigma in Figure 3."""
SWEPT_CLIPS = (5, 10, 15, 20, 30)
"""Values of S in Figure 11."""
SWEPT_NOISES = (0.003, 0.006, 0.012, 0.024, 0.048)
"""Values of sigma in Figure 12."""
S20 = traded(20)
VARIABLE = PaperRun(
    name="variable-true-average",
    changes=("estimator.kind=true_average", "clip.kind=none", "noise.kind=none"),
    rounds=SWEEP,
)
"""A variable sample with the true average, without clip and noise: the reference of the clipping sweeps."""


def _fedsgd(run: PaperRun) -> PaperRun:
    """FedSGD: one gradient of all data of a user. 1,600 tokens and the BOS of each sentence are 160 to 192 windows of 10
    (on blogs)."""
    return variant("fedsgd", run, "update.kind=fedsgd", "update.batch_size=200", "sampling.users_per_round=50")


def _dictionaries(*runs: PaperRun) -> tuple[PaperRun, ...]:
    """The runs with the two larger dictionaries, and with the usual one for comparison."""
    return (*(variant(size, run, corpus=size) for size in ("20k", "30k") for run in runs), *runs)


FIGURES = (
    Recipe(
        name="table-rounds",
        title="Privacy after 1 to 10^6 rounds",
        location="Table 1",
        claim="With noise in proportion to the sensitivity, epsilon stays reasonable over a large range of parameters.",
        rank=0,
    ),
    Recipe(
        name="noised-vs-baseline",
        title="Noised training against the non-private baseline",
        location="Figure 1",
        runs=tuple(run.with_seed(seed) for run in MAIN for seed in (SEEDS if run in MAIN[:2] else SEEDS[:1])),
        claim="sigma = 0.003 nearly matches the baseline; more noise costs more, later in training.",
        rank=1,
    ),
    Recipe(
        name="table-accuracy",
        title="Privacy and AccuracyTop1 by sigma, S, users and C",
        location="Table 2",
        runs=MAIN,
        claim="sigma = 0.003 with S = 15 costs 0.13 points of AccuracyTop1; 0.006 and 0.012 cost 0.58 and 1.29.",
        rank=1,
    ),
    Recipe(
        name="users-100-vs-1250",
        title="100 against 1,250 users per round at equal sigma",
        location="Figure 7",
        runs=(MAIN[3], noised(15, 0.012, users=1250)),
        claim="Both give almost the same accuracy at every round, so a cheap run with C = 100 estimates a private one.",
        rank=2,
    ),
    Recipe(
        name="private-for-real",
        title="z = 1 for real: 1,250 users per round, as in Figure 7, and 5,000, which the paper only estimated",
        location="Not in the paper (extends Figure 7)",
        runs=(MAIN[1], MAIN[3], noised(15, 0.012, users=1250), noised(15, 0.003, users=5000)),
        claim="Accuracy trained with C = 100 at equal sigma is that of the private run with z = 1.",
        rank=2,
    ),
    Recipe(
        name="trade-offs",
        title="Noise against clipping at equal privacy, from the beginning",
        location="Figure 8, left",
        runs=(*(traded(norm) for norm in TRADES), S20.with_seed(2)),
        claim="Early in training S between 10 and 12.6 works well; two runs with S = 20 differ little.",
        rank=3,
    ),
    Recipe(
        name="trade-offs-adjusted",
        title="Noise and clipping adjusted after initial training",
        location="Figure 4 and Figure 8, right",
        runs=(
            S20,
            *(traded(norm, after=S20.name) for norm in TRADES),
            *(traded(norm, "per_layer", after=S20.name) for norm in (7.9, 12.6, 20)),
        ),
        claim="Later in training a smaller S with less noise, at the same privacy, does better: S = 7.9.",
        rank=3,
    ),
    Recipe(
        name="head-words",
        title="How many of the ten predictions are head words",
        location="Table 3",
        runs=(*MAIN, noised(20, 0.024), noised(20, 0.048), noised(15, 0.012, users=1250)),
        claim="Better models use fewer head words; noise and C alone change little until they cost accuracy.",
        rank=4,
    ),
    Recipe(
        name="clipping",
        title="The effect of clipping, flat and per layer",
        location="Figure 2",
        runs=(*(clipped(norm, kind) for kind in ("flat", "per_layer") for norm in CLIPS), VARIABLE),
        claim="S between 10 and 20 has at most a small effect after 100, 500 and 3,000 rounds.",
        rank=5,
    ),
    Recipe(
        name="noise",
        title="The effect of noise at S = 20, flat and per layer",
        location="Figure 3",
        runs=(
            *(noised(20, sigma, kind) for kind in ("flat", "per_layer") for sigma in NOISES),
            clipped(20),
            clipped(20, "per_layer"),
        ),
        claim="Early, sigma = 0.024 costs almost nothing; later there is a small loss past 0.012; 0.2 destroys accuracy.",
        rank=6,
    ),
    Recipe(
        name="estimators",
        title="Sampling and estimators compared",
        location="Figure 5",
        runs=(
            baseline(),
            VARIABLE,
            PaperRun(name="variable-fixed-denominator", changes=("clip.kind=none", "noise.kind=none"), rounds=SWEEP),
            PaperRun(
                name="variable-clipped-denominator",
                changes=(
                    "estimator.kind=clipped_denominator",
                    "estimator.min_total_weight=POPULATION",
                    "clip.kind=none",
                    "noise.kind=none",
                ),
                rounds=SWEEP,
            ),
        ),
        claim="Neither a variable sample nor the estimator changes convergence.",
        rank=7,
    ),
    Recipe(
        name="users-per-round",
        title="The effect of users per round",
        location="Figure 6",
        runs=tuple(baseline(users, LONG if users == 100 else SWEEP) for users in (10, 30, 100, 300, 1000)),
        claim="More users per round help, with diminishing returns.",
        rank=8,
    ),
    Recipe(
        name="fedsgd-clipping",
        title="FedSGD: the effect of clipping",
        location="Figure 9",
        runs=(*(_fedsgd(clipped(norm)) for norm in (0.5, 1, 2, 5, 20)), clipped(2), clipped(20)),
        claim="A much smaller S does for FedSGD (2), which needs many more rounds for the same accuracy.",
        rank=9,
    ),
    Recipe(
        name="fedsgd-noise",
        title="FedSGD: the effect of noise at S = 20",
        location="Figure 10",
        runs=(
            *(_fedsgd(noised(20, sigma)) for sigma in (0.001, 0.002, 0.006, 0.024)),
            _fedsgd(clipped(20)),
            _fedsgd(noised(2, 0.002)),
            clipped(20),
            *(noised(20, sigma) for sigma in (0.002, 0.006, 0.024)),
        ),
        claim="FedSGD bears less noise than FedAvg: about sigma = 0.002.",
        rank=9,
    ),
    Recipe(
        name="dictionaries-clipping",
        title="20,000 and 30,000 words: the effect of clipping",
        location="Figure 11",
        runs=_dictionaries(*(clipped(norm) for norm in SWEPT_CLIPS), VARIABLE),
        claim="Larger dictionaries help little and need no other S.",
        rank=10,
    ),
    Recipe(
        name="dictionaries-noise",
        title="20,000 and 30,000 words: the effect of noise at S = 20",
        location="Figure 12",
        runs=_dictionaries(clipped(20), *(noised(20, sigma) for sigma in SWEPT_NOISES)),
        claim="Larger dictionaries need no other sigma.",
        rank=10,
    ),
)
"""The tables and figures of the paper."""


GAP_NORMS = (15, 20, 30)
"""Values of S in `closing-the-gap`."""
PLAIN_CLIPPED_NOISED = (baseline(rounds=SWEEP), clipped(15), noised(15, 0.003))
"""The three runs that `other-models` repeats for each model."""
PUBLIC = variant("other", replace(baseline(), rounds=1500), corpus="other")
"""The baseline on the other corpus: the public model of `public-start`."""

BEYOND_THE_PAPER = (
    Recipe(
        name="closing-the-gap",
        title="What is between noised training and the baseline",
        location="Not in the paper",
        runs=(*MAIN[:2], *(run for norm in GAP_NORMS for run in (clipped(norm), noised(norm, 0.003)))),
        claim="At sigma = 0.003 a larger S, which needs more users per round for the same privacy, comes nearer to the baseline.",
        rank=4,
    ),
    Recipe(
        name="update-penalty",
        title="An L2 penalty on the update",
        location="Appendix, other experiments",
        runs=(
            clipped(15),
            *(
                replace(
                    clipped(15),
                    name=f"flat-S15-penalty{penalty:g}",
                    changes=(f"update.update_penalty={penalty:g}", *clipped(15).changes),
                )
                for penalty in (0.001, 0.01)
            ),
        ),
        claim="The penalty does not help.",
        rank=11,
    ),
    Recipe(
        name="tied-embeddings",
        title="Tied against untied embeddings",
        location="Appendix, model",
        runs=(baseline(), variant("untied", baseline(rounds=SWEEP), "model.tied=false")),
        claim="Tying makes the model 40 % smaller for a small loss.",
        rank=11,
    ),
    Recipe(
        name="unit-norm",
        title="Word vectors of norm 1 against free ones",
        location="Appendix, model",
        runs=tuple(
            each
            for run in (baseline(rounds=SWEEP), clipped(15))
            for each in (run, variant("free-norm", run, "model.unit_norm=false"))
        ),
        claim="Vectors of norm 1 converge faster.",
        rank=11,
    ),
    Recipe(
        name="another-corpus",
        title="Training on another corpus",
        location="Section 3",
        runs=(baseline(), MAIN[1], PUBLIC),
        claim="Training on another corpus costs far more (2.50 points) than privacy does.",
        rank=11,
    ),
    Recipe(
        name="public-start",
        title="A public start before private training",
        location="Not in the paper (recommended in Appendix B)",
        runs=(
            PUBLIC,
            MAIN[1],
            replace(MAIN[1], name="after-public-" + MAIN[1].name, rounds=1500, after=PUBLIC.name, is_after_public=True),
        ),
        claim="A model that begins from public text reaches the same accuracy in fewer private rounds.",
        rank=12,
    ),
    Recipe(
        name="adaptive-clipping",
        title="A clip that follows the users against the best fixed one",
        location="Not in the paper (Andrew et al. 2021)",
        runs=(
            *(traded(norm) for norm in TRADES),
            PaperRun(
                name="adaptive-z0.06",
                changes=("clip.kind=adaptive", "clip.initial_norm=10", "noise.noise_multiplier=0.06"),
                rounds=SWEEP,
            ),
        ),
        claim="At the same z the median of the users' norms does about as well as the best S of a sweep.",
        rank=12,
    ),
    Recipe(
        name="other-models",
        title="A GRU and a character model under the same plan",
        location="Not in the paper",
        runs=(
            *(variant("gru", run, "model.kind=tied_gru") for run in PLAIN_CLIPPED_NOISED),
            *(variant("characters", run, corpus="characters") for run in PLAIN_CLIPPED_NOISED),
        ),
        claim="The same S and sigma cost other models as little.",
        rank=12,
    ),
    Recipe(
        name="cost",
        title="What a round costs at the paper's population",
        location="Not in the paper",
        runs=(
            replace(noised(15, 0.012, users=1250), name="cost-C1250", corpus="synthetic", rounds=20),
            replace(noised(15, 0.003, users=5000), name="cost-C5000", corpus="synthetic", rounds=10),
        ),
        claim="Training with 5,000 users per round, which the paper only estimated, is no longer too expensive.",
        rank=2,
    ),
)
"""What the paper mentions without a figure, recommends without doing it, or leaves open."""


RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (*FIGURES, *BEYOND_THE_PAPER)}
"""All recipes by name."""
