"""The reproduction of McMahan et al. (2018), "Learning Differentially Private Recurrent Language Models" (ICLR).

This package is not installed with `unheard`. It holds the recipe of every table and figure, the program that executes
the runs, the results, and the pages that compare the results with the paper. The commands are `python -m reproduction
list | show | prepare | run | compare | page` (`cli/`). An arrow below means "is used by" or "writes":

    recipes.py -> scheduling.py -> runner.py (workspace.py, base_config.py, measures.py) -> results/<corpus>/runs.jsonl
    results.py -> exhibits/ (exhibit.py, verdict.py, printed.py) -> cli/, page.py, plots.py, comparison.py

Text and numbers are kept outside the code: in `recipes.toml` (titles, conclusions and rules), `printed.toml` (the
paper's tables), `sources.toml` (where the corpora come from) and `templates/` (the page, the report, the rules and a
picture).

A second group of runs follows rules that were registered before the runs (`rules.toml`, rendered as `rules.md`). These
runs are derived from the runs of `recipes.py` and measured by the same module (`measures.py`). Each has a folder of its
own under results/:

    private_run.py (with batch.py and bundles.py for several steps and machines at once) -> results/<corpus>/<run>/
    private_results.py (verdicts, bootstrap.py) -> private_tables.py -> private_report.py, private_picture.py, page.py
"""
