"""`unheard plan`: output as JSON or as a table, and errors that say what to change if a plan is impossible."""

import functools
import json
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from unheard.cli import plan
from unheard.cli.main import as_typer_command
from unheard.errors import UnheardError
from unheard.privacy import noise_choice
from unheard.privacy.planner import CostEstimate

app = typer.Typer(rich_markup_mode="rich")
app.command(epilog=plan.EXAMPLES)(as_typer_command(plan.plan))

PAPER = [
    "--users",
    "763430",
    "--users-per-round",
    "5000",
    "--noise-multiplier",
    "1",
    "--rounds",
    "5000",
    "--delta",
    "1e-9",
]


def run(*words):
    return CliRunner().invoke(app, [*words])


def refusal(*words):
    result = run(*words)
    assert isinstance(result.exception, UnheardError)
    return str(result.exception)


def test_the_paper_s_plan_as_one_json_object():
    told = json.loads(run(*PAPER, "--json").stdout)
    assert {name: round(value, 3) for name, value in told["epsilon"].items()} == {
        "moments": 4.634,
        "rdp": 4.183,
        "pld": 3.899,
    }
    assert told["hypothetical"] is True
    assert told["claimed"] == {"epsilon": told["epsilon"]["pld"], "accountant": "pld"}
    assert (told["users"], told["users_per_round"], told["rounds"], told["delta"]) == (763430, 5000, 5000, 1e-9)


def test_the_table_goes_by_powers_of_ten_and_says_hypothetical():
    page = run(*PAPER).stdout
    for words in ("Hypothetical", "1,000", "5,000", "4.634", "4.183", "3.899"):
        assert words in page


@pytest.mark.parametrize("form", [[], ["--json"]])
@pytest.mark.parametrize(("users", "is_large"), [(65, True), (66, False)])
def test_a_large_delta_is_warned_of_beside_the_plan(users, is_large, form):
    """Below 66 users, users^-1.1 is above 0.01. The warning is on stderr, because stdout has only the result."""
    done = run("--users", str(users), "--users-per-round", "10", "--noise-multiplier", "2", "--rounds", "10", *form)
    assert done.exit_code == 0
    assert ("delta = 0.0101 is large" in done.stderr) is is_large
    assert "is large" not in done.stdout


@pytest.mark.parametrize("form", [[], ["--json"]])
@pytest.mark.parametrize(
    ("words", "solver"),
    [
        ("--epsilon 8", "planner.feasible_plans"),
        ("--epsilon 8 --users-per-round 10 --rounds 8 --compare-noise", "noise_choice.compare_noise"),
        ("--epsilon 8 --users-per-round 10 --rounds 8", "planner.plan"),
    ],
)
def test_a_large_delta_is_warned_of_in_every_mode_of_the_command(monkeypatch, words, solver, form):
    """The solver is replaced by one that ends the command; a plan that was solved for is warned of afterwards."""
    estimate = CostEstimate(population=65, users_per_round=10, noise_multiplier=2.0, rounds=8, delta=65**-1.1)
    solution = SimpleNamespace(estimate=estimate, record=lambda _: {}, solved_for="rounds", cheaper=None, target=8)
    solution.bound = SimpleNamespace(epsilon=7.9, accountant="rdp")

    def end(**_):
        if solver == "planner.plan":
            return solution
        raise typer.Exit

    monkeypatch.setattr(f"unheard.privacy.{solver}", end)
    done = run("--users", "65", *words.split(), *form)
    assert done.exit_code == 0
    assert "delta = 0.0101 is large" in done.stderr


def test_delta_defaults_to_the_paper_s_choice():
    told = json.loads(
        run(
            "--users", "1000000", "--users-per-round", "10000", "--noise-multiplier", "1", "--rounds", "1000", "--json"
        ).stdout
    )
    assert told["delta"] == pytest.approx(10**-6.6)
    assert round(told["epsilon"]["moments"], 2) == 3.06


@pytest.mark.parametrize("left_out", ["--noise-multiplier", "--users-per-round", "--rounds"])
def test_the_value_that_is_left_out_is_solved_for(left_out):
    at = PAPER.index(left_out)
    words = [*PAPER[:at], *PAPER[at + 2 :], "--epsilon", "4.2", "--accountant", "rdp"]
    told = json.loads(run(*words, "--json").stdout)
    assert told["solved_for"] == left_out[2:].replace("-", "_")
    assert told["epsilon"]["rdp"] <= 4.2
    assert told["not_enough"] is not None
    assert f"meets epsilon 4.2: {told['epsilon']['rdp']:.4g} by rdp." in run(*words).stdout


