"""Reports on runs: tables, plots and a self-contained HTML page, computed from run folders without torch.

    run_record      one run folder as plain data, with its curves by round, and the status of a run that is training
    comparison      several runs together: baseline, cautions, computation cost, hypothetical epsilons
    tables, plots   what the terminal and the page show; the plots also as PNG and SVG files
    page            the HTML page, laid out by the Jinja2 templates in `templates/`
    tracking        the evaluations of a run for TensorBoard, MLflow and Weights & Biases

The numbers come from `run.toml`, `ledger.jsonl`, `metrics.jsonl` and `measures.json` of a run folder. Epsilon is always
computed from the ledger again.

    from unheard.report.comparison import Comparison
    from unheard.report.page import write_page

    write_page(Comparison.read(["runs/plain", "runs/private"]), "page")
"""
