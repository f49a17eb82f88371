"""Ctrl-C, SIGTERM and SIGHUP at several moments: one line says what was saved, exit status 130, no incomplete files."""

import os
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

import unheard
from unheard import storage
from unheard.cli import display, processes

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def trained(store, model, plan, tmp_path_factory) -> Path:
    run = unheard.Run(
        corpus=store.path,
        model=model,
        plan=plan,
        training=unheard.Training(rounds=2),
        evaluation=unheard.Evaluation(every=2, max_tokens=200, unroll=20),
    )
    folder = tmp_path_factory.mktemp("runs") / "small"
    for _ in unheard.train(run, folder):
        pass
    return folder


def interrupted(words: list[str], cwd: Path, number: int, seconds: float) -> tuple[int, str]:
    """Run a command, send it a signal after some seconds, and return its exit status and its standard error."""
    process = subprocess.Popen(
        [sys.executable, "-m", "unheard", *words],
        cwd=cwd,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    time.sleep(seconds)
    os.killpg(process.pid, number)  # as a terminal does: every process of the group receives it
    _, said = process.communicate(timeout=180)  # on a busy machine the launcher waits long for its ranks
    return process.returncode, said


@pytest.mark.parametrize(
    ("words", "number", "seconds"),
    [
        ("export run --out result", signal.SIGINT, 0.5),
        ("export run --out result", signal.SIGTERM, 2.0),
        ("report run --out result", signal.SIGHUP, 1.0),
        ("report run --out result", signal.SIGINT, 2.5),
        ("evaluate run", signal.SIGINT, 0.8),
        ("evaluate run --full", signal.SIGHUP, 1.6),
        ("evaluate run --processes 2", signal.SIGTERM, 2.5),
        ("evaluate run --processes 2", signal.SIGINT, 4.0),
        ("resume run --rounds 100000 --processes 2", signal.SIGHUP, 8.0),
        ("resume run --rounds 100000", signal.SIGHUP, 1.2),
    ],
)
def test_an_interrupted_command_says_what_is_kept_and_leaves_nothing_half_written(
    trained, tmp_path, words, number, seconds
):
    shutil.copytree(trained, tmp_path / "run")
    status, said = interrupted(words.split(), tmp_path, number, seconds)
    if status == 0 or (status == -number and not said):  # the signal came after the end, or before Python began
        return
    assert status == 130, said
    assert "Traceback" not in said
    assert said.count("Stopped") == 1
    assert "same command" in said or "is complete" in said or "unheard resume" in said
    assert {path.name for path in tmp_path.iterdir()} <= {"run", "result"}  # no folder under a temporary name
    if "result is complete" in said:
        assert (tmp_path / "result" / "statement.json").exists()
    elif "export" in words:
        assert not (tmp_path / "result").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_ranks_have_begun_is_one_line(trained, tmp_path, number):
    """The ranks are still starting Python, which may take many seconds on a busy machine."""
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\nif 'WORLD_SIZE' in os.environ:\n    os.write(1, b'ready\\n')\n    time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "unheard", "evaluate", "run", "--processes", "2"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(unheard.__file__).parents[1])])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.startswith("unheard: Stopped. The run folder is as it was")
    assert said.count("\n") == 1


def test_a_signal_before_the_first_step_is_a_line_too(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import sys, time\nsys.argv = ['unheard', 'plan']\nimport unheard.cli\nprint('ready', flush=True)\ntime.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, tmp_path / "slow.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGHUP)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said.decode()) == (130, f"unheard: {processes.NOTHING_WRITTEN}\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_the_first_import_is_a_line_too(tmp_path, number):
    (tmp_path / "lazy_loader.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)")
    process = subprocess.Popen(
        [sys.executable, "-m", "unheard", "plan"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(unheard.__file__).parents[1])])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said.decode()) == (130, f"unheard: {processes.NOTHING_WRITTEN}\n")


def test_an_error_that_follows_a_signal_is_not_printed_beside_the_line(tmp_path):
    """The signal also ends the workers of the command, which the command may report as an error before it ends."""
    (tmp_path / "unheard").write_text(
        "import os, signal, sys, time\n"
        "from unheard.cli import display, main\n"
        "from unheard.errors import InvalidValue\n"
        "display.set_stop_message(lambda: time.sleep(0.3) or 'Stopped. All is kept.')\n"
        "def fails():\n    os.kill(os.getpid(), signal.SIGTERM)\n    raise InvalidValue('a worker ended')\n"
        "main.run_app(fails)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(unheard.__file__).parents[1])}
    done = subprocess.run([sys.executable, tmp_path / "unheard"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "unheard: Stopped. All is kept.\n")


def test_a_signal_while_the_storage_is_imported_is_a_line_too(monkeypatch):
    monkeypatch.setitem(sys.modules, "unheard.storage", types.ModuleType("unheard.storage"))
    processes.delete_staged_folders()


def test_a_command_that_fails_deletes_its_folders_under_temporary_names(tmp_path):
    (tmp_path / "unheard").write_text(
        "from pathlib import Path\n"
        "from unheard import storage\n"
        "from unheard.cli import main\n"
        "def fails():\n"
        "    (storage.new_folder_beside(Path('out/result')) / 'half').write_text('x')\n"
        "    raise OSError(28, 'No space left on device', 'half')\n"
        "main.run_app(fails)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(unheard.__file__).parents[1])}
    command = [sys.executable, tmp_path / "unheard"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr.split(":")[:2]) == (2, ["unheard", " No space left on device"])
    assert list((tmp_path / "out").iterdir()) == []


def test_folders_under_temporary_names_are_deleted(tmp_path):
    folder = storage.new_folder_beside(tmp_path / "result")
    (folder / "half").write_text("x")
    storage.delete_staged()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        storage.rename_folder(folder, tmp_path / "result")
    storage.STAGED.discard(folder)
    with storage.staged_folder(tmp_path / "whole"):
        staged = {path for path in storage.STAGED if path.parent == tmp_path}
        assert len(staged) == 1
    assert not staged & storage.STAGED
    storage.delete_staged()
    assert (tmp_path / "whole").is_dir()


def test_the_message_of_a_stop_describes_the_files_on_disk(tmp_path):
    out = tmp_path / "store"
    assert display.store_stop_message(out) == processes.NOTHING_WRITTEN
    out.with_name("store.partial").mkdir()
    assert "same command continues" in display.store_stop_message(out)
    assert "before" in display.output_stop_message(out)
    out.mkdir()
    (out / "corpus.json").write_text("{}")
    assert display.store_stop_message(out).endswith("is complete.")
    assert display.output_stop_message(out).endswith("is complete.")
