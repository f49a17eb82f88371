"""`unheard compare`: runs beside each other, in the terminal: what each learned, what each cost."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from unheard.report.comparison import Comparison

EXAMPLES = """Examples:

  unheard compare runs/demo/plain runs/demo/private

  unheard compare runs/a runs/b runs/c --baseline runs/a --prompt "see you" --png plots

  unheard compare runs/plain runs/noisy --as-if-users 763430 --as-if-users-per-round 5000    (a hypothetical ε)
"""


def compare(
    folders: Annotated[list[Path], typer.Argument(help="Run folders.", metavar="DIR...")],
    baseline: Annotated[
        str | None, typer.Option(help="The run to be as accurate as; default: the first without privacy.")
    ] = None,
    accuracy: Annotated[
        float | None, typer.Option(help="Another AccuracyTop1 to be reached, as a fraction.", min=0, max=1, metavar="A")
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="Words to continue. May be repeated.")] = None,
    as_if_users: Annotated[
        int | None,
        typer.Option(help="Also the hypothetical ε of the same run drawn from so many users.", min=2, metavar="N"),
    ] = None,
    as_if_users_per_round: Annotated[
        float | None,
        typer.Option(help="And with so many users a round (the noise on the average stays).", min=1, metavar="N"),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Also write the page of `unheard report` into this folder.")] = None,
    png: Annotated[Path | None, typer.Option(help="Also write each plot as a PNG file into this folder.")] = None,
    no_measure: Annotated[
        bool, typer.Option("--no-measure", help="Show what is there; else runs without full measures are measured now.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Compare runs: accuracy, epsilon, head words, word frequencies, predictions, and the computation that privacy took."""
    import json

    from unheard.cli.display import console, notes
    from unheard.report.comparison import Comparison

    if not no_measure:
        _measure(folders, prompt)
    with notes.status("Working out what each run cost"):
        compared = Comparison.read(
            folders,
            baseline=baseline,
            accuracy=accuracy,
            as_if_users=as_if_users,
            as_if_users_per_round=as_if_users_per_round,
        )
        data = compared.as_json()
    if as_json:
        print(json.dumps(data, allow_nan=False))
    else:
        _show(compared)
    written = []
    if html:
        from unheard.report.page import write_page

        written.append(write_page(compared, html))
    if png:
        from unheard.report.images import write_images

        written += write_images(compared, png)
    for path in written:
        (notes if as_json else console).print(f"Written: {path}", highlight=False, markup=False, soft_wrap=True)


def _measure(folders: list[Path], prompt: list[str] | None) -> None:
    from unheard.cli.measuring import measured_if_possible

    for folder in folders:
        measured_if_possible(folder, prompts=prompt)


def _show(compared: "Comparison") -> None:
    from rich.text import Text

    from unheard.cli.display import console, print_curves, print_table
    from unheard.report import tables
    from unheard.report.run_record import accuracy_points, epsilon_points

    print_table(tables.summary(compared))
    for caution in compared.cautions:
        console.print(Text(f"Note: {caution}", style="yellow"))
    points = [point for record in compared.records for point in accuracy_points(record)]
    print_curves("AccuracyTop1 by round, in %, smoothed over 5 evaluations", points, "smoothed", times=100)
    spent = [point for record in compared.records for point in epsilon_points(record)]
    print_curves("ε by round (RDP)", spent, "epsilon")
    if len(compared.records) > 1:
        print_table(tables.computation(compared))
    if measured := compared.measured:
        for table in (tables.accuracies, tables.users, tables.bands, tables.head_words, tables.predictions):
            print_table(table(measured))
