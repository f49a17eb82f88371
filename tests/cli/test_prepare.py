"""`unheard prepare` and `unheard corpus` on the command line."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from unheard.cli import prepare
from unheard.cli.main import app, as_typer_command
from unheard.corpus.store import TokenStore
from unheard.errors import InputError, InvalidValue, PrivacyError, UnknownKey

POSTS = [{"author": f"a{i % 5}", "body": "the cat sat on the mat " * 3, "created_utc": i} for i in range(20)]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "posts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*POSTS, "x"]))

    def call(*words):
        return CliRunner().invoke(app, list(words), catch_exceptions=True)

    return call


FIELDS = ("--user-field", "author", "--text-field", "body", "--held-out", "0", "--vocab-size", "50")


@pytest.mark.parametrize(("least", "is_warned"), [("1", False), ("5", False), ("9", True)])
def test_a_store_without_most_of_the_users_is_warned_of(run, tmp_path, least, is_warned):
    texts = [*["a b"] * 4, *["the cat sat on the mat"] * 4, *["the cat sat on the mat with a hat and a bat"] * 4]
    rows = [{"author": f"u{number}", "body": text} for number, text in enumerate(texts)]
    (tmp_path / "short.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run("prepare", "short.jsonl", *FIELDS, "--min-tokens", least, "--out", "short")
    assert result.exit_code == 0, result.output
    assert ("67 % of the users have too little text" in said(result)) is is_warned
    assert ("Give a smaller --min-tokens" in said(result)) is is_warned


def test_one_command_makes_a_store_and_says_what_was_left_out(run, tmp_path):
    result = run(
        "prepare", "posts.jsonl", *FIELDS, "--time-field", "created_utc", "--tokens-per-user", "40", "--out", "store"
    )
    assert result.exit_code == 0, result.output
    assert TokenStore.open(tmp_path / "store").train.num_users == 5
    assert result.stdout.strip() == "store"
    assert re.search(r"1 rows that are not valid JSON", result.stderr)
    assert "unsafe to publish" in " ".join(result.stderr.split())


def test_exact_counts_are_shown_to_the_owner_and_never_logged(run, tmp_path):
    (tmp_path / "some.jsonl").write_text(
        "".join(json.dumps({**row, "author": f"b{row['author']}"}) + "\n" for row in POSTS)
    )
    for name in ("posts.jsonl", "some.jsonl"):
        result = run("prepare", name, *FIELDS, "--out", f"{name}.store", "--log-file", f"{name}.log")
        assert "5 users, 0 too short and left out" in said(result)
        log = (tmp_path / f"{name}.log").read_text()
        assert "users" not in log
        assert not re.search(r"\b(5|20|21)\b", log), log


def said(result) -> str:
    return " ".join(result.stderr.split())


def test_the_share_of_unknown_words_is_printed_and_a_large_one_warned_of(run, tmp_path):
    result = run("prepare", "posts.jsonl", *FIELDS[:-1], "10000", "--out", "store")
    assert "0.00 % of the training words are not in the vocabulary" in said(result)
    assert "--vocab-language" not in said(result)
    german = [{"author": f"a{i % 5}", "body": "das wetter ist heute wirklich schön"} for i in range(20)]
    (tmp_path / "german.jsonl").write_text("".join(json.dumps(row) + "\n" for row in german))
    result = run("prepare", "german.jsonl", *FIELDS[:-1], "10000", "--out", "german")
    assert result.exit_code == 0
    assert re.search(r"Notice: \d+ % of the training words are not in the vocabulary", said(result))
    assert "--vocab-language de" in said(result)
    result = run("prepare", "german.jsonl", *FIELDS[:-1], "10000", "--vocab-language", "de", "--out", "better")
    assert "0.00 % of the training words are not in the vocabulary" in said(result)


@pytest.mark.parametrize(
    ("text", "language", "named"),
    [
        ("هذا هو الكتاب الذي كان في البيت، وهو من الكتب التي لا تباع.", "en", "use --vocab-language ar;"),
        ("das ist nicht xyzzy plugh und das ist nicht quux", "de", "the text seems to be in this language. So ask"),
        ("xyzzy plugh quux", "de", "--vocab-language CODE"),
    ],
)
def test_the_cure_names_the_language_of_the_text(run, tmp_path, text, language, named):
    rows = [{"author": f"a{i % 5}", "body": text} for i in range(20)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--vocab-language", language, "--out", "store")
    assert named in said(run("prepare", "x.jsonl", *FIELDS[:-1], "3000", *words))


@pytest.mark.parametrize(
    ("text", "vocabulary"),
    [
        ("今日はとても良い天気ですね、散歩に行きましょう。", "--vocab-language ja"),
        ("今天天气很好我们一起去公园散步吧", "--vocab-language zh"),
        ("วันนี้อากาศดีมากไปเดินเล่นกัน", "--vocab FILE"),
    ],
)
def test_text_without_spaces_between_words_is_refused_and_a_tokenizer_named(run, tmp_path, text, vocabulary):
    rows = [{"author": f"a{i % 5}", "body": text} for i in range(20)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run("prepare", "x.jsonl", *FIELDS, "--out", "store")
    assert isinstance(result.exception, InputError)
    assert f"--tokens characters with {vocabulary}" in str(result.exception).replace("a list of them, ", "")
    assert "tokenizer.json" in str(result.exception)


def test_japanese_works_by_characters(run, tmp_path):
    rows = [{"author": f"a{i % 5}", "body": "今日はとても良い天気ですね。「はい、そうです！」"} for i in range(20)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run(
        *("prepare", "x.jsonl", *FIELDS[:-1], "3000", "--tokens", "characters", "--vocab-language", "ja"),
        *("--out", "store"),
    )
    assert result.exit_code == 0, result.output
    assert " 0.00 % of the training characters" in said(result)
    shown = " ".join(run("corpus", "show", "store").stdout.split())
    assert re.search(r"vocabulary: [\d,]+ characters, public", shown)
    assert "0.00 % of characters out of the vocabulary" in shown


@pytest.mark.parametrize(
    ("options", "named", "left_out"),
    [
        ("--vocab-size 10000", "--vocab-size 30000", "--vocab-epsilon"),
        ("--vocab-size 10000 --tokens characters", "--vocab-language", "--tokens characters"),
        ("--vocab-size 10000 --vocab words.txt", "--tokens characters", "--vocab-language"),
        (
            "--vocab-size 50 --vocab private --vocab-epsilon 8 --vocab-delta 1e-3",
            "--vocab-epsilon",
            "(--vocab private)",
        ),
    ],
)
def test_the_cure_of_unknown_words_is_one_that_was_not_tried(run, tmp_path, options, named, left_out):
    # Every user writes a word that nobody else writes, and a word that all users write.
    rows = [{"author": f"a{i}", "body": f"سلام {'ابتثجحخدذر'[i % 10] * 3}{i}"} for i in range(30)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "words.txt").write_text("hello\n")
    result = run("prepare", "x.jsonl", *FIELDS[:-2], *options.split(), "--out", "store")
    assert result.exit_code == 0, result.output
    notice = said(result).partition("Notice: ")[2]
    assert named in notice
    assert left_out not in notice


def test_a_private_vocabulary_says_how_many_words_it_has(run, tmp_path):
    rows = [{"author": f"a{i}", "body": "good morning"} for i in range(300)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run(
        *("prepare", "x.jsonl", *FIELDS[:-1], "1000", "--vocab", "private", "--vocab-epsilon", "4"),
        *("--vocab-delta", "1e-9", "--out", "store"),
    )
    assert result.exit_code == 0, result.output
    assert "2 words released by --vocab private, of 997 asked for" in said(result)


def test_the_paper_rule_is_the_default_of_tokens_per_user(run, tmp_path):
    result = run("prepare", "posts.jsonl", *FIELDS, "--tokens-per-user", "1600", "--out", "store")
    assert isinstance(result.exception, InputError)
    assert "No user has 1600 tokens" in str(result.exception)
    assert (
        run(
            "prepare", "posts.jsonl", *FIELDS, "--tokens-per-user", "1600", "--min-tokens", "2", "--out", "store"
        ).exit_code
        == 0
    )


def test_show_prints_exact_counts_under_a_warning(run):
    run("prepare", "posts.jsonl", *FIELDS, "--out", "store")
    result = run("corpus", "show", "store", "--weight-cap", "38")
    assert result.exit_code == 0, result.output
    flat = " ".join(result.stdout.split())
    assert "unsafe to publish" in flat
    assert "5 users, 380 tokens, 20 sequences" in flat
    assert "mean weight 1.000, total weight 5.0" in flat


def test_synth_makes_a_store_of_the_size_asked_for(run, tmp_path):
    run("prepare", "posts.jsonl", *FIELDS, "--out", "store")
    result = run("corpus", "synth", "--like", "store", "--users", "30", "--tokens-per-user", "16", "--out", "synth")
    assert result.exit_code == 0, result.output
    made = TokenStore.open(tmp_path / "synth")
    assert made.train.num_users == 30
    assert "(synthetic)" in run("corpus", "show", "synth").stdout


def test_files_of_excluded_users_and_canaries_are_read(run, tmp_path):
    (tmp_path / "gone.txt").write_text("a0\na1\n")
    (tmp_path / "canaries.jsonl").write_text('{"text": "the on the", "users": 2}\n')
    result = run(
        "prepare",
        "posts.jsonl",
        *FIELDS,
        "--exclude-users",
        "gone.txt",
        "--canaries",
        "canaries.jsonl",
        "--user-map",
        "map.json",
        "--out",
        "s",
    )
    assert result.exit_code == 0, result.output
    assert TokenStore.open("s").train.num_users == 3
    assert sorted(e["user"] for e in json.loads((tmp_path / "map.json").read_text())) == ["a2", "a3", "a4"]
    assert len(json.loads((tmp_path / "s" / "canaries.json").read_text())[0]["users"]) == 2


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        (("posts.jsonl",), InputError, "--user-field"),
        (("posts.jsonl", *FIELDS, "--vocab", "private"), InvalidValue, "--vocab-epsilon"),
        (("posts.jsonl", *FIELDS, "--vocab-epsilon", "1"), InvalidValue, "--vocab private"),
        (("posts.jsonl", *FIELDS, "--vocab", "from-corpus"), InvalidValue, "--vocab-corpus"),
        (("posts.jsonl", *FIELDS, "--vocab", "privat"), InvalidValue, "Did you mean 'private'"),
        (("posts.jsonl", *FIELDS, "--vocab-language", "xx"), InvalidValue, "No public word list"),
        (("posts.jsonl", "--user-field", "body", "--text-field", "body"), InputError, "both the column 'body'"),
        (("posts.jsonl", *FIELDS, "--user-map", "store/map.json"), PrivacyError, "outside store"),
        (("posts.jsonl", *FIELDS, "--user-map", "nowhere/map.json"), InputError, "make the folder first"),
        (("posts.jsonl", *FIELDS, "--exclude-users", "nobody.txt"), InputError, "--exclude-users"),
        (("posts.jsonl", *FIELDS, "--canaries", "posts.jsonl"), UnknownKey, "[canary]"),
    ],
)
def test_flags_that_do_not_fit_are_refused_with_advice(run, tmp_path, words, kind, message):
    result = run("prepare", *words, "--out", "store")
    assert isinstance(result.exception, kind), result.output
    assert message in str(result.exception)
    assert not list(tmp_path.glob("store*"))  # no files with text are left


def test_a_store_that_training_will_refuse_is_warned_of(run):
    few = run("prepare", "posts.jsonl", *FIELDS, "--out", "store")
    assert "no user is held out" in few.stderr
    enough = run("prepare", "posts.jsonl", *FIELDS, "--held-out", "0.5", "--out", "half")
    assert "no user is held out" not in enough.stderr


@pytest.mark.parametrize(("broken", "is_warned"), [(3, True), (1, False)])
def test_many_rows_that_are_not_utf_8_are_warned_of_with_a_remedy(run, tmp_path, broken, is_warned):
    words = ["caf\xe9"] * broken + ["a cat"] * (100 - broken)
    lines = ["author,body", *(f"a{i},{word}" for i, word in enumerate(words))]
    (tmp_path / "x.csv").write_bytes("\n".join(lines).encode("latin-1"))
    result = run("prepare", "x.csv", *FIELDS, "--out", "store")
    assert f"{broken} rows that are not valid" in said(result)
    notice = "Notice: 3 % of the rows are not valid and are left out. If the input is not UTF-8, convert it"
    assert (notice in said(result)) is is_warned


def test_the_users_own_text_is_not_taken_for_a_public_corpus(run):
    result = run(
        "prepare", "posts.jsonl", *FIELDS, "--vocab", "from-corpus", "--vocab-corpus", "posts.jsonl", "--out", "store"
    )
    assert isinstance(result.exception, PrivacyError)
    assert "--vocab private" in str(result.exception)


def test_every_option_says_what_it_is_for(run):
    for words in (("prepare",), ("corpus", "show"), ("corpus", "synth")):
        text = run(*words, "--help").stdout
        assert "Examples" in text
    import inspect

    for name, parameter in inspect.signature(as_typer_command(prepare.prepare)).parameters.items():
        assert parameter.annotation.__metadata__[0].help, name


@pytest.mark.system
@pytest.mark.parametrize(
    ("number", "seconds"),
    [(signal.SIGINT, 0.4), (signal.SIGINT, 2.2), (signal.SIGTERM, 1.2), (signal.SIGHUP, 1.7)],
)
def test_an_interrupted_prepare_says_what_is_kept_and_the_same_command_continues(tmp_path, number, seconds):
    rows = ({"author": f"a{i % 997}", "body": f"the cat {i} sat on the mat " * 12} for i in range(20_000))
    (tmp_path / "posts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "unheard", "prepare", "posts.jsonl", *FIELDS, "--out", "store", "--workers", "2"]
    command += ["--shards", "8"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    time.sleep(seconds)
    os.killpg(process.pid, number)  # as a terminal does: every process of the group receives it
    began = time.monotonic()
    _, said = process.communicate(timeout=60)
    if process.returncode == 0:  # it ended before the signal
        return
    assert time.monotonic() - began < 5
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert said.strip().splitlines()[-1].startswith("unheard: Stopped")
    if "complete" not in said:
        again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert again.returncode == 0, again.stderr
    assert TokenStore.open(tmp_path / "store").train.num_users == 997
