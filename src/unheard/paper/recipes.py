"""Every recipe by its name: the paper's tables and figures, then what is around them."""

from unheard.paper.around import AROUND
from unheard.paper.figures import FIGURES
from unheard.paper.recipe import Recipe

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (*FIGURES, *AROUND)}
