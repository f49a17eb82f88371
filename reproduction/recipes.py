"""Every recipe by its name: the paper's tables and figures, then what is around them.
What the paper tells of without a figure, what it recommends and did not do, and what it leaves open: runs, and what to expect.

Where in the paper: `place` says, if it is there.
"""

from dataclasses import replace

from reproduction.figures import FIGURES
from reproduction.recipe import PaperRun, Recipe
from reproduction.runs import MAIN, SWEEP, TRADES, baseline, clipped, noised, traded, variant

GAPS = (15, 20, 30)
PLAIN_CLIPPED_NOISED = (baseline(rounds=SWEEP), clipped(15), noised(15, 0.003))
PUBLIC = variant("other", replace(baseline(), rounds=1500), corpus="other")

AROUND = (
    Recipe(
        name="closing-the-gap",
        title="What is between noised training and the baseline",
        place="Not in the paper",
        runs=(*MAIN[:2], *(run for norm in GAPS for run in (clipped(norm), noised(norm, 0.003)))),
        claim="At sigma = 0.003 a larger S, which needs more users a round for the same privacy, comes nearer to the baseline.",
        rank=4,
    ),
    Recipe(
        name="update-penalty",
        title="An L2 penalty on the update",
        place="Appendix, other experiments",
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
        place="Appendix, model",
        runs=(baseline(), variant("untied", baseline(rounds=SWEEP), "model.tied=false")),
        claim="Tying makes the model 40 % smaller for a small loss.",
        rank=11,
    ),
    Recipe(
        name="unit-norm",
        title="Word vectors of norm 1 against free ones",
        place="Appendix, model",
        runs=tuple(
            made
            for run in (baseline(rounds=SWEEP), clipped(15))
            for made in (run, variant("free-norm", run, "model.unit_norm=false"))
        ),
        claim="Vectors of norm 1 converge faster.",
        rank=11,
    ),
    Recipe(
        name="another-corpus",
        title="Training on another corpus",
        place="Section 3",
        runs=(baseline(), MAIN[1], PUBLIC),
        claim="Training on another corpus costs far more (2.50 points) than privacy does.",
        rank=11,
    ),
    Recipe(
        name="public-start",
        title="A public start before private training",
        place="Appendix, initialization (recommended, not done)",
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
        place="Not in the paper (Andrew et al. 2021)",
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
        place="Not in the paper",
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
        place="Not in the paper",
        runs=(
            replace(noised(15, 0.012, users=1250), name="cost-C1250", corpus="synthetic", rounds=20),
            replace(noised(15, 0.003, users=5000), name="cost-C5000", corpus="synthetic", rounds=10),
        ),
        claim="Training with thousands of users a round, which the paper could only estimate, is no longer too expensive.",
        rank=2,
    ),
)


RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (*FIGURES, *AROUND)}
