"""run_folder.py: a folder appears whole or not at all, and a file that cannot be read is not one that is missing."""

import hashlib
import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from unheard.errors import CheckpointCorrupt, RunFolderError, RunFolderExists
from unheard.run_folder import RunFolder, read_facts
from unheard.training.checkpoint import _load, _save


def test_a_run_that_finds_its_place_taken_leaves_nothing_beside_it(tmp_path):
    staged = RunFolder.begin(tmp_path / "run")
    (staged.path / "run.toml").write_text("")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file").write_text("of another run")
    with pytest.raises(RunFolderExists):
        staged.publish(tmp_path / "run")
    assert os.listdir(tmp_path) == ["run"]
    assert os.listdir(tmp_path / "run") == ["file"]


@pytest.mark.parametrize("facts", [[], "x", None, 3, True])
def test_facts_of_a_checkpoint_that_are_no_table_are_refused(tmp_path, facts):
    header = json.dumps({"__metadata__": {"unheard": json.dumps({"facts": facts})}}).encode()
    (tmp_path / "file").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointCorrupt):
        read_facts(tmp_path / "file")


def test_only_a_missing_record_of_nodes_has_no_digest(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.nodes_digest() is None
    folder.federated.write_bytes(b"{}")
    assert folder.nodes_digest() == hashlib.sha256(b"{}").hexdigest()
    folder.federated.unlink()
    folder.federated.symlink_to("nowhere")
    with pytest.raises(RunFolderError, match="cannot be read"):
        folder.nodes_digest()
    folder.federated.unlink()
    folder.federated.mkdir()
    with pytest.raises(RunFolderError, match="cannot be read"):
        folder.nodes_digest()


@pytest.mark.parametrize(
    "metrics", [[], {}, "x", {"bytes": [], "sha256": ""}, {"bytes": 1e9, "sha256": ""}, {"bytes": 3}]
)
def test_a_damaged_digest_of_the_evaluations_is_not_one_of_an_older_version(tmp_path, metrics):
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    _save(
        folder.checkpoints / "round-00000001.safetensors", {"params": torch.zeros(1)}, {"round": 1, "metrics": metrics}
    )
    with pytest.raises(CheckpointCorrupt, match="cannot be read"):
        folder.check_metrics()


def test_no_part_of_a_checkpoint_or_a_model_can_be_exchanged_within_it(tmp_path):
    """The digest of a file covers every name, every number and every fact of it."""
    path = tmp_path / "file"
    tensors, facts = {"a": torch.arange(4.0), "b": -torch.arange(4.0)}, {"round": 3, "ledger_head": "x", "people": None}
    _save(path, tensors, facts)
    metadata = json.loads(safe_open(path, "pt").metadata()["unheard"])
    assert _load(path, "")[1] == facts
    others = [({"a": tensors["b"], "b": tensors["a"]}, facts), ({"a": tensors["a"], "c": tensors["b"]}, facts)]
    others += [({name: tensors[name]}, facts) for name in tensors]
    others += [({**tensors, name: tensors[name] + torch.eye(4)[i]}, facts) for name in tensors for i in range(4)]
    others += [(tensors, {**facts, key: "other"}) for key in (*facts, "another")]
    others += [(tensors, {k: v for k, v in facts.items() if k != key}) for key in facts]
    for changed, said in others:
        save_file(changed, path, {"unheard": json.dumps({**metadata, "facts": said})})
        with pytest.raises(CheckpointCorrupt, match="does not read back"):
            _load(path, "")


def test_of_a_round_that_was_repeated_the_latest_evaluation_counts(tmp_path):
    folder = RunFolder(tmp_path)
    rounds = [2, 4, 6, 4, 6, 6, 8]
    rows = [{"round": at, "epsilon": 0.1 * line, "accuracy_top1": 0.01 * line} for line, at in enumerate(rounds)]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert folder.read_metrics(check=False) == [rows[0], rows[3], rows[5], rows[6]]
