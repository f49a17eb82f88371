"""benchmarks/llm_finetuning.py on a small model stops, continues, and shows the results; benchmarks/next_words.py."""

import json
import shutil
import sys

import pytest
from benchmarks import llm_finetuning as command
from benchmarks import next_words

import unheard
from unheard.deployment.keyboard.suggestions import suggester_for
from unheard.deployment.model import open_model
from unheard.privacy.accountants import best_epsilon
from unheard.privacy.budget import default_delta

from .conftest import run_of


@pytest.fixture
def small(monkeypatch, tmp_path, base, corpus):
    settings = command.Settings(
        tokens_per_user=28, rounds=2, users_per_round=8, unroll=7, rank=2, held_out_tokens=200, clip=(0.4, 0.4)
    )
    monkeypatch.setattr(command, "SETTINGS", settings)
    monkeypatch.setattr(command, "SEEDS", (1, 2))
    monkeypatch.setattr(command, "NOISE", tmp_path / "noise.json")
    monkeypatch.setattr("unheard.privacy.accountants.EXAMPLE_GRID", 0.1)  # a coarse bound is enough here, and quick
    monkeypatch.setattr(command, "least_noise", lambda kind, population, epsilon, settings: 16 / epsilon)
    shutil.copytree(corpus, tmp_path / "posts")

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["llm_finetuning", *map(str, words)])
        command.main()

    return call, ["--base", base, "--out", tmp_path / "out", f"posts={tmp_path / 'posts'}"]


def names(out):
    return [command.name_of(line) for line in command.results_in(out)]


@pytest.mark.system
def test_results_are_kept_run_by_run_and_the_same_command_continues(small, tmp_path, capsys, monkeypatch):
    call, words = small
    call("--solve", f"posts={tmp_path / 'posts'}")
    assert sorted(json.loads((tmp_path / "noise.json").read_text()).values()) == [2, 2, 8, 8]
    jobs = [job.name for job in command.jobs_of(["posts"])]
    assert len(jobs) == len(set(jobs)) == 12
    out, rounds, real = tmp_path / "out", [], unheard.train

    def train(*args, **settings):
        for report in real(*args, **settings):
            rounds.append(report.round)
            yield report

    monkeypatch.setattr(unheard, "train", train)
    monkeypatch.setattr(command, "clock", lambda: len(rounds))
    call(*words, "--stop-after", 4.5)  # in the middle of the third run
    assert names(out) == ["posts-base", *jobs[:2]]
    assert "Stopped in " + jobs[2] in capsys.readouterr().out
    call(*words, "--stop-after", 0.5)  # the rest of the third run, and no more
    assert names(out) == ["posts-base", *jobs[:3]]
    assert rounds == [1, 2, 1, 2, 1, 2]
    monkeypatch.setattr(command, "SEEDS", (1,))
    call(*words)
    assert names(out) == ["posts-base", *jobs[:6]]
    call(*words)
    assert names(out) == ["posts-base", *jobs[:6]]
    assert len(rounds) == 12
    for line in command.results_in(out)[1:]:
        assert (float(line["claimed"]["epsilon"]) == float("inf")) == (line["epsilon"] is None)


