"""`python -m reproduction list`, `run` and `prepare` on the command line."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from reproduction.cli import display as paper_display
from reproduction.cli.main import app
from reproduction.recipe import distinct
from reproduction.recipes import RECIPES
from reproduction.results import read_runs
from typer.testing import CliRunner

import unheard as package
from reproduction import measures
from unheard.corpus.grouping import SplitRule
from unheard.corpus.store import TokenStore
from unheard.corpus.vocabulary import BOS
from unheard.errors import UnheardError

PLAIN = {"COLUMNS": "200"}
NOT_THERE = (
    "duckdb",
    "altair",
    "vl_convert",
    "wordfreq",
    "tokenizers",
    "pyarrow",
    "tensorboardX",
    "plotext",
    "onnx",
    "fsspec",
)


def unheard(*words: str):
    return CliRunner(env=PLAIN).invoke(app, [*words], catch_exceptions=False)


def refused(*words: str) -> str:
    """Run a command that must be refused, and return the message, which `main` prints before it exits with status 2."""
    with pytest.raises(UnheardError) as refusal:
        unheard(*words)
    return str(refusal.value)


def test_the_list_names_every_recipe_and_the_whole_price():
    shown = unheard("list").output
    assert all(name in shown for name in RECIPES)
    assert "56,476,000 user updates, about 3 h 41 min at 4,250 per second" in shown
    assert "108 runs, some shared" in shown


def test_the_list_says_how_far_results_are(store, tmp_path):
    asked = ["run", "users-per-round", "--corpus", str(store.path), "--scale", "smoke", "--rounds", "1"]
    done = unheard(*asked, "--work", str(tmp_path / "work"), "--results", str(tmp_path / "results"))
    assert "baseline-C300: 1 of 2 rounds" in done.output
    shown = unheard("list", "--scale", "smoke", "--results", str(tmp_path / "results" / "counting-smoke")).output
    lines = {name: line for line in shown.splitlines() for name in RECIPES if line.startswith(f"{name} ")}
    assert "…" not in shown  # nothing is truncated at any width
    assert "50%" in lines["users-per-round"]
    above = unheard("list", "--scale", "smoke", "--results", str(tmp_path / "results")).output
    assert "how far they are on counting (smoke)" in " ".join(above.split())
    assert above.splitlines()[-1] == shown.splitlines()[-1]
    assert "of them are left, about" in shown
    assert "not run" in lines["clipping"]
    assert "needs no run" in lines["table-rounds"]
    plain = json.loads(unheard("list", "--scale", "smoke", "--results", str(tmp_path / "results"), "--json").output)
    told = {recipe["name"]: (recipe["done"], recipe["user_updates"]) for recipe in plain["recipes"]}
    assert (plain["results"], plain["runs"]) == ("counting (smoke)", 108)
    assert 0 < plain["done"] < sum(done for done, _ in told.values())  # runs that several recipes share count once
    assert list(told) == [recipe.name for recipe in sorted(RECIPES.values(), key=lambda one: one.rank)]
    assert 2 * told["users-per-round"][0] == told["users-per-round"][1] > 0
    assert (told["clipping"][0], told["table-rounds"]) == (0, (0, 0))


def test_a_dry_run_says_what_there_is_to_do_and_does_nothing(store, tmp_path):
    asked = ["run", "estimators", "--corpus", str(store.path), "--scale", "smoke", "--dry-run"]
    folders = ["--work", str(tmp_path / "work"), "--results", str(tmp_path / "results")]
    shown = unheard(*asked, *folders, "--users-per-second", "2").output
    assert "4 runs, 16 user updates: about 8 s at 2 per second" in shown
    assert all(
        any(line.startswith(f"{run.name} ") for line in shown.splitlines()) for run in RECIPES["estimators"].runs
    )
    assert "COUNTED" in shown
    assert list(tmp_path.iterdir()) == []
    assert "COUNTED" not in unheard(*asked, *folders, "--population", "70").output


def test_a_dry_run_says_what_cannot_be_made_here_and_how_long_a_cpu_takes(store, tmp_path):
    asked = ["run", "users-per-round", "cost", "--corpus", str(store.path), "--dry-run", "--device", "cpu"]
    shown = unheard(*asked, "--work", str(tmp_path / "work"), "--results", str(tmp_path / "results")).output
    assert "baseline-C1000 is not run: 1,000 users per round are more than counting has" in shown
    assert "cost-C5000 is not run: there is no corpus 'synthetic'" in shown
    assert "`unheard corpus synth` makes one" in shown
    assert "1 run, " not in shown
    assert "as on two CPU cores" in shown


def test_with_nothing_left_to_run_it_says_so_and_ends(store, tmp_path):
    asked = ["run", "estimators", "--corpus", str(store.path), "--scale", "smoke", "--rounds", "1"]
    folders = ["--work", str(tmp_path / "work"), "--results", str(tmp_path / "results")]
    assert "The same command continues" in unheard(*asked, *folders).output
    again = unheard(*asked, *folders).output
    assert "nothing is left to run" in again
    assert "goes on" not in again


def test_where_there_is_no_terminal_a_line_says_how_far_it_is(store, tmp_path, monkeypatch):
    asked = ["run", "estimators", "--corpus", str(store.path), "--scale", "smoke"]
    monkeypatch.setattr(paper_display, "EVERY", 0)
    shown = unheard(*asked, "--work", str(tmp_path / "work"), "--results", str(tmp_path / "results")).output
    lines = [line for line in shown.splitlines() if " % of all runs" in line]
    assert len(lines) == 8
    assert lines[-1].startswith("100 % of all runs")
    assert "baseline and 3 more, round 2" in lines[-1]


def test_a_schedule_and_a_seed_on_the_command_line(store, tmp_path):
    schedule = tmp_path / "schedule.toml"
    schedule.write_text('[[step]]\nrecipes = ["estimators", "noise"]\nrounds = 1\nruns = ["baseline", "flat-S20"]\n')
    asked = ["run", "all", "--corpus", f"main={store.path}", "--scale", "smoke", "--schedule", str(schedule)]
    more = ["--seed", "5", "--name", "digits", "--population", "50", "--stop-after", "600"]
    unheard(*asked, *more, "--work", str(tmp_path / "work"), "--results", str(tmp_path / "results"))
    results = read_runs(tmp_path / "results" / "digits-smoke-seeds+5")
    assert {name: (one.seed, one.rounds, one.population) for name, one in results.items()} == {
        "baseline": (6, 1, 50),
        "flat-S20": (6, 1, 50),
    }
    assert results["baseline"].corpus == "digits"


def test_one_thing_changed_in_every_run_has_a_folder_of_its_own(store, tmp_path):
    asked = ["run", "estimators", "--corpus", str(store.path), "--scale", "smoke", "--rounds", "1"]
    folders = ["--work", str(tmp_path / "work"), "--results", str(tmp_path / "results")]
    unheard(*asked, *folders)
    unheard(*asked, *folders, "--set", "model.keep_norm=true", "--set", "update.learning_rate=3")
    usual = read_runs(tmp_path / "results" / "counting-smoke")
    other = read_runs(tmp_path / "results" / "counting-smoke-model.keep_norm=true-update.learning_rate=3")
    assert set(usual) == set(other) == {run.name for run in RECIPES["estimators"].runs}
    for results, said in ((usual, (False, 6)), (other, (True, 3))):
        for one in results.values():
            assert (one.settings["model"]["keep_norm"], one.settings["update"]["learning_rate"]) == said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("model.keep_nrom=false", "Did you mean 'keep_norm'"),
        ("model.keep_norm", "write table.key=value"),
        ("training.rounds=3", "--rounds N"),
        ("clip.kind=per_layer", "sets clip.kind itself"),
        ("sampling.users_per_round=3", "sets sampling.users_per_round itself"),
        ("engine.kind=reference", "--engine"),
        ("clip.norm=3", "recipes say what S is"),
    ],
)
def test_a_change_that_would_change_nothing_or_what_runs_are_called_by_is_refused(store, tmp_path, change, said):
    asked = ["run", "estimators", "--corpus", str(store.path), "--scale", "smoke", "--work", str(tmp_path)]
    assert said in refused(*asked, "--set", change)


def test_a_key_is_changed_once(store, tmp_path):
    asked = ["run", "estimators", "--corpus", str(store.path), "--scale", "smoke", "--work", str(tmp_path)]
    assert "twice" in refused(*asked, "--set", "update.learning_rate=3", "--set", "update.learning_rate=5")


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ('recipes = ["estimators", "noise"]\nruns = ["baseline", "flatS20"]', "Did you mean 'flat-S20'"),
        ('recipes = ["noise"]', "no step for clipping"),
    ],
)
def test_a_schedule_for_nothing_is_refused(store, tmp_path, step, said):
    schedule = tmp_path / "schedule.toml"
    schedule.write_text(f"[[step]]\n{step}\n")
    assert said in refused("run", "clipping", "--corpus", str(store.path), "--schedule", str(schedule))


BLOCKED = f"""
import sys
sys.modules.update(dict.fromkeys({NOT_THERE!r}))  # importing them fails, and importlib finds no such package
from reproduction.cli.main import app
from unheard.cli.main import main, run_app
main() if sys.argv[1] == "corpus" else run_app(app)
"""


@pytest.mark.system
def test_running_and_synthesising_need_no_database_no_plots_and_no_word_lists(store, tmp_path):
    """A machine that only trains does not need the packages for `prepare` and `show`."""
    blocked = [sys.executable, "-c", BLOCKED]
    synth = [
        "corpus",
        "synth",
        "--like",
        store.path,
        "--users",
        "20",
        "--tokens-per-user",
        "30",
        "--out",
        tmp_path / "synth",
    ]
    subprocess.run([*blocked, *synth], check=True, capture_output=True)
    run = ["run", "cost", "users-per-round", "--scale", "smoke", "--rounds", "1", "--work", tmp_path / "work"]
    corpora = ["--corpus", store.path, "--corpus", f"synthetic={tmp_path / 'synth'}", "--results", tmp_path / "results"]
    subprocess.run([*blocked, *run, *corpora], check=True, capture_output=True, cwd=Path(__file__).parents[2])
    assert {"cost-C1250", "baseline-C10"} < set(read_runs(tmp_path / "results" / "counting-smoke"))


MEASURED = f"""
import sys
sys.modules.update(dict.fromkeys({NOT_THERE!r}))
from pathlib import Path
from reproduction.measures import measure
measure(Path(sys.argv[1]), "cpu")
"""


@pytest.mark.system
def test_measuring_a_run_needs_no_database(run, store, tmp_path):
    for _ in package.train(replace(run, training=package.Training(rounds=1)), tmp_path / "run"):
        pass
    subprocess.run([sys.executable, "-c", MEASURED, tmp_path / "run"], check=True, cwd=Path(__file__).parents[2])
    facts = json.loads((tmp_path / "run" / "facts.json").read_text())
    predicted = sum(int((store.held_out.tokens(k) != BOS).sum()) for k in range(10))
    assert (facts["held_out_users"], facts["test_tokens"], facts["code"]) == (10, predicted, measures.code_digest())
    assert SplitRule().salt == measures.SALT


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "clippings", "--corpus", "STORE"), "Did you mean 'clipping'"),
        (("run", "table-rounds", "--corpus", "STORE"), "nothing here needs a run"),
        (("run", "dictionaries-noise", "--corpus", "STORE"), "no corpus '20k'"),
        (("run", "clipping", "--corpus", "20k=STORE"), "no main corpus"),
        (("run", "clipping", "--corpus", "nowhere"), "reproduction prepare"),
        (("run", "clipping", "--corpus", "STORE", "--name", "../elsewhere"), "leave out slashes"),
        (("run", "clipping", "--corpus", "STORE", "--scale", "smoke", "--work", "STORE/corpus.json"), "with --work"),
        (("prepare", "x.jsonl", "--out", "o"), "--user-field"),
    ],
)
def test_impossible_requests_are_refused_with_advice(store, words, said):
    assert said in refused(*(word.replace("STORE", str(store.path)) for word in words))


@pytest.mark.parametrize(
    ("words", "listed"),
    [
        (("run", "clipping", "--corpus", "STORE", "--engine", "diesel"), "'vectorised'"),
        (("run", "clipping", "--corpus", "STORE", "--scale", "huge"), "'smoke'"),
        (("prepare", "chitchat", "--out", "o", "--only", "40k"), "'30k'"),
    ],
)
def test_an_unknown_word_is_refused_with_the_known_ones(words, listed):
    done = unheard(*words)
    assert done.exit_code == 2
    assert words[-1] in done.output
    assert listed in done.output


def test_prepare_makes_the_stores_by_role(tmp_path):
    text = ["see you at the rendezvous tomorrow", "mitochondria are the powerhouse of the cell!", "ok. fine. great"]
    for name in ("posts", "speeches"):
        rows = [{"who": f"{name}{k % 25}", "said": text[k % 3]} for k in range(100)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = ["--user-field", "who", "--text-field", "said", "--tokens-per-user", "16", "--held-out", "0.3"]
    asked = ["prepare", str(tmp_path / "posts.jsonl"), "--other", str(tmp_path / "speeches.jsonl"), *fields]
    made = unheard(*asked, "--out", str(tmp_path / "stores"))
    assert made.exit_code == 0
    assert f"Next: python -m reproduction run all --corpus {tmp_path / 'stores'} --name posts --dry-run" in made.output
    stores = {path.name: TokenStore.open(path) for path in sorted((tmp_path / "stores").iterdir())}
    sizes = {role: len(one.vocabulary) for role, one in stores.items()}
    assert sizes == {"20k": 20_000, "30k": 30_000, "characters": 104, "main": 10_000, "other": 10_000}
    assert {one.info["name"] for one in stores.values()} == {"posts", "speeches"}
    assert stores["main"].vocabulary == stores["other"].vocabulary
    assert set(stores["main"].train.lengths() - 16) <= {1, 2, 3, 4, 5, 6}  # BOS is not counted
    again = unheard(*asked, "--out", str(tmp_path / "stores"))
    assert "rows read" not in again.output
    assert again.output.count("exists already") == 5
    # otherwise a store with other settings or another corpus would be accepted
    out = ["--out", str(tmp_path / "stores")]
    assert "splits.held_out = 0.3, not 0.4" in refused(*asked, "--held-out", "0.4", *out)
    assert "its name is posts, not speeches" in refused("prepare", str(tmp_path / "speeches.jsonl"), *fields, *out)
    run = ["run", "public-start", "dictionaries-clipping", "other-models", "--scale", "smoke", "--rounds", "1"]
    folders = ["--work", str(tmp_path / "work"), "--results", str(tmp_path / "results")]
    dry = unheard(*run, *folders, "--corpus", str(Path(tmp_path / "stores")), "--dry-run")
    assert "not run" not in dry.output
    assert f"{len(distinct(RECIPES[name] for name in run[1:4]))} runs" in dry.output
