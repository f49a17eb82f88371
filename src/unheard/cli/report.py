"""`unheard report`: one page about one or more runs, to be opened from disk, sent around, printed."""

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Examples:

  unheard report runs/first --out page

  unheard report runs/plain runs/private --out page --title "Keyboard model, autumn"

  unheard report runs/private --out page --as-if-users 1000000    (adds a hypothetical ε)
"""


def report(
    folders: Annotated[list[Path], typer.Argument(help="Run folders.", metavar="DIR...")],
    out: Annotated[Path, typer.Option(help="The folder for the page.")],
    title: Annotated[str | None, typer.Option(help="The page's heading.")] = None,
    baseline: Annotated[
        str | None, typer.Option(help="The run to be as accurate as; default: the first without privacy.")
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
    no_measure: Annotated[
        bool, typer.Option("--no-measure", help="Show what is there; else runs without full measures are measured now.")
    ] = False,
) -> None:
    """Write a self-contained HTML page: the privacy statement in plain words, curves, tables, configuration."""
    from unheard.cli.display import notes, say
    from unheard.cli.measuring import measured_if_possible
    from unheard.report.comparison import Comparison
    from unheard.report.page import write_page

    if not no_measure:
        for folder in folders:
            measured_if_possible(folder, prompts=prompt)
    with notes.status("Working out what each run cost, and writing the page"):
        compared = Comparison.read(
            folders, baseline=baseline, as_if_users=as_if_users, as_if_users_per_round=as_if_users_per_round
        )
        page = write_page(compared, out, title=title)
    say(f"The page is written: {page.resolve().as_uri()}")
