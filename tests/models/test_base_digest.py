"""The digest of a base model covers every byte of the files that define it. (Without transformers.)"""

import json
import shutil
from pathlib import Path

import pytest

from unheard.models.hugging_face import base_digest

MIB = 1 << 20
SIZE = 3 * MIB + 17


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """Write a folder in the form of a base model, with two files of weights of more than 3 MiB each."""
    folder = tmp_path_factory.mktemp("models") / "base"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    (folder / "tokenizer.json").write_text("{}" + " " * 100)
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for number, name in enumerate(names):
        (folder / name).write_bytes(bytes([number]) * SIZE)
    weights = {"a": names[0], "b": names[1]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}) + " " * 100)
    return folder


@pytest.fixture
def copy(base, tmp_path) -> Path:
    return shutil.copytree(base, tmp_path / "copy")


def test_the_digest_is_that_of_the_content_and_not_of_the_place(base, copy):
    digest = base_digest(base)
    assert base_digest(copy) == digest
    (copy / "generation_config.json").write_text("{}")  # has no effect on the model
    assert base_digest(copy) == digest


def test_one_bit_anywhere_in_a_file_of_weights_changes_the_digest(base, copy):
    """At the beginning, before and after each MiB, in the middle, and in the last byte."""
    places = {0, 1, SIZE // 2, SIZE - 2, SIZE - 1, *(n * MIB + d for n in (1, 2, 3) for d in (-1, 0, 1))}
    seen = {base_digest(base)}
    for name in sorted(path.name for path in base.glob("*.safetensors")):
        for place in sorted(places):
            with open(copy / name, "r+b") as file:
                file.seek(place)
                before = file.read(1)
                file.seek(place)
                file.write(bytes([before[0] ^ 1]))
            seen.add(base_digest(copy))
            with open(copy / name, "r+b") as file:
                file.seek(place)
                file.write(before)
    assert len(seen) == 1 + 2 * len(places)
    assert base_digest(copy) == base_digest(base)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors.index.json"])
def test_a_byte_at_either_end_of_each_small_file_changes_the_digest(base, copy, name):
    content, seen = (base / name).read_bytes(), {base_digest(base)}
    for changed in (content + b" ", b" " + content, content[:1] + b" " + content[1:], content + b"\n"):
        (copy / name).write_bytes(changed)
        seen.add(base_digest(copy))
    assert len(seen) == 5


def test_the_names_and_the_sizes_of_the_files_are_under_the_digest(base, copy):
    """The same bytes in another order of files, or divided at another place, are another model."""
    one, two = sorted(copy.glob("*.safetensors"))
    seen, contents = {base_digest(base)}, (one.read_bytes(), two.read_bytes())
    for first, second in (
        contents[::-1],
        (contents[0] + contents[1][:1], contents[1][1:]),
        (contents[0][:-1], contents[0][-1:] + contents[1]),
        (contents[0] + b"\0", contents[1]),
        (contents[0], contents[1][:-1]),
    ):
        one.write_bytes(first)
        two.write_bytes(second)
        seen.add(base_digest(copy))
    one.write_bytes(contents[0])
    two.write_bytes(contents[1])
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    one.rename(copy / "model-00001-of-00003.safetensors")
    seen.add(base_digest(copy))
    assert len(seen) == 7