def test_the_table_has_means_deviations_and_gains(tmp_path, capsys, monkeypatch):
    def line(kind, **changes):
        metrics = {"loss": 4.0, "perplexity": 54.6, "accuracy_top1": 0.3}
        metrics |= {key: changes.pop(key) for key in list(changes) if key in metrics}
        return {"corpus": "posts", "kind": kind, "metrics": metrics, "device": "a GPU", **changes}

    both = {"epsilon": 8.0, "noise_multiplier": 0.6}
    lines = [
        line("base"),
        line("users", epsilon=None, seed=1, loss=3.5, noise_multiplier=0.0),
        line("examples", epsilon=None, seed=1, loss=3.50, noise_multiplier=0.0),
        line("examples", epsilon=None, seed=2, loss=3.52, noise_multiplier=0.0),
        line("examples", **both, seed=1, loss=3.61),
        line("examples", **both, seed=2, loss=3.63),
        line("users", **both, seed=1, loss=3.6, accuracy_top1=0.35),
        line("users", **both, seed=2, loss=3.8, accuracy_top1=0.33),
    ]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    (tmp_path / "calls.jsonl").write_text('{"seconds": 90}\n{"seconds": 60}\n')
    monkeypatch.setattr(sys, "argv", ["llm_finetuning", "--out", str(tmp_path), "--show"])
    command.main()
    table = capsys.readouterr().out
    assert "| posts | base | | 4.0000 | 54.60 | 30.00 % | | |" in table
    assert "| posts | users, no noise | 1 | 3.5000 | 33.12 | 30.00 % | 0.5000 |  |" in table
    assert "| posts | users, ε = 8 | 2 | 3.7000 ± 0.1414 | 40.45 | 34.00 ± 1.41 % | 0.3000 | 0.600 |" in table
    assert "2.5 minutes of 2 calls on a GPU." in table
    # By the rules: 0.11 is more than 2 sqrt(0.01^2 + 0.01^2), and 0.08 is less than 2 sqrt(0.1^2 + 0.01^2).
    assert "| posts | examples, ε = 8 against examples, no noise | +0.1100 | 0.0283 | differ |" in table
    assert "| posts | examples, ε = 8 against users, ε = 8 | -0.0800 | 0.2010 | no difference seen |" in table
    assert "against users, no noise" not in table  # this setting has one run


@pytest.mark.system
def test_reviews_81_has_the_settings_of_its_rule():
    jobs = list(command.jobs_of(["reviews_81"]))
    assert [job.epsilon for job in jobs[:5]] == [None, 8.0, 4.0, 2.0, 1.0]
    assert (len(jobs), {job.kind for job in jobs}) == (15, {"users"})
    assert (command.SHORT.rounds, command.SHORT.users_per_round, command.SHORT.examples_per_user) == (100, 2000, 1)
    assert all(0.98 * e <= e_spent(e) <= e for e in (8.0, 1.0))


def e_spent(epsilon):
    """Return the epsilon of all rounds with the noise that `least_noise` finds for 750,000 users."""
    z = command.least_noise("users", 750_000, epsilon, command.SHORT)
    return best_epsilon([(command.event_of("users", 750_000, z, command.SHORT), 100)], default_delta(750_000)).epsilon


def test_next_words_are_counted_at_the_same_places_for_every_model(tmp_path, base, corpus, monkeypatch):
    shutil.copytree(corpus, tmp_path / "corpus")
    model = unheard.HuggingFaceModel(path=str(base), train="lora", lora_rank=2, base_is_public=True)
    run = run_of(tmp_path / "corpus", model, training=unheard.Training(rounds=1))
    for _ in unheard.train(run, tmp_path / "run"):
        pass
    words = ["--store", corpus, "--out", tmp_path / "hits.json", "--places", 20, f"one={tmp_path / 'run'}"]
    monkeypatch.setattr(sys, "argv", ["next_words", *map(str, words)])
    next_words.main()
    (hits,) = json.loads((tmp_path / "hits.json").read_text())["hits"].values()
    assert len(hits) == 20
    assert set(hits) <= {0, 1}
    tokenizer = open_model(tmp_path / "run").tokenizer
    posts = list(next_words.posts_of(corpus, tokenizer))
    assert ["rain", "on", "the", "roof"] in [post[-4:] for post in posts]
    places = next_words.places_of(posts, 20)
    suggester = suggester_for(open_model(tmp_path / "run"))
    assert hits == [int(suggester.suggest(before)[0].word.lower() == word.lower()) for before, word in places]
    assert all(before.endswith(" ") and word.isalnum() for before, word in places)
