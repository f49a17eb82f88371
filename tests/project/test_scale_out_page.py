"""docs/scale-out.md: its costs are those of `unheard plan --cost`, its scripts are complete, and named files exist."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from unheard.cli.main import app
from unheard.cli.plan import hours

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scale-out.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if "`--users " in line]
KINDS = {one["kind"]: one for one in yaml.safe_load_all((ROOT / "examples" / "kubernetes.yaml").read_text())}


def test_the_page_has_three_plans():
    assert [row[0].split(":")[0] for row in ROWS] == ["the paper's run", "10⁸ users", "50,000 per round"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].split(":")[0])
def test_every_cost_is_what_the_command_says(row):
    command = re.findall(r"`([^`]+)`", row[0])[0]
    done = CliRunner().invoke(app, ["plan", *shlex.split(command), "--cost", "--gpus", "8", "--json"])
    told = json.loads(done.stdout)
    stacked, module = (
        next(m for m in told["cost"]["machines"] if m["engine"].startswith(engine)) for engine in ("stacked, b", "vect")
    )
    assert stacked["device"] == module["device"] == "NVIDIA H200"
    assert stacked["source"].removeprefix("benchmarks/") in PAGE
    assert row[1:] == [
        f"{told['cost']['user_updates']:,.0f}",
        f"{told['claimed']['epsilon']:.3g}",
        hours(stacked["machine_hours"]),
        hours(stacked["hours"]),
        hours(module["machine_hours"]),
    ]


def test_the_slurm_script_is_a_script():
    assert subprocess.run(["bash", "-n", ROOT / "examples" / "slurm.sh"]).returncode == 0


def test_the_manifest_says_each_number_and_name_the_same_wherever_it_stands():
    job, service, policy = KINDS["Job"]["spec"], KINDS["Service"], KINDS["NetworkPolicy"]["spec"]
    pod = job["template"]["spec"]
    (box,) = pod["containers"]
    command = " ".join(box["args"][0].split())
    assert job["completions"] == job["parallelism"] == int(re.findall(r"--nnodes (\d+)", command)[0])
    assert box["resources"]["limits"]["nvidia.com/gpu"] == int(re.findall(r"--nproc-per-node (\d+)", command)[0])
    name = KINDS["Job"]["metadata"]["name"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert f"--rdzv-endpoint {name}-0.{service['metadata']['name']}:" in command
    labels = job["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == policy["podSelector"]["matchLabels"] == labels
    assert policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"] == labels
    assert {m["name"] for m in box["volumeMounts"]} == {v["name"] for v in pod["volumes"]}


@pytest.mark.parametrize("path", ["slurm.sh", "kubernetes.yaml"])
def test_placeholders_of_an_example_are_explained(path):
    text = (ROOT / "examples" / path).read_text()
    assert "Fill in" in text
    assert text.count("FILL_IN") >= 1


def test_every_command_of_the_page_has_the_options_that_it_shows():
    shown = re.findall(r"`?(unheard (?:train|resume|corpus part|benchmark)) ([^`\n(]*)", PAGE)
    assert len(shown) >= 4
    for verb, rest in shown:
        helped = CliRunner().invoke(app, [*verb.split()[1:], "--help"], env={"COLUMNS": "250"}).stdout
        assert [flag for flag in re.findall(r"--[\w-]+", rest) if flag not in helped] == []
