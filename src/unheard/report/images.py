"""The plots as files: PNG and SVG, drawn without a browser.

In: plots and a folder. Out: files in the light theme's colours.
"""

import json
from pathlib import Path

from unheard.report.comparison import Comparison
from unheard.report.plots import Plot, plots
from unheard.report.style import VEGALITE, for_file
from unheard.run_folder import replace_file


def write_images(compared: Comparison, out: str | Path, *, scale: float = 2.0) -> list[Path]:
    """Write a PNG of each plot of a comparison; their paths come back."""
    return [write_png(plot, Path(out), scale=scale) for plot in plots(compared)]


def write_png(plot: Plot, folder: Path, *, scale: float = 2.0) -> Path:
    import vl_convert

    spec = _spec(plot)
    return _write(folder / f"{plot.name}.png", vl_convert.vegalite_to_png(spec, vl_version=VEGALITE, scale=scale))


def write_svg(plot: Plot, folder: Path) -> Path:
    import vl_convert

    spec = _spec(plot)
    return _write(folder / f"{plot.name}.svg", vl_convert.vegalite_to_svg(spec, vl_version=VEGALITE).encode())


def _spec(plot: Plot) -> str:
    return json.dumps(for_file(plot.spec, plot.title, is_line=plot.is_line or plot.zoom is not None))


def _write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content)
    return path
