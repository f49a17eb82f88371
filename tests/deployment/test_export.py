"""Exports predict what PyTorch predicts, contain no data of users, need no torch, and are refused when damaged."""

import hashlib
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import unheard
from unheard.deployment.export import AT_ONCE, CONTEXTS, Agreement, ParityCheck, draw_texts, export, in_int8, step_graph
from unheard.deployment.model import FLOAT32, INT8, OnnxStepper, open_model, run_statement
from unheard.deployment.step import ReplayStepper, step_arrays, stepper_for
from unheard.errors import InvalidValue, LedgerError, ModelError
from unheard.models.recurrent import TiedGRU
from unheard.run_folder import RunFolder
from unheard.training.checkpoint import load_model

SMALL = dict(vocabulary_size=40, embedding_size=5, hidden_size=7)
EVERY_OPTION = [
    pytest.param(cls(**SMALL, tied=tied, unit_norm=unit_norm, user_features=features), id=f"{cls.__name__}-{i}-{j}-{k}")
    for cls in (unheard.TiedLSTM, TiedGRU)
    for i, tied in enumerate((True, False))
    for j, unit_norm in enumerate((True, False))
    for k, features in enumerate((0, 3))
]


def compared(model, params_P) -> dict[str, Agreement]:
    arrays = step_arrays(model, params_P)
    graphs = {name: OnnxStepper(step_graph(arrays, int8=name == INT8)) for name in (FLOAT32, INT8)}
    return ParityCheck(model, params_P, graphs).run()


@pytest.mark.parametrize("model", EVERY_OPTION)
def test_every_model_and_option_predicts_on_10_000_contexts_what_pytorch_predicts(model, wild):
    found = compared(model, wild(model))
    assert found[FLOAT32].contexts == CONTEXTS >= 10_000
    assert found[FLOAT32].is_equal, found[FLOAT32]
    assert found[INT8].numbers()["same_first_choice"] > 0.95


def test_every_text_of_a_comparison_is_drawn_anew(wild, monkeypatch):
    model, texts = unheard.TiedLSTM(**SMALL), []
    monkeypatch.setattr(ParityCheck, "add", lambda self, words_NT: texts.extend(map(tuple, words_NT.tolist())))
    compared(model, wild(model))
    assert len(set(texts)) > 0.9 * len(texts)
    assert len(texts) * (len(texts[0])) >= CONTEXTS


def test_the_papers_model_agrees_and_is_1_4_megabytes_in_int8(wild, monkeypatch):
    monkeypatch.setattr("unheard.deployment.export.TEXTS", AT_ONCE)  # 640 contexts: each has 10,000 scores
    model = unheard.TiedLSTM(vocabulary_size=10_000)
    params_P = wild(model, spread=0.05)
    found = compared(model, params_P)
    assert found[FLOAT32].contexts == 40 * AT_ONCE
    assert found[FLOAT32].is_equal
    assert found[INT8].numbers()["same_first_choice"] > 0.95
    arrays = step_arrays(model, params_P)
    assert model.layout.total == 1_346_144
    assert 1_346_144 < len(step_graph(arrays, int8=True)) < 1_420_000
    assert len(step_graph(arrays, int8=False)) == pytest.approx(4 * 1_346_144, rel=0.01)


def test_the_comparison_notices_one_wrong_weight(wild):
    model = unheard.TiedLSTM(**SMALL)
    params_P = wild(model)
    arrays = step_arrays(model, params_P)
    arrays.from_state_HG[0, 0] += 1.0
    found = ParityCheck(model, params_P, {FLOAT32: OnnxStepper(step_graph(arrays, int8=False))}).run()
    assert not found[FLOAT32].is_equal


def test_the_comparison_notices_numbers_that_are_not_finite(wild):
    model = unheard.TiedLSTM(**SMALL)
    params_P = wild(model)
    params_P[model.layout.slices["projection_bias"]] = torch.nan
    with np.errstate(invalid="ignore"):
        assert not compared(model, params_P)[FLOAT32].is_equal


def test_agreement_counts_first_choices_and_suggestions_in_common():
    right = np.array([[9.0, 8.0, 9.0, 5.0, 4.0, 3.0]])  # without BOS and UNK: 1, 3, 4
    found = np.array([[0.0, 2.0, 9.0, 5.0, 1.0, 3.0]])  # 3, 5, 1
    one = Agreement()
    one.add(right, right)
    one.add(right, found)
    assert one.numbers()["same_first_choice"] == 1 / 2
    assert one.numbers()["same_suggestions_of_three"] == 5 / 6
    assert one.furthest == 9.0


SCORES = np.array([[0.0, 8.0, 0.0, 5.0, 4.0, 3.0]])