def test_without_noise_epsilon_is_infinity_in_strict_json():
    told = json.loads(run(*PAPER[:5], "0", *PAPER[6:], "--json").stdout, parse_constant=pytest.fail)
    assert told["epsilon"] == {"moments": "infinity", "rdp": "infinity", "pld": "infinity"}


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        (
            ["--users", "10", "--users-per-round", "20", "--noise-multiplier", "1", "--rounds", "1"],
            "declare more users",
        ),
        ([*PAPER[:-1], "1e-5"], "leave it out"),
        (["--users", "10", "--users-per-round", "2", "--rounds", "1"], "--noise-multiplier"),
        ([*PAPER, "--epsilon", "2"], "exactly one"),
        (["--users", "10", "--rounds", "1", "--epsilon", "2"], "exactly one"),
        (["--users", "0", "--rounds", "1"], "1 or more"),
        (
            ["--users", "100", "--users-per-round", "9", "--noise-multiplier", "0.1", "--epsilon", "0.1"],
            "larger epsilon",
        ),
    ],
)
def test_impossible_plans_are_refused_with_advice(words, cure):
    assert cure in refusal(*words)


def test_help_shows_the_examples_on_lines_of_their_own():
    page = run("--help").stdout
    assert any(line.strip().startswith("unheard plan --users 763430") for line in page.splitlines())


@pytest.mark.system
def test_users_and_epsilon_alone_show_what_can_be_had(monkeypatch):
    monkeypatch.setattr("unheard.privacy.planner.FEASIBLE_COHORTS", (100, 5000))
    monkeypatch.setattr("unheard.privacy.planner.FEASIBLE_ROUNDS", (500,))
    asked = ["--users", "14000", "--epsilon", "8"]
    page = run(*asked).stdout
    for words in ("Hypothetical", "14,000 users", "sigma", "PLD", "dominates", "public start"):
        assert words in page
    record = json.loads(run(*asked, "--json", "--parameters", "10000").stdout)
    assert record["hypothetical"] is True
    assert {plan["noise"]["verdict"] for plan in record["plans"]} <= {"small cost", "trains"}
    assert all(plan["claimed"]["epsilon"] <= 8 and plan["claimed"]["accountant"] == "pld" for plan in record["plans"])


def test_sigma_is_shown_and_noise_that_dominates_the_updates_is_warned_of():
    quiet = run(*PAPER)
    assert "sigma = 0.003" in quiet.stdout
    assert "will dominate" not in quiet.stderr
    loud = run("--users", "14000", "--users-per-round", "50", "--noise-multiplier", "1", "--rounds", "10", "--json")
    assert "The noise will dominate the updates: with sigma = 0.3" in loud.stderr
    assert json.loads(loud.stdout)["noise"]["noise_std"] == pytest.approx(0.3)


COMPARE = ["--users", "5000", "--users-per-round", "500", "--rounds", "20", "--epsilon", "4", "--compare-noise"]


def test_kinds_of_noise_are_compared_as_a_table_and_as_json(monkeypatch):
    once = functools.cache(noise_choice.compare_noise)  # the table needs the same computations as the JSON
    monkeypatch.setattr(noise_choice, "compare_noise", lambda progress, **options: once(**options))
    told = json.loads(run(*COMPARE, "--accountant", "rdp", "--json").stdout)
    assert told["hypothetical"] is True
    rows = told["noise"]
    assert [(row["noise"], row["sampling"]) for row in rows] == [
        ("independent", "poisson"),
        ("banded", "cyclic_poisson"),
        ("banded", "min_separation"),
        ("blt", "min_separation"),
    ]
    assert sum(row["is_best"] for row in rows) == 1
    page = run(*COMPARE, "--accountant", "rdp").stdout
    for words in ("Hypothetical", "independent", "cyclic_poisson", "blt", "<- best", "as secret as the text"):
        assert words in page
    assert "--compare-noise goes with" in refusal("--users", "5000", "--compare-noise")


def test_the_noise_of_sampled_examples_is_shown_rounded_up(monkeypatch):
    """If it was rounded to nearest, it might not meet the epsilon in the same row."""
    from unheard.privacy import planner

    found = planner.SamplingComparison(
        epsilon=4.0,
        examples_per_user=8,
        examples_per_round=4000.0,
        users_noise=0.6,
        examples_noise=1.14821,
        users_std=1.2e-3,
        examples_std=3e-4,
    )
    monkeypatch.setattr(planner, "compare_sampling", lambda *args: found)
    told = " ".join(run(*PAPER, "--examples-per-user", "8").output.split())
    assert "epsilon 4 needs z = 1.149 in units of one example's clip" in told
    assert "is 0.25 times that of sampling users" in told
