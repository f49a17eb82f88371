"""The paper's tables and figures: which runs each needs, and what the paper concluded from it.

Where in the paper: `place` says. Where a plot's own values are not printed, the grid is ours.
"""

from reproduction.recipe import PaperRun, Recipe
from reproduction.runs import LONG, MAIN, SWEEP, TRADES, baseline, clipped, noised, traded, variant

SEEDS = (1, 2, 3)
CLIPS = (2.5, 5, 10, 15, 20, 30, 40)
NOISES = (0.003, 0.006, 0.012, 0.024, 0.048, 0.2)
S20 = traded(20)
VARIABLE = PaperRun(
    name="variable-true-average",
    changes=("estimator.kind=true_average", "clip.kind=none", "noise.kind=none"),
    rounds=SWEEP,
)


def _fedsgd(run: PaperRun) -> PaperRun:
    """One gradient of all of a user's data: 1,600 tokens and the BOS of each sentence are 160 to 192 windows of 10 (on blogs)."""
    return variant("fedsgd", run, "update.kind=fedsgd", "update.batch_size=200", "sampling.users_per_round=50")


def _dictionaries(*runs: PaperRun) -> tuple[PaperRun, ...]:
    """With the two larger dictionaries, and with the usual one to compare."""
    return (*(variant(size, run, corpus=size) for size in ("20k", "30k") for run in runs), *runs)


FIGURES = (
    Recipe(
        name="table-rounds",
        title="Privacy after 1 to 10^6 rounds",
        place="Table 1",
        claim="With noise in proportion to the sensitivity, epsilon stays reasonable over a large range of parameters.",
        rank=0,
    ),
    Recipe(
        name="noised-vs-baseline",
        title="Noised training against the non-private baseline",
        place="Figure 1",
        runs=tuple(run.with_seed(seed) for run in MAIN for seed in (SEEDS if run in MAIN[:2] else SEEDS[:1])),
        claim="sigma = 0.003 nearly matches the baseline; more noise costs more, later in training.",
        rank=1,
    ),
    Recipe(
        name="table-accuracy",
        title="Privacy and AccuracyTop1 by sigma, S, users and C",
        place="Table 2",
        runs=MAIN,
        claim="sigma = 0.003 with S = 15 costs 0.13 points of AccuracyTop1; 0.006 and 0.012 cost 0.58 and 1.29.",
        rank=1,
    ),
    Recipe(
        name="users-100-vs-1250",
        title="100 against 1,250 users a round at equal sigma",
        place="Figure 7",
        runs=(MAIN[3], noised(15, 0.012, users=1250)),
        claim="Both give almost the same accuracy at every round, so a cheap run with C = 100 estimates a private one.",
        rank=2,
    ),
    Recipe(
        name="private-for-real",
        title="The runs that the paper could only estimate, at z = 1",
        place="Section 3",
        runs=(MAIN[1], MAIN[3], noised(15, 0.012, users=1250), noised(15, 0.003, users=5000)),
        claim="Accuracy trained with C = 100 at equal sigma is that of the private run with z = 1.",
        rank=2,
    ),
    Recipe(
        name="trade-offs",
        title="Noise against clipping at equal privacy, from the beginning",
        place="Figure 8, left",
        runs=(*(traded(norm) for norm in TRADES), S20.with_seed(2)),
        claim="Early in training S between 10 and 12.6 works well; two runs with S = 20 differ little.",
        rank=3,
    ),
    Recipe(
        name="trade-offs-adjusted",
        title="Noise and clipping adjusted after initial training",
        place="Figure 4 and Figure 8, right",
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
        place="Table 3",
        runs=(*MAIN, noised(20, 0.024), noised(20, 0.048), noised(15, 0.012, users=1250)),
        claim="Better models use fewer head words; noise and C alone change little until they cost accuracy.",
        rank=4,
    ),
    Recipe(
        name="clipping",
        title="The effect of clipping, flat and per layer",
        place="Figure 2",
        runs=(*(clipped(norm, kind) for kind in ("flat", "per_layer") for norm in CLIPS), VARIABLE),
        claim="S between 10 and 20 has at most a small effect after 100, 500 and 3,000 rounds.",
        rank=5,
    ),
    Recipe(
        name="noise",
        title="The effect of noise at S = 20, flat and per layer",
        place="Figure 3",
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
        place="Figure 5",
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
        place="Figure 6",
        runs=tuple(baseline(users, LONG if users == 100 else SWEEP) for users in (10, 30, 100, 300, 1000)),
        claim="More users a round help, with diminishing returns.",
        rank=8,
    ),
    Recipe(
        name="fedsgd-clipping",
        title="FedSGD: the effect of clipping",
        place="Figure 9",
        runs=(*(_fedsgd(clipped(norm)) for norm in (0.5, 1, 2, 5, 20)), clipped(20)),
        claim="A much smaller S does for FedSGD (2), which needs many more rounds for the same accuracy.",
        rank=9,
    ),
    Recipe(
        name="fedsgd-noise",
        title="FedSGD: the effect of noise at S = 20",
        place="Figure 10",
        runs=(
            *(_fedsgd(noised(20, sigma)) for sigma in (0.001, 0.002, 0.006, 0.024)),
            _fedsgd(clipped(20)),
            _fedsgd(noised(2, 0.002)),
            clipped(20),
            noised(20, 0.024),
        ),
        claim="FedSGD bears less noise than FedAvg: about sigma = 0.002.",
        rank=9,
    ),
    Recipe(
        name="dictionaries-clipping",
        title="20,000 and 30,000 words: the effect of clipping",
        place="Figure 11",
        runs=_dictionaries(clipped(10), clipped(20), VARIABLE),
        claim="Larger dictionaries help little and need no other S.",
        rank=10,
    ),
    Recipe(
        name="dictionaries-noise",
        title="20,000 and 30,000 words: the effect of noise at S = 20",
        place="Figure 12",
        runs=_dictionaries(clipped(20), noised(20, 0.012), noised(20, 0.048)),
        claim="Larger dictionaries need no other sigma.",
        rank=10,
    ),
)
