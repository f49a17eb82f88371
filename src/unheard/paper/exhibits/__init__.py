"""A file for each table and figure: from what the runs found to what is shown, by the recipe's name.

In: Found. Out: Exhibit. No torch: results are read, nothing is trained.
"""

from collections.abc import Callable

from unheard.errors import UnknownKey
from unheard.paper.exhibit import Exhibit
from unheard.paper.exhibits.adaptive_clipping import adaptive_clipping
from unheard.paper.exhibits.another_corpus import another_corpus
from unheard.paper.exhibits.clipping import clipping
from unheard.paper.exhibits.closing_the_gap import closing_the_gap
from unheard.paper.exhibits.cost import cost
from unheard.paper.exhibits.dictionaries import dictionaries_clipping, dictionaries_noise
from unheard.paper.exhibits.estimators import estimators
from unheard.paper.exhibits.fedsgd import fedsgd_clipping, fedsgd_noise
from unheard.paper.exhibits.head_words import head_words
from unheard.paper.exhibits.model_choices import tied_embeddings, unit_norm
from unheard.paper.exhibits.noise import noise
from unheard.paper.exhibits.noised_vs_baseline import noised_vs_baseline
from unheard.paper.exhibits.other_models import other_models
from unheard.paper.exhibits.private_for_real import private_for_real
from unheard.paper.exhibits.public_start import public_start
from unheard.paper.exhibits.table_accuracy import table_accuracy
from unheard.paper.exhibits.table_rounds import table_rounds
from unheard.paper.exhibits.trade_offs import trade_offs, trade_offs_adjusted
from unheard.paper.exhibits.update_penalty import update_penalty
from unheard.paper.exhibits.users_100_vs_1250 import users_100_vs_1250
from unheard.paper.exhibits.users_per_round import users_per_round
from unheard.paper.found import Found
from unheard.paper.recipe import Recipe
from unheard.paper.recipes import RECIPES
from unheard.parts import nearest

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
