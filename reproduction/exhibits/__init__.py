"""One function per table and figure, which builds the exhibit from the results of one corpus.

    tables          Tables 1, 2 and 3: privacy by rounds, accuracy by noise, head words
    private_cost    Figure 1: noised training against the baseline; where the remaining gap comes from
    sweeps          Figures 2, 3, 9 to 12: accuracy over S and over sigma, for FedAvg, FedSGD and larger dictionaries
    clip_choices    Figures 4 and 8: S against sigma at equal privacy; an adaptive clip
    variants        Figure 5 and the appendix: estimators, an update penalty, properties of the model, other models
    cohort_size     Figures 6 and 7 and Section 3: users per round, runs with z = 1, cost of a round
    public_data     Section 3 and the appendix: training on another corpus, a public initial model

    exhibit("clipping", read_results(Path("reproduction/results/blogs"))).verdict.sentence

Each function adds tables and figures to a `Draft`. Then it applies the rule of its recipe (`recipes.toml`) and returns
a `Ruling`, or raises `Undecided`. Nothing is trained here, and torch is not imported.
"""

from collections.abc import Callable

from reproduction.exhibit import Draft, Exhibit
from reproduction.exhibits import clip_choices, cohort_size, private_cost, public_data, sweeps, tables, variants
from reproduction.recipes import RECIPES
from reproduction.results import ResultSet
from reproduction.verdict import Ruling, Undecided, verdict_of
from unheard.config import nearest
from unheard.errors import UnknownKey

EXHIBITS: dict[str, Callable[[Draft], Ruling]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        tables.table_rounds,
        private_cost.noised_vs_baseline,
        tables.table_accuracy,
        private_cost.closing_the_gap,
        cohort_size.users_100_vs_1250,
        cohort_size.private_for_real,
        cohort_size.cost,
        clip_choices.trade_offs,
        clip_choices.trade_offs_adjusted,
        tables.head_words,
        sweeps.clipping,
        sweeps.noise,
        variants.estimators,
        cohort_size.users_per_round,
        sweeps.fedsgd_clipping,
        sweeps.fedsgd_noise,
        sweeps.dictionaries_clipping,
        sweeps.dictionaries_noise,
        variants.update_penalty,
        variants.tied_embeddings,
        variants.unit_norm,
        public_data.another_corpus,
        public_data.public_start,
        clip_choices.adaptive_clipping,
        variants.other_models,
    )
}
"""The function of each exhibit by the name of its recipe, in the order of display."""


def exhibit(name: str, results: ResultSet) -> Exhibit:
    """Build one table or figure.

    Args:
        name: Name of its recipe, for example `noised-vs-baseline`.
        results: Results of one corpus.

    Raises:
        UnknownKey: There is no table or figure with this name.
    """
    if name not in EXHIBITS:
        raise UnknownKey(f"The paper has no table or figure called '{name}' here.{nearest(name, EXHIBITS)}")
    draft = Draft(RECIPES[name], results)
    try:
        ruling = EXHIBITS[name](draft)
    except Undecided as reason:  # functions apply the rule last, so the draft already has all tables and figures
        ruling = None, str(reason)
    return draft.exhibit(verdict_of(ruling, RECIPES[name].rule))
