"""Draw the private run: held-out accuracy by round on the left axis, the epsilon spent so far on the right axis.

The input is reproduction/results/reviews_81; the output is an SVG or PNG file. The picture shows recorded evaluations
only; the line of an interrupted run ends where the run stopped.

    python -m reproduction.private_picture --out docs/images/private-run.svg
"""

import argparse
import json
from pathlib import Path
from typing import Any

from reproduction.private_report import INTERRUPTED, REVIEWS, counted_baselines
from reproduction.private_run import read_metrics
from reproduction.render_rules import TEMPLATES
from unheard.storage import replace_file


def specification(root: Path = REVIEWS) -> dict[str, Any]:
    """Return the Vega-Lite specification of the picture, with its data.

    Args:
        root: Folder with the results of the private run and its baselines.
    """
    private, baseline, label = (
        read_metrics(root / "private"),
        root / "baseline-C5000-seed1",
        "no privacy (no clip, no noise)",
    )
    if not baseline.is_dir():
        baseline, label = root / INTERRUPTED.name / "baseline-C5000-seed1", f"{label}, interrupted"
    shown = {"private (z = 1, S = 8)": private, label: read_metrics(baseline)}
    measured = [(row["round"], 100 * row["accuracy_top1"], run) for run, rows in shown.items() for row in rows]
    accuracy = [{"round": at, "value": value, "run": run} for at, value, run in measured]
    values = {
        "runs": list(shown),
        "accuracy": accuracy,
        "epsilon": [{"round": row["round"], "value": row["epsilon"]} for row in private],
        "bigram": counted_baselines()["bigram"],
        "end": 500 * -(-private[-1]["round"] // 500),
    }
    text = TEMPLATES.get_template("private_run.vl.json").render({name: json.dumps(v) for name, v in values.items()})
    return json.loads(text)


def main() -> None:
    """Run the command line of this module: write the picture to the file `--out`."""
    import vl_convert

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images/private-run.svg"))
    out = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    spec, is_png = json.dumps(specification()), out.suffix == ".png"
    picture = vl_convert.vegalite_to_png(spec, scale=2.0) if is_png else vl_convert.vegalite_to_svg(spec).encode()
    replace_file(out, picture)
    print(out)


if __name__ == "__main__":
    main()
