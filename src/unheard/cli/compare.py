"""`unheard compare`: compare runs in the terminal: what each learned, and what each cost.

Prints the tables and curves of `report/`: accuracy and epsilon by round, accuracy by word frequency, predictions, and
how many user updates each run took to the accuracy of the baseline. Runs without full measures are measured first
(`full_measures_if_possible`).
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unheard.cli.interruption import set_kept
from unheard.cli.options import (
    MEASURES_KEPT,
    AsIfUsers,
    AsIfUsersPerRound,
    AsJson,
    Baseline,
    Force,
    NoMeasure,
    Prompts,
    RunDirs,
)

if TYPE_CHECKING:
    from unheard.report.comparison import Comparison

EXAMPLES = """Examples:

  unheard compare runs/demo/plain runs/demo/private

  unheard compare runs/a runs/b runs/c --baseline runs/a --prompt "see you" --png plots

  unheard compare runs/plain runs/noisy --as-if-users 763430 --as-if-users-per-round 5000    (a hypothetical ε)
"""


def compare(
    folders: RunDirs,
    baseline: Baseline = None,
    accuracy: Annotated[
        float | None,
        typer.Option(
            help="Compare the rounds to this AccuracyTop1, as a fraction.",
            min=0,
            max=1,
            metavar="A",
            show_default="the baseline's",
        ),
    ] = None,
    prompt: Prompts = None,
    as_if_users: AsIfUsers = None,
    as_if_users_per_round: AsIfUsersPerRound = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Also write the page of `unheard report` into this folder.", show_default="not written"),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(help="Also write each plot as a PNG file into this folder.", show_default="not written"),
    ] = None,
    no_measure: NoMeasure = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Compare runs: accuracy, epsilon, word frequencies, predictions, and the computation that privacy took."""
    set_kept(lambda: f"Stopped. {MEASURES_KEPT} The same command goes on.")
    import json

    from unheard.cli.display import note, notes, say
    from unheard.cli.evaluate import full_measures_if_possible
    from unheard.report.comparison import Comparison
    from unheard.report.page import check_page_folder, write_page

    if html:
        check_page_folder(html, force=force)
    if not no_measure:
        for folder in folders:
            full_measures_if_possible(folder, prompts=prompt)
    with notes.status("Computing what each run cost"):
        comparison = Comparison.read(
            folders,
            baseline=baseline,
            accuracy=accuracy,
            as_if_users=as_if_users,
            as_if_users_per_round=as_if_users_per_round,
        )
        data = comparison.as_json()
    if as_json:
        print(json.dumps(data, allow_nan=False))
    else:
        _print_comparison(comparison)
    written = []
    if html:
        written.append(write_page(comparison, html, force=force))
    if png:
        from unheard.report.images import write_images

        written += write_images(comparison, png)
    for path in written:
        (note if as_json else say)(f"Written: {path}")


def _print_comparison(comparison: "Comparison") -> None:
    """Prints the tables and curves of a comparison."""
    from rich.text import Text

    from unheard.cli.display import console, print_curves, print_table
    from unheard.report import tables
    from unheard.report.run_record import accuracy_points, epsilon_points

    print_table(tables.summary(comparison))
    for caution in comparison.cautions:
        console.print(Text(f"Note: {caution}", style="yellow"))
    accuracies = [point for record in comparison.records for point in accuracy_points(record)]
    title = "AccuracyTop1 by round, in %, smoothed over 5 evaluations"
    print_curves(title, accuracies, "smoothed", times=100, colours=comparison.colours)
    epsilons = [point for record in comparison.records for point in epsilon_points(record)]
    print_curves("ε by round (RDP)", epsilons, "epsilon", colours=comparison.colours)
    if len(comparison.records) > 1:
        print_table(tables.computation(comparison))
    if measured := comparison.measured:
        for table in (tables.accuracies, tables.users, tables.bands, tables.head_words, tables.predictions):
            print_table(table(measured))
