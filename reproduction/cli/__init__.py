"""The commands of `python -m reproduction`: one module per command, and `main` for the small ones."""
