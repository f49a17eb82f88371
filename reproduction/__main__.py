"""Entry point of `python -m reproduction`, which lists, runs, compares and shows the tables and figures of the paper."""

from reproduction.cli.main import app
from unheard.cli.main import run_app

if __name__ == "__main__":
    run_app(app)
