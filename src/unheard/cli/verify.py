"""`unheard verify`: check that the files of a run folder agree, and recompute its epsilon.

Prints one line for each check of `audit/verification.py`: it fits, it does not, or it could not be checked, for example
because the store is not on this machine.
"""

import typer

from unheard.cli.options import AsJson, Corpus, RunDir

EXAMPLES = """Examples:

  unheard verify runs/first

  unheard verify runs/first --corpus /data/chat --json
"""

MARKS = {True: "[green]fits[/]", False: "[bold red]DOES NOT FIT[/]", None: "[yellow]not checked[/]"}


def verify(folder: RunDir, corpus: Corpus = None, as_json: AsJson = False) -> None:
    """Recompute epsilon from the ledger and check that everything in a run folder agrees with it.

    Exit status 2 if it does not.
    """
    from dataclasses import asdict
    from json import dumps

    from rich.markup import escape
    from rich.table import Table

    from unheard.audit.verification import verify as verify_folder
    from unheard.cli.display import console, notes, say

    with notes.status("Reading the folder and recomputing epsilon"):
        findings = verify_folder(folder, corpus)
    wrong = [finding.name for finding in findings if finding.fits is False]
    if as_json:
        print(dumps({"fits": not wrong, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        table = Table("", "", "", show_header=False, box=None)
        for finding in findings:
            table.add_row(MARKS[finding.fits], finding.name, escape(finding.words))
        console.print(table)
        say(f"This folder cannot be trusted: {', '.join(wrong)}." if wrong else "Everything that was checked fits.")
    if wrong:
        raise typer.Exit(2)
