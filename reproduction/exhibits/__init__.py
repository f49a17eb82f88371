"""The exhibits: one function per table and figure, from the results of one corpus to what is shown.

| module | exhibits | | --- | --- | | `tables` | Tables 1, 2 and 3: privacy by rounds, accuracy by noise, head words |
| `private_cost` | Figure 1: noised training against the baseline; where the remaining gap comes from | | `sweeps` |
Figures 2, 3, 9 to 12: accuracy over S and over sigma, for FedAvg, FedSGD and larger dictionaries | | `clip_choices` |
Figures 4 and 8: S against sigma at equal privacy; an adaptive clip | | `variants` | Figure 5 and the appendix:
estimators, an update penalty, properties of the model, other models | | `cohort_size` | Figures 6 and 7 and Section
3: users per round, runs with z = 1, cost of a round | | `public_data` | Section 3 and the appendix: training on
another corpus, a public initial model |

    exhibit("clipping", read_results(Path("reproduction/results/blogs"))).verdict.sentence

Each function takes a `Recipe` and a `ResultSet` and returns an `Exhibit`. Next to it are its rule in words
(`RULE_...`) and the function that applies the rule (`judge_...`). Nothing is trained here, and torch is not imported.
"""

from collections.abc import Callable

from reproduction.exhibit import Exhibit
from reproduction.exhibits.clip_choices import adaptive_clipping, trade_offs, trade_offs_adjusted
from reproduction.exhibits.cohort_size import cost, private_for_real, users_100_vs_1250, users_per_round
from reproduction.exhibits.private_cost import closing_the_gap, noised_vs_baseline
from reproduction.exhibits.public_data import another_corpus, public_start
from reproduction.exhibits.sweeps import (
    clipping,
    dictionaries_clipping,
    dictionaries_noise,
    fedsgd_clipping,
    fedsgd_noise,
    noise,
)
from reproduction.exhibits.tables import head_words, table_accuracy, table_rounds
from reproduction.exhibits.variants import estimators, other_models, tied_embeddings, unit_norm, update_penalty
from reproduction.recipe import Recipe
from reproduction.recipes import RECIPES
from reproduction.results import ResultSet
from unheard.config import nearest
from unheard.errors import UnknownKey

EXHIBITS: dict[str, Callable[[Recipe, ResultSet], Exhibit]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        table_rounds,
        noised_vs_baseline,
        table_accuracy,
        closing_the_gap,
        users_100_vs_1250,
        private_for_real,
        cost,
        trade_offs,
        trade_offs_adjusted,
        head_words,
        clipping,
        noise,
        estimators,
        users_per_round,
        fedsgd_clipping,
        fedsgd_noise,
        dictionaries_clipping,
        dictionaries_noise,
        update_penalty,
        tied_embeddings,
        unit_norm,
        another_corpus,
        public_start,
        adaptive_clipping,
        other_models,
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
    return EXHIBITS[name](RECIPES[name], results)
