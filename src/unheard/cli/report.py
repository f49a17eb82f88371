"""`unheard report`: write a self-contained HTML page about one or more runs.

The page needs no network: plots are SVG inside the page. It holds the same figures as `unheard compare`, the privacy
statement in plain words, and the configuration of each run.
"""

from pathlib import Path
from typing import Annotated

import typer

from unheard.cli.interruption import output_kept, set_kept
from unheard.cli.options import (
    MEASURES_KEPT,
    AsIfUsers,
    AsIfUsersPerRound,
    Baseline,
    Force,
    NoMeasure,
    Prompts,
    RunDirs,
)

EXAMPLES = """Examples:

  unheard report runs/first --out page

  unheard report runs/plain runs/private --out page --title "Keyboard model, autumn"

  unheard report runs/private --out page --as-if-users 1000000    (adds a hypothetical ε)
"""


def report(
    folders: RunDirs,
    out: Annotated[Path, typer.Option(help="The folder for the page.")],
    title: Annotated[str | None, typer.Option(help="The page's heading.", show_default="the names of the runs")] = None,
    baseline: Baseline = None,
    prompt: Prompts = None,
    as_if_users: AsIfUsers = None,
    as_if_users_per_round: AsIfUsersPerRound = None,
    no_measure: NoMeasure = False,
    force: Force = False,
) -> None:
    """Write a self-contained HTML page: the privacy statement in plain words, curves, tables, configuration."""
    set_kept(
        lambda: "Stopped. The page is as it was." if force else output_kept(out / "index.html", also=MEASURES_KEPT)
    )
    from unheard.cli.display import notes, say
    from unheard.cli.evaluate import full_measures_if_possible
    from unheard.report.comparison import Comparison
    from unheard.report.page import check_page_folder, write_page

    check_page_folder(out, force=force)
    if not no_measure:
        for folder in folders:
            full_measures_if_possible(folder, prompts=prompt)
    with notes.status("Computing what each run cost, and writing the page"):
        comparison = Comparison.read(
            folders, baseline=baseline, as_if_users=as_if_users, as_if_users_per_round=as_if_users_per_round
        )
        page = write_page(comparison, out, title=title, force=force)
    say(f"The page is written: {page.resolve().as_uri()}")
