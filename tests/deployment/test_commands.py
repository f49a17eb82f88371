"""The commands export, predict, keyboard and personalize: their output, and that a refusal is one message with status 2."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from unheard.cli.main import main
from unheard.deployment.export import Agreement

UNHEARD = str(Path(sys.executable).parent / "unheard")


@pytest.fixture
def unheard(capsys, monkeypatch):
    """Standard output, standard error and status of a command."""

    def run_words(*words: object) -> tuple[str, str, int]:
        monkeypatch.setattr(sys, "argv", ["unheard", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return " ".join(out.split()), " ".join(err.split()), int(left.value.code or 0)

    return run_words


def test_export_prints_sizes_and_agreement_and_predict_runs_on_it(unheard, run_folder, tmp_path):
    out, _, status = unheard("export", run_folder, "--to", "onnx", "--out", tmp_path / "out")
    assert status == 0
    assert "model.int8.onnx" in out
    assert "MB" in out
    assert "10,240 contexts" in out
    assert "100.00 %" in out
    assert "differential privacy for every user" in out
    right = json.loads(unheard("predict", run_folder, "w1 w2", "--json")[0])
    for place in (tmp_path / "out", tmp_path / "out" / "model.onnx"):
        found = json.loads(unheard("predict", place, "w1 w2", "--json")[0])
        assert [one["word"] for one in found] == [one["word"] for one in right]
        assert [one["probability"] for one in found] == pytest.approx([one["probability"] for one in right], abs=1e-5)
    assert json.loads(unheard("predict", tmp_path / "out" / "model.int8.onnx", "w1 w2", "--json")[0])


def test_personalize_prints_before_and_after_and_predict_opens_it(unheard, run_folder, tmp_path):
    (tmp_path / "mine.txt").write_text("w5 w40 w7 w33\nw11 w2 w44\n" * 80)
    words = [
        "personalize",
        run_folder,
        "--text",
        tmp_path / "mine.txt",
        "--out",
        tmp_path / "mine",
        "--learning-rate",
        1,
    ]
    out, _, status = unheard(*words)
    assert status == 0
    assert "shared model" in out
    assert "personal model" in out
    assert "AccuracyTop1" in out
    assert "with no privacy at all" in out
    assert json.loads(unheard("predict", tmp_path / "mine", "w5", "--json")[0])[0]["word"] == "w40"
    assert "is not an empty folder" in unheard(*words)[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "{run}", "--to", "coreml", "--out", "{tmp}/a"], "'coreml' is not one of"),
        (["export", "{tmp}", "--out", "{tmp}/a"], "not a run folder"),
        (["export", "{run}", "--out", "{run}"], "is not an empty folder"),
        (["personalize", "{run}", "--text", "{tmp}/none.txt", "--out", "{tmp}/a"], "Cannot read"),
        (["personalize", "{run}", "--text", "{tmp}/short.txt", "--out", "{tmp}/a"], "one message on each line"),
        (["personalize", "{run}", "--text", "{tmp}/binary", "--out", "{tmp}/a"], "as UTF-8 text"),
        (["personalize", "{run}", "--text", "{tmp}/short.txt", "--out", "{run}/mine"], "that may be shared"),
        (["personalize", "{tmp}", "--text", "{tmp}/short.txt", "--out", "{tmp}/a"], "not a run folder"),
        (["keyboard", "{tmp}", "--no-open"], "not a run folder"),
        (["keyboard", "{run}", "{tmp}/nowhere", "--no-open"], "not a run folder"),
        (["predict", "{tmp}/model.onnx", "how"], "not a run folder"),
    ],
)
def test_refusals_are_one_message_with_advice(unheard, run_folder, tmp_path, words, message):
    (tmp_path / "short.txt").write_text("hello")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    _, err, status = unheard(*(word.format(run=run_folder, tmp=tmp_path) for word in words))
    assert status == 2
    assert message in err
    assert not (tmp_path / "a").exists()


@pytest.mark.system
def test_the_keyboard_serves_two_runs_until_ctrl_c(run_folder):
    environment = {**os.environ, "COLUMNS": "200"}
    words = [UNHEARD, "keyboard", run_folder, run_folder, "--no-open"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    process = subprocess.Popen(words, **pipes)
    try:
        assert process.stdout is not None
        port = int(re.findall(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline())[0])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("POST", "/suggest", '{"text": "w1 "}', {"Content-Type": "application/json"})
        found = json.loads(connection.getresponse().read())["suggestions"]
        connection.close()
        assert found[0] == found[1]
        assert len(found[0]) == 3
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "Traceback" not in err
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("epsilon", [2.5, "infinity"])
def test_export_prints_the_claim_and_warns_of_a_model_without_a_guarantee(unheard, run_folder, monkeypatch, epsilon):
    agreement = {"model.onnx": Agreement(contexts=1, top1=1, top3=3)}
    statement = {"claim": "the claim in words", "claimed": {"epsilon": epsilon}}
    made = SimpleNamespace(parameters=1, sizes={"model.onnx": 1}, agreement=agreement, statement=statement)
    monkeypatch.setattr("unheard.deployment.export.export", lambda *_, **__: made)
    out, _, status = unheard("export", run_folder)
    assert status == 0
    assert "exported with it: the claim in words." in out
    assert ("Do not publish it without a review" in out) is (epsilon == "infinity")
