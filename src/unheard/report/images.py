"""Write plots as PNG and SVG files, without a browser, in the colours of the light theme.

The plots are those of `plots.py`; title and legend are part of the picture:

    write_images(Comparison.read(["runs/plain", "runs/private"]), "plots")
"""

import json
from pathlib import Path
from typing import Any

from unheard.report.comparison import Comparison
from unheard.report.plots import Plot, plots
from unheard.report.style import LIGHT, VEGALITE
from unheard.run_folder import replace_file

WIDTH = 720
"""Width of a plot in a file, in pixels before scaling."""


def write_images(compared: Comparison, out: str | Path, *, scale: float = 2.0) -> list[Path]:
    """Write each plot of a comparison as a PNG file.

    Args:
        compared: The runs.
        out: The folder, created if it does not exist.
        scale: Pixels per unit of the plot.

    Returns:
        The paths of the files, each named after its plot.
    """
    return [write_png(plot, Path(out), scale=scale) for plot in plots(compared)]


def write_png(plot: Plot, folder: Path, *, scale: float = 2.0) -> Path:
    """Write one plot as `folder/NAME.png` and return the path."""
    import vl_convert

    content = vl_convert.vegalite_to_png(json.dumps(_spec_for_file(plot)), vl_version=VEGALITE, scale=scale)
    return _write(folder / f"{plot.name}.png", content)


def write_svg(plot: Plot, folder: Path) -> Path:
    """Write one plot as `folder/NAME.svg` and return the path."""
    import vl_convert

    content = vl_convert.vegalite_to_svg(json.dumps(_spec_for_file(plot)), vl_version=VEGALITE)
    return _write(folder / f"{plot.name}.svg", content.encode())


def _spec_for_file(plot: Plot) -> dict[str, Any]:
    """The specification with what the page provides around a plot: title, legend, background, width, colour values."""
    # Four or more legend entries in a row would run out of the picture.
    legend = {"orient": "top", "title": None, "labelColor": LIGHT["ink"], "labelLimit": 320, "symbolOpacity": 1}
    legend |= {"columns": 3, "columnPadding": 24, "rowPadding": 6}
    if plot.has_lines:  # dashes are visible on a stroke and not on a dot
        legend |= {"symbolType": "stroke", "symbolSize": 500, "symbolStrokeWidth": 3}
    spec = {
        **plot.spec,
        "width": WIDTH,
        "background": LIGHT["card"],
        "padding": 24,
        "title": {"text": plot.title, "anchor": "start", "color": LIGHT["ink"], "fontSize": 16, "offset": 16},
        "config": {**plot.spec["config"], "legend": legend},
    }
    text = json.dumps(spec)
    for name, value in LIGHT.items():
        text = text.replace(f"var(--{name})", value)
    return json.loads(text)


def _write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content)
    return path
