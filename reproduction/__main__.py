"""`python -m reproduction`: the paper's tables and figures, listed, run, compared and shown."""

from reproduction.cli.main import app
from unheard.cli.main import run_app

if __name__ == "__main__":
    run_app(app)
