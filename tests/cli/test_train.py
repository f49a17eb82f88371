"""init, train, resume, evaluate, predict and statement on the command line. Every refusal is one message with status 2."""

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from tests.stores import uncharged_copy
from unheard.cli import display
from unheard.cli import train as train_command
from unheard.cli.display import show_rounds, show_runs
from unheard.cli.main import main
from unheard.cli.options import NodeOptions
from unheard.cli.train import nodes_of
from unheard.engines.choice import EngineChoice
from unheard.errors import InvalidValue
from unheard.formatting import epsilon_text
from unheard.privacy.accountants import best_epsilon
from unheard.privacy.budget import claim_of_run, declaration
from unheard.privacy.events import CorrelatedGaussian, Gaussian, PoissonGaussian, to_record
from unheard.privacy.ledger import Entry, Ledger
from unheard.training.loop import RoundReport
from unheard.training.run import read_run_file, run_toml


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def unheard(capsys, monkeypatch):
    """Run a command in this process, because importing torch takes seconds. Returns output and exit status as `main` does."""

    def run_words(*words: object, cwd: Path | None = None, ok: bool = True) -> Done:
        if cwd:
            monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["unheard", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        done = Done(int(left.value.code or 0), out, err)
        assert not ok or done.returncode == 0, done.stderr
        return done

    return run_words


def test_the_installed_command_runs_and_says_its_version():
    done = subprocess.run([Path(sys.executable).parent / "unheard", "--version"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("unheard 0.")


def test_output_that_cannot_spell_epsilon_is_no_crash():
    """With PYTHONIOENCODING=ascii or a Latin-1 locale: help texts and summaries contain Greek letters."""
    words = [Path(sys.executable).parent / "unheard", "tune", "--help"]
    done = subprocess.run(words, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert b"\\u03b5" in done.stdout


@pytest.fixture
def run_file(run, tmp_path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(run_toml(run))
    return path


def test_init_train_statement_and_predict_work_together(unheard, store, tmp_path):
    unheard(
        "init",
        "mine.toml",
        "--corpus",
        store.path,
        "--population",
        60,
        "--users-per-round",
        10,
        "--rounds",
        4,
        cwd=tmp_path,
    )
    small = ["--set", "model.embedding_size=4", "--set", "model.hidden_size=5", "--set", "evaluation.every=2"]
    done = unheard("train", "mine.toml", "--out", "runs/a", *small, cwd=tmp_path)
    assert "AccuracyTop1" in done.stdout
    assert "unheard statement runs/a" in done.stdout.replace("\n", " ")
    numbers = json.loads(unheard("evaluate", "runs/a", "--json", cwd=tmp_path).stdout)
    assert 0 <= numbers["accuracy_top1"] <= numbers["accuracy_top3"] <= numbers["accuracy_top5"] <= 1
    words = json.loads(unheard("predict", "runs/a", "w1 w2", "--top", 2, "--json", cwd=tmp_path).stdout)
    assert len(words) == 2
    told = json.loads(unheard("statement", "runs/a", "--json", cwd=tmp_path).stdout)
    assert told["epsilon"]["pld"] > 0
    longer = unheard("resume", "runs/a", "--rounds", 5, cwd=tmp_path)
    assert "after round 5" in longer.stdout
    assert "nothing left to do" in unheard("resume", "runs/a", "--rounds", 5, cwd=tmp_path).stdout
    for human in (["evaluate", "runs/a"], ["predict", "runs/a", "w1"], ["statement", "runs/a"]):
        assert len(unheard(*human, cwd=tmp_path).stdout) > 50


def test_a_large_delta_is_warned_of_before_training(unheard, run_file, tmp_path):
    """With 60 declared users delta is above 0.01. A run without noise has no such warning, because it has no epsilon."""
    once = ["train", run_file, "--set", "training.rounds=1"]
    assert "delta = 0.0111 is large" in unheard(*once, "--out", tmp_path / "a").stderr
    for k, other in enumerate(("privacy.delta=1e-3", "noise.kind=none")):
        said = unheard(*once, "--out", tmp_path / f"b{k}", "--set", other, "--yes").stderr
        assert "is large" not in said
        assert ("Without noise epsilon is infinite" in said) == (other == "noise.kind=none")


def test_a_run_without_noise_is_refused_without_a_terminal_unless_yes_is_given(unheard, run_file, tmp_path):
    once = ["train", run_file, "--out", tmp_path / "r", "--set", "training.rounds=1", "--set", "noise.kind=none"]
    done = unheard(*once, ok=False)
    assert done.returncode == 2
    assert "--yes" in done.stderr
    assert not (tmp_path / "r").exists()
    unheard(*once, "--yes")
    refused = unheard("resume", tmp_path / "r", "--rounds", 2, ok=False)
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    assert len(Ledger.read(tmp_path / "r" / "ledger.jsonl")) == 1
    unheard("resume", tmp_path / "r", "--rounds", 2, "--yes")
    assert len(Ledger.read(tmp_path / "r" / "ledger.jsonl")) == 2


@pytest.mark.parametrize(("answer", "rounds"), [("n", 0), ("", 0), ("y", 1)])
def test_a_run_without_noise_is_confirmed_on_a_terminal(unheard, run_file, tmp_path, monkeypatch, answer, rounds):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{answer}\n"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(display, "notes", Console(stderr=True, force_terminal=True))
    once = ["train", run_file, "--out", tmp_path / "r", "--set", "training.rounds=1", "--set", "noise.kind=none"]
    done = unheard(*once, ok=False)
    assert "Without noise epsilon is infinite" in done.stderr
    assert done.returncode == (0 if rounds else 1)
    assert (tmp_path / "r").exists() == bool(rounds)


def test_train_shows_sigma_and_warns_before_the_first_round_of_noise_that_dominates_the_updates(
    unheard, run_file, tmp_path
):
    once = ["train", run_file, "--set", "training.rounds=1", "--set", "noise.kind=gaussian"]
    assert "sigma = 0.0856" in unheard(*once, "--out", tmp_path / "a").stderr
    said = unheard(*once, "--out", tmp_path / "b", "--set", "noise.noise_multiplier=4.5").stderr
    assert "The noise will dominate the updates: with sigma = 0.76" in said
    assert "sigma" not in unheard(*once, "--out", tmp_path / "c", "--set", "noise.kind=none", "--yes").stderr


def test_init_shows_sigma_of_the_template(unheard, tmp_path):
    said = unheard("init", "--population", 14000, "--users-per-round", 50, cwd=tmp_path).stderr
    assert "The noise will dominate the updates: with sigma = 0.3" in said
    said = unheard("init", "--population", 10**6, "--users-per-round", 5000, "--force", cwd=tmp_path).stderr
    assert "sigma = 0.003" in said
    assert "will dominate" not in said


def test_init_for_a_base_writes_a_complete_run_file_without_the_declaration(unheard, tmp_path):
    words = ("init", "--base", "base", "--population", 1000, "--users-per-round", 50)
    assert "no config.json" in unheard(*words, cwd=tmp_path, ok=False).stderr
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    unheard(*words, cwd=tmp_path)
    run, _ = read_run_file(tmp_path / "run.toml")
    assert (type(run.model).__name__, run.model.train, run.model.base_is_public) == ("HuggingFaceModel", "lora", False)
    assert run.plan.update.unroll == run.evaluation.unroll == 512


@pytest.mark.system
def test_init_chooses_the_noise_that_meets_an_epsilon(unheard, tmp_path):
    words = ("init", "--population", 200_000, "--users-per-round", 5000, "--rounds", 20)
    done = unheard(*words, "--epsilon", 0.8, cwd=tmp_path)
    run, _ = read_run_file(tmp_path / "run.toml")
    event = PoissonGaussian(sampling_prob=5000 / 200_000, noise_multiplier=run.plan.noise.noise_multiplier)
    assert 0.79 < best_epsilon([(event, 20)], run.claimed_delta).epsilon <= 0.8
    assert f"z = {run.plan.noise.noise_multiplier:g} meets epsilon 0.8" in done.stdout
    assert f"sigma = {run.plan.noise.noise_multiplier * 15 / 5000:.3g}" in done.stderr
    assert "--epsilon" in unheard(*words, "--noise", "auto", "--force", cwd=tmp_path, ok=False).stderr
    assert "'auto'" in unheard(*words, "--noise", "none", "--force", cwd=tmp_path, ok=False).stderr


def test_each_epsilon_that_training_shows_names_its_accountant(unheard, run_file, tmp_path):
    done = unheard("train", run_file, "--out", tmp_path / "r")
    claim = json.loads((tmp_path / "r" / "statement.json").read_text())["claim"]
    assert f"Claimed: {claim}" in done.stdout
    assert "by pld" in claim
    assert re.search(r"Running bound: ε = [\d.]+ by RDP at δ", done.stdout)
    assert re.search(r"ε [\d.]+ \(RDP\)", done.stderr)


def test_a_budget_that_ends_a_run_early_is_announced_by_init_and_train(unheard, store, tmp_path):
    corpus, file = uncharged_copy(store.path, tmp_path / "store"), tmp_path / "run.toml"
    unheard("budget", corpus, "--epsilon", 4, "--delta", 1e-3)
    words = ("--population", 60, "--users-per-round", 12, "--rounds", 30, "--epsilon", 4)
    said = unheard("init", file, "--corpus", corpus, *words).stderr
    number = re.search(r"The budget of all runs on these users .* allows (\d+) of the 30 declared rounds", said)
    assert number
    small = ("--set", "model.hidden_size=4", "--set", "model.embedding_size=4", "--set", "evaluation.max_tokens=100")
    done = unheard("train", file, "--out", tmp_path / "r", *small)
    assert number[0] in done.stderr
    assert len(Ledger.read(tmp_path / "r" / "ledger.jsonl")) == int(number[1])
    assert f"Stopped: Round {int(number[1]) + 1} would bring epsilon to" in done.stdout
    unheard("budget", corpus, "--epsilon", 400)
    assert "declared rounds" not in unheard("init", file, "--corpus", corpus, *words, "--force").stderr


def test_resume_says_how_the_claim_grows_before_it_trains_longer_than_declared(
    unheard, run_file, tmp_path, monkeypatch
):
    folder = tmp_path / "r"
    unheard("train", run_file, "--out", folder, "--set", "training.rounds=2")
    assert "trains it longer" in unheard("resume", folder).stdout
    said = unheard("resume", folder, "--rounds", 3).stderr
    claimed = json.loads((folder / "statement.json").read_text())["claimed"]
    assert "declared 2 rounds before it began" in said
    assert f"After 3 rounds it will claim ε = {epsilon_text(claimed['epsilon'])}" in said
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))  # no answer is no
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(train_command, "notes", Console(stderr=True, force_terminal=True))
    assert unheard("resume", folder, "--rounds", 4, ok=False).returncode == 1
    assert len(Ledger.read(folder / "ledger.jsonl")) == 3
    unheard("resume", folder, "--rounds", 4, "--yes")
    assert len(Ledger.read(folder / "ledger.jsonl")) == 4


ROUND = PoissonGaussian(sampling_prob=0.2, noise_multiplier=3.0)
LATER = PoissonGaussian(sampling_prob=0.2, noise_multiplier=1.5)


def attempt(index: int) -> CorrelatedGaussian:
    return CorrelatedGaussian(sampling_prob=0.2, noise_multiplier=6.0, block=4, index=index)


KINDS = {
    "one phase": ([(0, ROUND)], lambda number: ROUND),
    "two phases": ([(0, ROUND), (7, LATER)], lambda number: ROUND if number < 7 else LATER),
    "correlated noise": ([(0, attempt(0))], attempt),
}
"""The declared phases of a run, and the event of each round of one mechanism."""


@pytest.mark.parametrize("new_noise", [False, True])
@pytest.mark.parametrize("rounds", [9, 10, 11, 30])
@pytest.mark.parametrize("kind", KINDS)
def test_the_claim_that_is_announced_is_that_of_everything_that_resume_will_have_charged(
    tmp_path, monkeypatch, kind, rounds, new_noise
):
    """Ten rounds were declared and six charged. With `--new-noise` correlated noise begins again with its first block."""
    phases, event = KINDS[kind]
    facts = {"delta": 1e-5, "start": {"charges": 1}, "population": 60}
    facts["declared"] = declaration(10, [(first, to_record(of)) for first, of in phases], None)
    ledger = Ledger.create(tmp_path / "ledger.jsonl", facts)
    ledger.charge(Gaussian(noise_multiplier=8.0), 0)
    for number in range(6):
        ledger.charge(event(number), number)
    (tmp_path / "run.toml").write_text("")
    said: list[str] = []
    monkeypatch.setattr(train_command, "note", lambda sentence, **_: said.append(sentence))
    train_command.confirm_longer(tmp_path, rounds, yes=True, new_noise=new_noise)
    if rounds <= 10:
        assert said == []
        return
    begins_again = new_noise and kind == "correlated noise"
    added = [Entry(event=event(n - 6 if begins_again else n), round=n, hash="") for n in range(6, rounds)]
    now, then = (claim_of_run(facts, [*ledger.entries, *more], 1e-5).epsilon for more in ([], added))
    (sentence,) = said
    assert "declared 10 rounds before it began" in sentence
    assert f"claims ε = {epsilon_text(now)} at" in sentence
    assert f"After {rounds} rounds it will claim ε = {epsilon_text(then)}, because" in sentence
    if begins_again:
        plain = [Entry(event=event(n), round=n, hash="") for n in range(6, rounds)]
        assert epsilon_text(claim_of_run(facts, [*ledger.entries, *plain], 1e-5).epsilon) != epsilon_text(then)


@pytest.mark.parametrize("new_noise", [False, True])
@pytest.mark.parametrize("rounds", [None, 3])
def test_resume_announces_and_trains_with_the_same_options(unheard, run_file, tmp_path, monkeypatch, new_noise, rounds):
    announced, resumed = [], []
    folder = tmp_path / "r"
    unheard("train", run_file, "--out", folder, "--set", "training.rounds=2", "--stop-after", 0)

    def train_on(where, **options):
        resumed.append((where, options["rounds"], options["new_noise"]))
        yield from ()

    monkeypatch.setattr(train_command, "confirm_longer", lambda *given, **named: announced.append((given, named)))
    monkeypatch.setattr("unheard.training.loop.resume", train_on)
    monkeypatch.setattr(train_command, "_print_result", lambda where, reports: list(reports or ()))
    words = ["--rounds", rounds] if rounds else []
    unheard("resume", folder, *words, *(["--new-noise"] if new_noise else []), "--yes")
    (((where, last, yes), named),) = announced
    assert (where, last, yes, named["new_noise"]) == (folder, rounds or 2, True, new_noise)
    assert resumed == [(folder, rounds, new_noise)]


def test_stop_after_ends_cleanly_at_a_round_and_says_how_to_continue(unheard, run_file, tmp_path):
    done = unheard("train", run_file, "--out", tmp_path / "r", "--set", "training.rounds=100000", "--stop-after", 1)
    assert "Continue with: unheard resume" in done.stdout.replace("\n", " ")
    rounds = len(Ledger.read(tmp_path / "r" / "ledger.jsonl"))
    newest = sorted((tmp_path / "r" / "checkpoints").iterdir())[-1].name
    assert newest == f"round-{rounds:08d}.safetensors"


def test_where_there_is_no_terminal_every_evaluation_is_a_line(unheard, run_file, tmp_path):
    """In the log of a batch job a progress bar would appear only when the job ends."""
    said = unheard("train", run_file, "--out", tmp_path / "r", "--set", "evaluation.every=2").stderr
    assert re.findall(r"^r: round (\d) of 6, top-1 .* ε ", said, flags=re.MULTILINE) == ["2", "4", "6"]


@pytest.mark.system
def test_a_plain_kill_saves_what_was_done_as_ctrl_c_does(run_file, tmp_path):
    """Slurm, Kubernetes and systemd end a job by SIGTERM. Completed rounds must not be charged again after a resume."""
    words = [Path(sys.executable).parent / "unheard", "train", run_file, "--out", tmp_path / "r"]
    far = [
        "--set",
        "training.rounds=1000000",
        "--set",
        "training.checkpoint_every=1000000",
        "--set",
        "evaluation.every=3",
    ]
    process = subprocess.Popen([*words, *far], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = ""
    while "round 3 of" not in said and (line := process.stderr.readline()):
        said += line
    process.terminate()
    _, rest = process.communicate()
    assert process.returncode == 130, said + rest
    assert f"Stopped. What was done is saved: unheard resume {tmp_path / 'r'} continues." in rest
    charged = len(Ledger.read(tmp_path / "r" / "ledger.jsonl"))
    saved = int(sorted((tmp_path / "r" / "checkpoints").iterdir())[-1].name[len("round-") : -len(".safetensors")])
    assert saved >= 3
    assert saved in (charged, charged - 1)  # the round in progress, if there was one, is lost


def test_a_budget_ends_training_with_a_message_and_status_0(unheard, run_file, tmp_path):
    done = unheard(
        "train",
        run_file,
        "--out",
        tmp_path / "r",
        "--set",
        "privacy.budget_epsilon=12.0",
        "--set",
        "training.rounds=500",
    )
    assert "Stopped" in done.stdout
    assert len(Ledger.read(tmp_path / "r" / "ledger.jsonl")) < 500
    again = unheard("resume", tmp_path / "r", ok=False)
    assert again.returncode == 2
    assert "budget" in again.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "clip.norn=3"], "Did you mean 'norm'"),
        (["--set", "clip.norm=-3"], "norm must be above 0"),
        (["--set", "clip.norm=nan"], "must be a number"),
        (["--set", "clip.norm=wide"], "must be a number"),
        (["--set", "corpus.path=nowhere"], "unheard prepare"),
        (["--set", "privacy.delta=0.5"], "below 1 / population"),
        (
            ["--set", "sampling.kind=fixed_size", "--set", "sampling.users_per_round=3"],
            "Fixed-size sampling with noise",
        ),
        (["--set", "model.vocabulary_size=99"], "model.vocabulary_size = 50"),
        (["--set", "estimator.kind=true_average"], "fixed_denominator"),
        (["--engine", "warp"], "'warp' is not one of 'auto'"),
        (["--device", "abacus"], "Device 'abacus'"),
    ],
)
def test_refusals_name_the_cure_exit_with_2_and_leave_nothing_behind(unheard, run_file, tmp_path, words, message):
    done = unheard("train", run_file, "--out", tmp_path / "r", *words, ok=False)
    assert done.returncode == 2
    assert message in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "r" / "ledger.jsonl").exists()