@pytest.mark.parametrize(
    ("change", "is_equal"),
    [
        ([0, 0, 0, 0, 0, 0], True),
        ([0, 0, 0, 0, 0, 0.25], True),
        ([0, 0, 0, 0, 0, 0.375], False),  # one score is too far away, although every word keeps its place
        ([0, -0.375, 0, 0, 0, 0], False),
        ([0.375] * 6, False),
        ([0, -4, 0, 0, 0, 0], False),  # another word is the best
        ([0, 0, np.nan, 0, 0, 0], False),
    ],
)
def test_a_graph_agrees_if_its_first_words_and_all_of_its_scores_do(change, is_equal):
    one = Agreement()
    one.add(SCORES, SCORES, 0.25)
    one.add(SCORES, SCORES + change, 0.25)
    assert one.is_equal is is_equal


@pytest.mark.parametrize(("apart", "is_equal"), [(0.25, True), (0.375, False)])
def test_two_first_words_are_the_same_only_if_their_scores_are_as_near_as_is_allowed(apart, is_equal):
    """The graph has another best word, although no score differs by more than is allowed."""
    scores, one = SCORES - [0, 0, 0, apart - 3, 0, 0], Agreement()
    one.add(scores, scores - [0, 0.25, 0, -0.25, 0, 0], 0.25)
    assert one.too_far == 0
    assert one.is_equal is is_equal


def test_int8_rounds_each_weight_by_at_most_half_a_unit_of_its_column():
    matrix = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32) * [1, 10, 0.1, 0]
    whole, scale = in_int8(matrix.astype(np.float32))
    assert np.abs(whole * scale - matrix).max(axis=0) == pytest.approx(np.zeros(4), abs=float(scale.max()) * 0.51)
    assert (np.abs(whole * scale - matrix) <= 0.501 * scale + 1e-12).all()


def test_contexts_are_drawn_from_the_model_and_begin_with_bos(wild):
    model = unheard.TiedLSTM(**SMALL)
    steps = OnnxStepper(step_graph(step_arrays(model, wild(model)), int8=False))
    texts = draw_texts(steps, AT_ONCE, 10, np.random.default_rng(0))
    assert (texts[:, 0] == 0).all()
    assert len(np.unique(texts[:, 1:])) > 10


@pytest.mark.parametrize("model", EVERY_OPTION)
def test_one_step_at_a_time_is_the_whole_text_at_once(model, wild):
    """For the torch steppers of a model with a state, and of a model that reads the whole text in each step."""
    params_P, words = wild(model), [0, 5, 9, 2, 30, 5]
    features = torch.zeros(model.user_features) if model.user_features else None
    whole = model.logits(model.layout.split(params_P), torch.tensor([words]), features)[0]
    for steps in (stepper_for(model, params_P, context=80), ReplayStepper(model, params_P, 80)):
        state = None
        for i, word in enumerate(words):
            state, scores = steps.read(state, word)
            assert scores == pytest.approx(whole[i].numpy(), abs=1e-4)


@pytest.fixture(scope="module")
def exported(run_folder, tmp_path_factory):
    return export(run_folder, tmp_path_factory.mktemp("exports") / "small")


def test_an_export_holds_the_model_its_words_and_its_statement_and_nothing_else(exported, run_folder):
    names = {"export.json", "model.onnx", "model.int8.onnx", "vocabulary.txt", "tokens.json", "statement.json"}
    assert {path.name for path in exported.path.iterdir()} == names
    expected = json.loads(json.dumps(run_statement(RunFolder.open(run_folder))))
    assert json.loads((exported.path / "statement.json").read_text()) == exported.statement == expected
    assert exported.sizes == {name: (exported.path / name).stat().st_size for name in (FLOAT32, INT8)}
    record = json.loads((exported.path / "export.json").read_text())
    assert record["agreement_with_pytorch"] == {name: of.numbers() for name, of in exported.agreement.items()}
    assert record["agreement_with_pytorch"][FLOAT32] != record["agreement_with_pytorch"][INT8]
    assert record["files"].keys() == names - {"export.json"}
    written = b"".join(path.read_bytes() for path in exported.path.iterdir())
    assert str(run_folder.parent).encode() not in written
    measured = json.loads((run_folder / "metrics.jsonl").read_text().splitlines()[-1])
    for private in ("perplexity", "loss"):
        assert repr(measured[private]).encode() not in written


def test_an_export_and_its_run_suggest_the_same_words(exported, run_folder):
    released, device = unheard.Released.open(run_folder), open_model(exported.path)
    for text in ("", "w1 w2", "w40 nobody knows this", "w1 " * 50):
        right, found = released.predict(text, 5), device.predict(text, 5)
        assert [word for word, _ in right] == [word for word, _ in found]
        assert [p for _, p in right] == pytest.approx([p for _, p in found], abs=1e-5)
    assert open_model(exported.path / INT8).predict("w1 w2")[0][1] > 0


