"""A file for each table and figure: from what the runs found to what is shown, by the recipe's name.

In: Found. Out: Exhibit. No torch: results are read, nothing is trained.
"""

from collections.abc import Callable

from reproduction.exhibit import Exhibit
from reproduction.exhibits.adaptive_clipping import adaptive_clipping
from reproduction.exhibits.another_corpus import another_corpus
from reproduction.exhibits.clipping import clipping
from reproduction.exhibits.closing_the_gap import closing_the_gap
from reproduction.exhibits.cost import cost
from reproduction.exhibits.dictionaries import dictionaries_clipping, dictionaries_noise
from reproduction.exhibits.estimators import estimators
from reproduction.exhibits.fedsgd import fedsgd_clipping, fedsgd_noise
from reproduction.exhibits.head_words import head_words
from reproduction.exhibits.model_choices import tied_embeddings, unit_norm
from reproduction.exhibits.noise import noise
from reproduction.exhibits.noised_vs_baseline import noised_vs_baseline
from reproduction.exhibits.other_models import other_models
from reproduction.exhibits.private_for_real import private_for_real
from reproduction.exhibits.public_start import public_start
from reproduction.exhibits.table_accuracy import table_accuracy
from reproduction.exhibits.table_rounds import table_rounds
from reproduction.exhibits.trade_offs import trade_offs, trade_offs_adjusted
from reproduction.exhibits.update_penalty import update_penalty
from reproduction.exhibits.users_100_vs_1250 import users_100_vs_1250
from reproduction.exhibits.users_per_round import users_per_round
from reproduction.recipe import Recipe
from reproduction.recipes import RECIPES
from reproduction.results_query import Found
from unheard.config import nearest
from unheard.errors import UnknownKey

EXHIBITS: dict[str, Callable[[Recipe, Found], Exhibit]] = {
    made.__name__.replace("_", "-"): made
    for made in (
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
"""In the order in which they are shown."""


def exhibit(name: str, found: Found) -> Exhibit:
    """One table or figure, filled with what was found."""
    if name not in EXHIBITS:
        raise UnknownKey(f"The paper has no table or figure called '{name}' here.{nearest(name, EXHIBITS)}")
    return EXHIBITS[name](RECIPES[name], found)
