"""Damaged files of a store or of a run folder: each command ends with an error of one line, or its output is unchanged.

The damages are drawn from a fixed seed. A command that does not read the damaged file gives the same output as before.
No damage gives another figure, a traceback or a changed claim. One exception: only `verify` and `corpus show` compare the
text of a store with its digest, so a damaged text may change an accuracy.
"""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import unheard
from tests.stores import uncharged_copy
from unheard.cli.main import app
from unheard.corpus.store import TokenStore, write_store
from unheard.corpus.vocabulary import Vocabulary
from unheard.errors import CorpusError, UnheardError

COMMANDS = {
    "evaluate": ("evaluate", "RUN", "--json"),
    "predict": ("predict", "RUN", "w1 w2"),
    "statement": ("statement", "RUN"),
    "all runs": ("statement", "RUN", "--all-runs"),
}
STORE = ("held_out/00000.offsets", "held_out/00000.tokens", "train/00000.offsets", "corpus.json", "vocabulary.txt")
RUN = ("model.safetensors", "ledger.jsonl", "run.toml", "vocabulary.txt", "tokens.json", "metrics.jsonl")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, store) -> Path:
    """A small store and a run on it."""
    folder = tmp_path_factory.mktemp("damaged")
    own = write_store(
        folder / "store",
        train=[store.train.tokens(k)[:12] for k in range(6)],
        held_out=[store.held_out.tokens(k)[:20] for k in range(3)],
        vocabulary=store.vocabulary,
        info=store.info,
    )
    plan = unheard.Plan(
        population=6,
        sampling=unheard.PoissonSampling(users_per_round=6),
        update=unheard.FedAvg(batch_size=2, unroll=5, learning_rate=1.0),
        clip=unheard.FlatClip(norm=2.0),
        noise=unheard.GaussianNoise(noise_multiplier=2.0),
    )
    run = unheard.Run(
        corpus=own.path,
        model=unheard.TiedLSTM(vocabulary_size=len(store.vocabulary), embedding_size=2, hidden_size=2),
        plan=plan,
        training=unheard.Training(rounds=1),
    )
    list(unheard.train(run, folder / "run"))
    return folder


def output_of(folder: Path, command: str) -> str | None:
    """Return the output of a command; None if it ended with an error of one line."""
    words = [str(folder / "run") if word == "RUN" else word for word in COMMANDS[command]]
    done = CliRunner().invoke(app, words)
    if isinstance(done.exception, UnheardError):  # `main` prints its message and exits with 1
        assert str(done.exception).strip()
        assert "\n" not in str(done.exception).strip()
        return None
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    return done.stdout if done.exit_code == 0 else None


@pytest.mark.parametrize("content", [b"", b"\xff" * 32, bytes(32), b"\x00" * 7], ids=["empty", "large", "zero", "cut"])
def test_a_report_on_damaged_offsets_is_an_error_of_one_line(whole, tmp_path, content):
    copy = shutil.copytree(whole, tmp_path / "copy")
    run_file = copy / "run" / "run.toml"
    run_file.write_text(run_file.read_text().replace(str(whole), str(copy)))
    (copy / "store" / "held_out" / "00000.offsets").write_bytes(content)
    done = CliRunner().invoke(app, ["report", str(copy / "run"), "--out", str(tmp_path / "page")])
    assert isinstance(done.exception, UnheardError), done.output
    assert "\n" not in str(done.exception).strip()
    assert not (tmp_path / "page").exists()


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Return content with one random damage: a flipped bit, a cut, zeros, a repetition, large numbers, or empty."""
    kind, at = rng.randrange(6), rng.randrange(max(1, len(content)))
    if kind == 0:
        return content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]
    if kind == 1:
        return content[:at]
    if kind == 2:
        return content[:at] + bytes(min(8, len(content) - at)) + content[at + 8 :]
    if kind == 3:
        return content[:at] + content
    if kind == 4:
        return content[: at // 8 * 8] + b"\xff" * 8 + content[at // 8 * 8 + 8 :]
    return b""


@pytest.mark.parametrize(("part", "file"), [*(("store", f) for f in STORE), *(("run", f) for f in RUN)])
def test_a_damaged_file_changes_no_figure_and_gives_no_traceback(whole, tmp_path, part, file):
    rng = random.Random(f"{part}/{file}")
    copy = shutil.copytree(whole, tmp_path / "copy")
    text = (copy / "run" / "run.toml").read_text().replace(str(whole), str(copy))
    (copy / "run" / "run.toml").write_text(text)
    before = {command: output_of(copy, command) for command in COMMANDS}
    assert None not in before.values()
    path = copy / part / file
    content = path.read_bytes()
    for _ in range(3):
        path.write_bytes(damaged(content, rng))
        if path.read_bytes() == content:
            continue
        for command, output in before.items():
            after = output_of(copy, command)
            if command != "evaluate" or not file.endswith(".tokens"):
                assert after is None or after == output, (command, path.read_bytes()[:200])
    path.write_bytes(content)
    assert output_of(copy, "statement") == before["statement"]  # no command changed another file


def test_a_store_without_any_one_of_its_files_is_not_opened(store, tmp_path):
    names = [*(store.digests or ()), "digests.json", "corpus.json"]
    assert len(names) > 8
    for number, name in enumerate(names):
        copy = tmp_path / str(number)
        uncharged_copy(store.path, copy)
        TokenStore.open(copy)
        (copy / name).unlink()
        with pytest.raises(CorpusError):
            TokenStore.open(copy)


def test_a_store_without_the_features_of_its_users_is_not_opened(tmp_path):
    tokens = [np.array([0, 3, 4, 1], dtype=np.uint16)] * 3
    features = {"train": np.zeros((3, 2), dtype=np.float32)}
    write_store(
        tmp_path / "s", train=tokens, held_out=tokens[:1], vocabulary=Vocabulary.of(["a", "b"]), features=features
    )
    assert TokenStore.open(tmp_path / "s").train.num_features == 2
    (tmp_path / "s" / "train" / "features.npy").unlink()
    with pytest.raises(CorpusError, match="missing"):
        TokenStore.open(tmp_path / "s")


@pytest.mark.parametrize("change", [1, -1])
def test_a_store_with_a_file_of_another_size_is_not_opened(tmp_path, change):
    """Also for files whose reader would not notice it: numpy ignores bytes after an array."""
    tokens = [np.array([0, 3, 4, 1], dtype=np.uint16)] * 3
    features = {"train": np.zeros((3, 2), dtype=np.float32)}
    made = write_store(
        tmp_path / "s", train=tokens, held_out=tokens[:1], vocabulary=Vocabulary.of(["a", "b"]), features=features
    )
    assert "train/features.npy" in (made.digests or {})
    for name in made.digests or {}:
        content = (tmp_path / "s" / name).read_bytes()
        (tmp_path / "s" / name).write_bytes(content + b"\0" if change > 0 else content[:-1])
        with pytest.raises(CorpusError):
            TokenStore.open(tmp_path / "s")
        (tmp_path / "s" / name).write_bytes(content)
    TokenStore.open(tmp_path / "s")
