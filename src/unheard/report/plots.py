"""The plots of a page, each a Vega-Lite specification with a sentence that says what it shows.

In: a Comparison. Out: `Plot`s, those that there is something to draw for. The page's tables hold the same numbers for those who
do not see plots.
"""

from unheard.report.comparison import Comparison
from unheard.report.plots_by_round import Plot, accuracy_by_round, epsilon_by_round
from unheard.report.plots_of_words import accuracy_by_band, accuracy_by_user, head_word_histograms

__all__ = ["Plot", "plots"]


def plots(compared: Comparison) -> list[Plot]:
    made = [accuracy_by_round(compared), epsilon_by_round(compared)]
    if compared.measured:
        made += [accuracy_by_band(compared), accuracy_by_user(compared), *head_word_histograms(compared)]
    return [plot for plot in made if plot is not None]
