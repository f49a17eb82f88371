"""A digest follows every byte of its content: at the beginning, in the middle and at the end of 3 MB."""

import hashlib

import numpy as np
import pytest
import torch

from unheard.corpus.store import _sha256, tokens_digest
from unheard.deployment.model import digest
from unheard.models import base, hugging_face
from unheard.models.module import _digest_of
from unheard.parameters import Layout
from unheard.run_folder import RunFolder
from unheard.training.checkpoint import _digest, parameters_digest
from unheard.training.noise_state import _parse_history, _write_history

SIZE = 3_000_000
PLACES = (0, 1, 4096, 65_537, 2**20, 2**20 + 1, SIZE // 2, SIZE - 1)
"""Positions around the sizes of blocks in which files are commonly read."""
CONTENT = bytes(np.random.default_rng(5).integers(0, 256, SIZE, dtype=np.uint8))


def of_bytes(tmp_path, content: bytes) -> str:
    return digest(content)


def of_a_file_of_a_store(tmp_path, content: bytes) -> str:
    (tmp_path / "tokens.bin").write_bytes(content)
    return _sha256(tmp_path / "tokens.bin")


def of_a_file_of_a_base(tmp_path, content: bytes) -> str:
    (tmp_path / "weights").write_bytes(content)
    return base._sha256(tmp_path / "weights")


def of_a_base(tmp_path, content: bytes) -> str:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    return hugging_face.base_digest(tmp_path)


def of_the_model_of_a_run(tmp_path, content: bytes) -> str:
    folder = RunFolder(tmp_path)
    folder.model.write_bytes(content)
    return folder.model_digest()


def of_the_evaluations_of_a_run(tmp_path, content: bytes) -> str:
    folder = RunFolder(tmp_path)
    folder.metrics.write_bytes(content)
    return folder.metrics_digest()["sha256"]


def of_the_nodes_of_a_run(tmp_path, content: bytes) -> str | None:
    folder = RunFolder(tmp_path)
    folder.federated.write_bytes(content)
    return folder.nodes_digest()


def of_the_record_of_a_tokenizer(tmp_path, content: bytes) -> str:
    return tokens_digest({"kind": "words", "text": content.hex()})


FILES = [value for name, value in list(globals().items()) if name.startswith("of_")]


@pytest.mark.parametrize("digest_of", FILES, ids=lambda function: function.__name__)
def test_a_digest_follows_every_byte_of_a_file(tmp_path, digest_of):
    digests = {digest_of(tmp_path, CONTENT)}
    for place in PLACES:
        changed = bytearray(CONTENT)
        changed[place] ^= 1
        digests.add(digest_of(tmp_path, bytes(changed)))
    digests.add(digest_of(tmp_path, CONTENT + b"\0"))
    digests.add(digest_of(tmp_path, CONTENT[:-1]))
    assert len(digests) == len(PLACES) + 3
    assert all(len(one) == 64 for one in digests)


def tensors(changed: int | None = None, name: str = "a") -> dict[str, torch.Tensor]:
    found = {n: torch.arange(300_000, dtype=torch.float32).reshape(300, 1000) for n in ("a", "b", "c")}
    if changed is not None:
        found[name].view(-1)[changed] += 0.5
    return found


TENSOR_DIGESTS = {
    "checkpoint": lambda found: _digest(found, {"round": 3}),
    "module": lambda found: _digest_of(torch.nn.ParameterDict(found)),
    "parameters": lambda found: parameters_digest(Layout.of(found).join(found)),
}


@pytest.mark.parametrize("kind", TENSOR_DIGESTS)
def test_a_digest_of_weights_follows_every_number_of_every_tensor(kind):
    digest_of = TENSOR_DIGESTS[kind]
    digests = {digest_of(tensors())}
    for name in ("a", "b", "c"):
        digests |= {digest_of(tensors(place, name)) for place in (0, 1023, 1024, 2**18, 299_999)}
    assert len(digests) == 1 + 3 * 5
    assert digest_of(tensors()) in digests


def test_a_digest_of_a_checkpoint_follows_its_facts_and_the_names_of_its_tensors():
    found = tensors()
    exchanged = {"a": found["a"] + 1, "b": found["a"], "c": found["c"]}
    renamed = {"a": found["a"], "b": found["b"], "d": found["c"]}
    digests = {
        _digest(found, {"round": 3}),
        _digest(found, {"round": 4}),
        _digest(found, {"round": 3, "state": {"norm": 1.0}}),
        _digest(found, {"round": 3, "state": {"norm": 2.0}}),
        _digest(exchanged, {"round": 3}),
        _digest(renamed, {"round": 3}),
    }
    assert len(digests) == 6
    assert _digest(dict(reversed(found.items())), {"round": 3}) in digests


def test_a_history_of_noise_is_refused_if_any_byte_of_it_was_changed(tmp_path):
    file = tmp_path / "history"
    facts = {"attempt": 7, "shape": [2, 50_000]}
    rows = torch.randn(2, 50_000, dtype=torch.float64)
    _write_history(file, facts, rows)
    content = file.read_bytes()
    read, numbers = _parse_history(content)
    assert read == facts
    assert numbers is not None
    assert np.array_equal(numbers, rows.numpy())
    for place in (12, 4096, len(content) // 2, len(content) - 33, len(content) - 32, len(content) - 1):
        changed = bytearray(content)
        changed[place] ^= 1
        assert _parse_history(bytes(changed)) == ({}, None), place
    assert content[-32:] == hashlib.sha256(content[:-32]).digest()
