"""Reports on runs: tables, plots and a self-contained HTML page, computed from run folders without torch.

Modules:

    run_record      read one run folder as plain data: curves by round, and the status of a run that is training
    comparison      compare several runs: baseline, cautions, cost of computation, hypothetical epsilons
    tables          the tables that the terminal and the page show
    plots           the plots that the page shows; they can also be written as PNG and SVG files
    style           colours, dashes, axes and fonts of the plots
    page            write the HTML page with the Jinja2 templates in `templates/`
    tracking        copy the evaluations of a run to TensorBoard, MLflow and Weights & Biases

The numbers come from `run.toml`, `ledger.jsonl`, `metrics.jsonl` and `measures.json` of a run folder. Every epsilon is
computed from the ledger; none is copied from `statement.json`.

Example:

    from unheard.report.comparison import Comparison
    from unheard.report.page import write_page

    write_page(Comparison.read(["runs/plain", "runs/private"]), "page")
"""
