"""Plots: files without a browser, axes that begin at zero or above, colours with enough contrast."""

import re
import shutil
from dataclasses import replace

import pytest
import vl_convert

from tests.report.builders import made_up_record
from unheard.report.comparison import Comparison
from unheard.report.plots import (
    accuracy_by_round,
    epsilon_by_round,
    plots,
    share_scale,
    spec_for_file,
    write_images,
    write_png,
)
from unheard.report.run_record import accuracy_points
from unheard.report.style import DARK, LIGHT, VEGALITE


def test_plots_are_written_as_png_without_a_browser(compared, tmp_path):
    written = write_images(compared, tmp_path / "plots")
    assert len(written) == 7
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_the_name_of_a_run_cannot_end_the_process_that_draws_it(runs, tmp_path):
    """The library aborts at a control character and at U+FFFE."""
    evil = tmp_path / "\x1b[31mred\x9b\ufffe"
    shutil.copytree(runs[1], evil)
    compared = Comparison.read([runs[0], evil], baseline=str(evil))
    assert [record.name for record in compared.records] == [runs[0].name, r"\x1b[31mred\x9b\ufffe"]
    assert compared.baseline is compared.records[1]
    for plot in plots(compared):
        assert write_png(plot, tmp_path).exists()


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_have_contrast_on_both_backgrounds(theme):
    """WCAG AA: 4.5 for text, 3 for lines and bars."""
    for name, least in {"ink": 7, "soft": 4.5, "floor": 3, **{f"series-{i}": 4.5 for i in range(1, 7)}}.items():
        for paper in ("paper", "card"):
            pair = sorted((luminance(theme[name]), luminance(theme[paper])))
            assert (pair[1] + 0.05) / (pair[0] + 0.05) >= least, (name, paper)


@pytest.mark.parametrize("accuracies", [[0.0, 0.05, 0.3], [0.01] * 3, [0.2, 0.21, 0.22]], ids=["low", "equal", "high"])
def test_no_axis_of_accuracy_begins_below_zero(accuracies):
    """Without this rule, padding below a small accuracy made the axis begin at -2 %."""
    record = made_up_record("a", accuracies)
    plot = accuracy_by_round(Comparison(records=[record], baseline=record))
    assert plot is not None
    drawing = vl_convert.vegalite_to_svg(spec_for_file(plot), vl_version=VEGALITE)
    labels = re.findall(r">([−-]?[\d.]+)%</text>", drawing)
    assert labels
    assert not any(label.startswith(("−", "-")) for label in labels)


def test_a_scale_leaves_out_values_that_are_missing():
    assert share_scale([None, float("nan"), 0.5, 0.6]) == share_scale([0.5, 0.6])
    assert share_scale([]) == share_scale([0.0])


def test_the_plot_of_epsilon_has_each_claim_and_each_budget(compared):
    private = compared.records[1]
    budgets = [
        replace(private, name=f"b{e}", tables={**private.tables, "privacy": {"budget_epsilon": e}}) for e in (7, 9)
    ]
    plot = epsilon_by_round(Comparison(records=[compared.records[0], *budgets, private], baseline=private))
    assert plot is not None
    *lines, ring = plot.spec["layer"]
    assert [(row["run"], row["epsilon"], row["round"]) for row in ring["data"]["values"]] == [
        (record.name, record.epsilon, record.rounds) for record in (*budgets, private)
    ]
    assert [row["value"] for row in lines[0]["data"]["values"]] == [7, 9]
    assert {row["run"] for row in plot.spec["data"]["values"]} == {"b7", "b9", "private"}


def test_the_bold_curve_of_accuracy_is_smoothed_and_the_thin_one_is_each_evaluation(compared):
    plot = accuracy_by_round(compared)
    assert plot is not None
    curves = [layer for layer in plot.spec["layer"] if layer["mark"]["type"] == "line"]
    assert {layer["encoding"]["y"]["field"]: layer["mark"]["opacity"] for layer in curves} == {
        "value": 0.4,
        "smoothed": 1,
    }
    assert plot.spec["data"]["values"] == [point for record in compared.records for point in accuracy_points(record)]
