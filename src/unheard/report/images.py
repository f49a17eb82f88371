"""The plots as files: PNG, drawn without a browser.

In: a Comparison and a folder. Out: one file for each plot, in the light theme's colours.
"""

import json
from pathlib import Path

from unheard.report.comparison import Comparison
from unheard.report.plots import plots
from unheard.report.style import VEGALITE, for_file
from unheard.runs import replace_file


def write_images(compared: Comparison, out: str | Path, *, scale: float = 2.0) -> list[Path]:
    """Write a PNG of each plot; their paths come back."""
    import vl_convert

    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for plot in plots(compared):
        spec = json.dumps(for_file(plot.spec, plot.title))
        image = vl_convert.vegalite_to_png(spec, vl_version=VEGALITE, scale=scale)
        path = folder / f"{plot.name}.png"
        replace_file(path, image)
        written.append(path)
    return written