def test_predicting_with_an_export_never_imports_torch(exported):
    code = (
        "import sys; from unheard.cli.main import main\n"
        f"sys.argv = ['unheard', 'predict', {str(exported.path)!r}, 'w1 w2', '--json']\n"
        "try: main()\nexcept SystemExit as left: assert not left.code\n"
        "assert 'torch' not in sys.modules and 'onnx' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) == 3


@pytest.mark.parametrize("name", ["model.onnx", "vocabulary.txt", "statement.json", "export.json"])
def test_a_changed_or_missing_file_is_refused(exported, tmp_path, name):
    copy = tmp_path / "copy"
    shutil.copytree(exported.path, copy)
    (copy / name).write_bytes((copy / name).read_bytes()[:-9] + b"something")
    with pytest.raises(ModelError, match="Export the run again"):
        open_model(copy)
    (copy / name).unlink()
    if name != "export.json":
        with pytest.raises(ModelError, match="not a whole export"):
            open_model(copy)


@pytest.mark.parametrize("number", [0, 2, "1", None])
def test_an_export_of_another_format_is_refused(exported, tmp_path, number):
    copy = shutil.copytree(exported.path, tmp_path / "copy")
    record = json.loads((copy / "export.json").read_text())
    assert record["format"] == 1
    (copy / "export.json").write_text(json.dumps({**record, "format": number}))
    with pytest.raises(ModelError, match=f"exported in format {number}"):
        open_model(copy)


@pytest.mark.parametrize(
    "change",
    [
        {"claimed": {}},
        {"claimed": {"epsilon": "nan"}},
        {"claimed": {"epsilon": -1.0}},
        {"claimed": None},
        {"delta": 2.0},
        {"delta": None},
        {"claim": 3},
        {"warnings": [1]},
        {"warnings": None},
    ],
)
def test_an_export_whose_statement_cannot_be_read_is_refused(exported, tmp_path, change):
    """The digests are valid, as in a forged export."""
    copy = shutil.copytree(exported.path, tmp_path / "copy")
    content = json.dumps({**json.loads((copy / "statement.json").read_text()), **change}).encode()
    (copy / "statement.json").write_bytes(content)
    record = json.loads((copy / "export.json").read_text())
    record["files"]["statement.json"]["sha256"] = hashlib.sha256(content).hexdigest()
    (copy / "export.json").write_text(json.dumps(record))
    with pytest.raises(ModelError, match="statement cannot be read"):
        open_model(copy)


@pytest.mark.parametrize("change", ["a word more", "a word less"])
def test_an_export_with_other_words_than_its_model_has_rows_is_refused(exported, tmp_path, change):
    """The digests are valid, as in a forged export."""
    copy = shutil.copytree(exported.path, tmp_path / "copy")
    words = (copy / "vocabulary.txt").read_bytes().splitlines(keepends=True)
    content = b"".join([*words, b"more\n"] if change == "a word more" else words[:-1])
    (copy / "vocabulary.txt").write_bytes(content)
    record = json.loads((copy / "export.json").read_text())
    record["files"]["vocabulary.txt"]["sha256"] = hashlib.sha256(content).hexdigest()
    (copy / "export.json").write_text(json.dumps(record))
    with pytest.raises(ModelError, match=r"the model scores \d+ words, and vocabulary.txt has \d+ words"):
        open_model(copy)


def test_a_folder_that_holds_something_is_not_written_over(run_folder, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(InvalidValue, match="is not an empty folder"):
        export(run_folder, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_shortened_ledger_sends_no_model_out(run_folder, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run_folder, copy)
    lines = (copy / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (copy / "ledger.jsonl").write_bytes(b"".join(lines[:-2]))
    with pytest.raises(LedgerError):
        export(copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_module_of_ones_own_says_that_it_cannot_be_exported():
    model = unheard.ModuleModel.wrap(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)), vocabulary_size=9)
    with pytest.raises(ModelError, match="cannot be exported"):
        step_arrays(model, model.initial(0))
    assert isinstance(stepper_for(model, model.initial(0), 80), ReplayStepper)


def test_a_model_that_would_not_agree_is_never_written(run_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(Agreement, "is_equal", False)
    with pytest.raises(ModelError, match="Nothing was written"):
        export(run_folder, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_the_export_keeps_the_released_parameters(exported, run_folder, model):
    """The embedding in the float32 graph is that of the released model, normalised."""
    import onnx

    graph = onnx.load_model_from_string((exported.path / FLOAT32).read_bytes()).graph
    words = next(onnx.numpy_helper.to_array(t) for t in graph.initializer if t.name == "words")
    params = model.layout.split(load_model(run_folder / "model.safetensors", model))
    right = params["embedding"] / params["embedding"].norm(dim=1, keepdim=True)
    assert np.allclose(words.T, right.numpy(), atol=1e-6)


def test_the_figures_of_an_agreement_are_shares_of_what_was_compared():
    found = Agreement()
    scores_NV = np.tile(np.arange(10.0), (3, 1))
    other_NV = scores_NV.copy()
    other_NV[:, 9] = -1.0  # the best word of torch is not among the suggestions
    found.add(scores_NV[:1], other_NV[:1])
    found.add(scores_NV, scores_NV)
    expected = {"contexts": 4, "same_first_choice": 3 / 4, "same_suggestions_of_three": 11 / 12}
    assert found.numbers() == {**expected, "furthest_scores_apart": 10.0}
    assert not found.is_equal
