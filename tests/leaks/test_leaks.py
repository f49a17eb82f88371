"""No output of any command contains the id or the text of a training user.

A store has one user with a canary id and a canary sentence. All commands run on it, and their output is searched for both.
"""

import json
import logging
import os
import stat
import traceback

import numpy as np
import pytest

import unheard
from unheard.corpus.store import TokenStore

ID = "canary.user.73.41@example.org"
SENTENCE = "purple teapot marries seventh admiral tonight"
PLAIN = "the dog runs and the cat sleeps under a tree in the house"
WORDS = [*SENTENCE.split(), *sorted(set(PLAIN.split()))]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Write the posts of thirty ordinary users and of the canary user, who is in the training split."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("\n".join(WORDS) + "\n")
    rng = np.random.default_rng(3)
    rows = [
        {"who": f"person{i}", "what": " ".join(rng.permutation(PLAIN.split())), "when": i}
        for i in range(30)
        for _ in range(4)
    ]
    rows += [{"who": ID, "what": SENTENCE, "when": n} for n in range(12)]
    (tmp_path / "posts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def shapes_of_the_secret(store: TokenStore) -> list[bytes]:
    """Return the byte strings to search for: id and sentence as text, and the sentence's token ids in several formats."""
    ids = store.vocabulary.encode_words(SENTENCE.split()).tolist()
    assert min(ids) > 2
    assert len(set(ids)) == 6
    looks: list[bytes] = [
        ID.encode(),
        ID.split("@")[0].encode(),
        SENTENCE.encode(),
        SENTENCE.replace(" ", "_").encode(),
    ]
    looks += [np.array(ids, dtype=width).tobytes() for width in ("<u2", "<u4", "<i4", "<i8", "<f4")]
    return [*looks, json.dumps(ids).encode(), ",".join(map(str, ids)).encode(), " ".join(map(str, ids)).encode()]


def found_in(content: bytes, secrets: list[bytes]) -> list[bytes]:
    return [secret for secret in secrets if secret in content]


def test_the_scan_finds_planted_secrets(folder, unheard_command):
    """The search finds the secret in the input as text, and in the store as token ids."""
    assert prepared(unheard_command).status == 0
    store = TokenStore.open(folder / "store")
    secrets = shapes_of_the_secret(store)
    assert len(found_in((folder / "posts.jsonl").read_bytes(), secrets)) >= 3
    in_store = b"".join(p.read_bytes() for p in (folder / "store" / "train").iterdir())
    assert found_in(in_store, secrets)


def prepared(command):
    return command(
        *("prepare", "posts.jsonl", "--user-field", "who", "--text-field", "what", "--time-field", "when"),
        *(
            "--vocab",
            "words.txt",
            "--tokens-per-user",
            "40",
            "--min-tokens",
            "5",
            "--held-out",
            "0.2",
            "--out",
            "store",
        ),
    )


def test_neither_id_nor_sentence_is_in_anything_that_comes_out(folder, unheard_command, caplog):
    caplog.set_level(logging.DEBUG)
    said = [prepared(unheard_command)]
    store = TokenStore.open(folder / "store")
    secrets = shapes_of_the_secret(store)
    settings = ["model.embedding_size=6", "model.hidden_size=8", "training.checkpoint_every=1", "evaluation.every=1"]
    said.append(
        unheard_command(
            "init", "run.toml", "--corpus", "store", "--population", "30", "--users-per-round", "30", "--rounds", "2"
        )
    )
    options = [word for one in settings for word in ("--set", one)]
    said.append(unheard_command("train", "run.toml", "--out", "runs/r", *options))
    said.append(unheard_command("resume", "runs/r", "--rounds", "3"))
    for words in (
        ("evaluate", "runs/r"),
        ("predict", "runs/r", "the dog"),
        ("statement", "runs/r"),
        ("statement", "runs/r", "--all-runs"),
        ("verify", "runs/r"),
        ("audit", "runs/r", "--canaries", "20"),
        ("compare", "runs/r"),
        ("report", "runs/r", "--out", "page"),
        ("export", "runs/r", "--out", "exported"),
        ("budget", "store"),
    ):
        said.append(unheard_command(*words))
        assert said[-1].status == 0, (words, said[-1].said)
    said.append(
        unheard_command("train", "run.toml", "--out", "runs/broken", "--set", "model.vocabulary_size=9", *options)
    )
    assert said[-1].status == 2
    printed = "".join(done.said for done in said) + caplog.text
    assert found_in(printed.encode(), secrets) == []
    places = [folder / "runs", folder / "page", folder / "exported"]
    files = [p for place in places for p in place.rglob("*") if p.is_file()] + [
        p for p in (folder / "store").iterdir() if p.is_file() and p.name != "counts.json"
    ]
    assert len(files) > 15
    leaks = {str(p.relative_to(folder)): found for p in files if (found := found_in(p.read_bytes(), secrets))}
    assert leaks == {}
    assert not [p for place in places for p in place.rglob("*") if found_in(str(p).encode(), secrets)]


@pytest.mark.parametrize("where", ["unheard.corpus.store.UserTokens.users", "unheard.updates.user_update.read_users"])
def test_not_even_the_traceback_of_a_bug_holds_them(folder, unheard_command, monkeypatch, where):
    """The traceback of an internal error contains no text, although private objects are on the stack."""
    prepared(unheard_command)
    store = TokenStore.open(folder / "store")
    secrets = shapes_of_the_secret(store)
    plan = unheard.Plan(
        population=30,
        sampling=unheard.PoissonSampling(sampling_prob=1.0),
        update=unheard.FedAvg(),
        clip=unheard.FlatClip(norm=1.0),
        noise=unheard.GaussianNoise(noise_multiplier=1.0),
    )
    model = unheard.TiedLSTM(vocabulary_size=len(store.vocabulary), embedding_size=4, hidden_size=4)
    run = unheard.Run(corpus="store", model=model, plan=plan, training=unheard.Training(rounds=1))
    monkeypatch.setattr(where, lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError) as bug:
        list(unheard.train(run, "broken"))
    printed = "".join(traceback.format_exception(bug.value))
    assert "Traceback" in printed
    assert found_in(printed.encode(), secrets) == []


def test_files_with_secrets_are_for_their_owner_alone(folder, unheard_command):
    (folder / "secrets.jsonl").write_text('{"text": "purple dog", "users": 2}\n')
    done = unheard_command(
        *("prepare", "posts.jsonl", "--user-field", "who", "--text-field", "what", "--vocab", "words.txt"),
        *("--tokens-per-user", "40", "--min-tokens", "5", "--held-out", "0.2", "--out", "store"),
        *("--canaries", "secrets.jsonl", "--user-map", "map.csv"),
    )
    assert done.status == 0, done.said
    assert unheard_command("budget", "store", "--epsilon", "5", "--delta", "1e-3").status == 0
    assert unheard_command("canaries", "store", "--out", "drawn.jsonl", "--users", "1").status == 0
    private = [
        "store/counts.json",
        "store/layout.json",
        "store/digests.json",
        "store/canaries.json",
        "store/ledger.jsonl",
        "drawn.jsonl",
        "map.csv",
    ]
    open_to_others = [name for name in private if stat.S_IMODE(os.stat(folder / name).st_mode) != 0o600]
    assert open_to_others == []