def test_a_run_folder_is_not_trained_over_and_loses_nothing(unheard, run_file, tmp_path):
    unheard("train", run_file, "--out", tmp_path / "r")
    before = {p: p.read_bytes() for p in (tmp_path / "r").rglob("*") if p.is_file()}
    done = unheard("train", run_file, "--out", tmp_path / "r", ok=False)
    assert done.returncode == 2
    assert "unheard resume" in done.stderr.replace("\n", " ")
    assert {p: p.read_bytes() for p in (tmp_path / "r").rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("verb", [["resume"], ["evaluate"], ["statement"], ["predict"]])
def test_a_folder_without_a_run_is_named(unheard, tmp_path, verb):
    done = unheard(*verb, tmp_path, *(["hello"] if verb == ["predict"] else []), ok=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_damaged_ledger_or_checkpoint_is_refused_with_status_2(unheard, run_file, tmp_path):
    unheard("train", run_file, "--out", tmp_path / "r")
    ledger = tmp_path / "r" / "ledger.jsonl"
    whole = ledger.read_bytes()
    ledger.write_bytes(whole.replace(b'"noise_multiplier":0.5', b'"noise_multiplier":9.5', 1))
    for verb in ("resume", "statement"):
        done = unheard(verb, tmp_path / "r", ok=False)
        assert done.returncode == 2
        assert "ledger.jsonl" in done.stderr.replace("\n", "")
    ledger.write_bytes(whole)
    newest = sorted((tmp_path / "r" / "checkpoints").iterdir())[-1]
    newest.write_bytes(newest.read_bytes()[:-7])
    done = unheard("resume", tmp_path / "r", "--rounds", 9, ok=False)
    assert done.returncode == 2
    assert "Delete it" in done.stderr.replace("\n", " ")


def test_init_does_not_write_over_a_file(unheard, tmp_path):
    (tmp_path / "run.toml").write_text("mine")
    done = unheard("init", "--population", 100, cwd=tmp_path, ok=False)
    assert done.returncode == 2
    assert (tmp_path / "run.toml").read_text() == "mine"


def test_init_never_changes_what_was_asked(unheard, tmp_path):
    """More users per round than the population is an error. By default a small population takes part completely."""
    done = unheard("init", "--population", 50, "--users-per-round", 80, cwd=tmp_path, ok=False)
    assert done.returncode == 2
    assert "more than the declared population of 50" in done.stderr
    unheard("init", "--population", 50, cwd=tmp_path)
    assert "users_per_round = 50 " in (tmp_path / "run.toml").read_text()
    unheard("init", "--population", 10**8, "--users-per-round", 1234567, "--force", cwd=tmp_path)
    assert "users_per_round = 1234567 " in (tmp_path / "run.toml").read_text()


def test_output_holds_nothing_private(unheard, run_file, tmp_path):
    """No true count of users or of the cohort, no training loss: the store's 60 users were declared as 1,000."""
    done = unheard(
        "train", run_file, "--out", tmp_path / "r", "--set", "privacy.population=1000", "--set", "privacy.delta=1e-5"
    )
    written = done.stdout + done.stderr
    for path in (tmp_path / "r").rglob("*"):
        if path.suffix in {".json", ".jsonl", ".toml"}:
            written += path.read_text()
    for word in ("num_users", "train_users", "cohort_size", "training_loss", "update_norm"):
        assert word not in written
    metrics = json.loads((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()[0])
    accuracies = {"accuracy_top1", "accuracy_top3", "accuracy_top5", "accuracy_top1_words"}
    assert set(metrics) == {"round", "epsilon", "loss", "perplexity", "tokens"} | accuracies


def test_ctrl_c_says_what_the_command_keeps(capsys, monkeypatch):
    from unheard.cli import processes

    def interrupted(report):
        yield report
        raise KeyboardInterrupt

    monkeypatch.setattr(processes, "describe_stop", [lambda: "Stopped. Three rounds are saved."])
    report = RoundReport(round=1, rounds=2, epsilon=1.0, delta=1e-5)
    with pytest.raises(KeyboardInterrupt):
        show_rounds(interrupted(report), "first", folder=Path("runs/first"))
    assert capsys.readouterr().err.count("unheard: Stopped. Three rounds are saved.") == 1
    with pytest.raises(KeyboardInterrupt):
        show_runs(interrupted((0, report)), ["first"])
    assert capsys.readouterr().err.count("unheard: Stopped. Three rounds are saved.") == 1


def test_nodes_go_neither_with_other_processes_nor_secure_aggregation_without_nodes(run):
    for on, ranks, is_secure, words in (
        ("here", None, True, "give --on flower"),
        ("flower", object(), False, "leave out --processes"),
    ):
        asked = nodes_of(NodeOptions(on=on), run, EngineChoice(), ranks, is_secure)
        with pytest.raises(InvalidValue, match=words), asked:
            pass
