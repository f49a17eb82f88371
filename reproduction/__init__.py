"""The reproduction of McMahan et al. (2018), "Learning Differentially Private Recurrent Language Models" (ICLR).

This package is not installed with `unheard`. It holds the recipe of every table and figure, the runner, the results,
and the pages that compare them with the paper. `python -m reproduction list | show | prepare | run | compare | page`
are its commands (`cli/`).

    recipes.py -> scheduling.py -> runner.py (workspace.py, base_config.py, measures.py) -> results/<corpus>/runs.jsonl
    results.py -> exhibits/ (exhibit.py, verdict.py, printed.py) -> cli/, page.py, plots.py, comparison.py

Words and numbers that are no code are in `recipes.toml` (titles, conclusions and rules), `printed.toml` (the paper's
tables), `sources.toml` (where the corpora come from) and `templates/` (the page, the report, the rules, a picture).

The runs with registered rules (`rules.toml`, rendered as `rules.md`) are built from the same runs (`recipes.py`) and
measured by the same module (`measures.py`). Each has a folder of its own under results/:

    private_run.py (batch.py and bundles.py: several steps at once, on several machines) -> results/<corpus>/<run>/
    private_results.py (verdicts, bootstrap.py) -> private_tables.py -> private_report.py, private_picture.py, page.py
"""
