"""`unheard paper`: a hidden command that says where the reproduction of the paper went."""

import typer

MOVED = """The reproduction of the paper is not in the installed package since 0.2.0. Clone the repository and run, from its root:

  python -m reproduction list

  python -m reproduction run all --corpus corpora/paper --name blogs

  make paper
"""


def paper() -> None:
    """Say where the commands of the reproduction are (`python -m reproduction`)."""
    typer.echo(MOVED)
    raise typer.Exit(2)
