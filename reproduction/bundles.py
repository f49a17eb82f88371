"""Results of runs as small files, and bundles that carry results and the state of runs to another machine.

The input is the work folder of `private_run.py`. `collect` copies the result files, `bundle` packs them with what
continues each run, `restore` puts a bundle back into a work folder, and `unpack` shows what is in it. No text of users is
copied.

    bundle(work, Path("out/a.tar.gz"))                             at any time, also while runs are training
    restore([Path("out/a.tar.gz")], other_work)
"""

import os
import shutil
import tarfile
import tempfile
import tomllib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from reproduction.bootstrap import POSTS, USERS

HERE = Path(__file__).resolve().parent
RECORDS = ("ledger.jsonl", "metrics.jsonl", "sittings.jsonl", "statement.json", "facts.json")
SMALL_FILES = ("run.toml", *RECORDS, USERS, POSTS)
"""Files of a run folder that `collect` copies. None of them holds text."""
STARTS = "trade-S20-*"
"""Runs whose models other runs begin from."""
KEPT_WHOLE = ("private*", "z1-*", "baseline-C5000-*", STARTS)
"""Runs whose model and ledgers stay in a bundle when they are complete."""
PART, LIMIT = 15 * 2**20, 60 * 2**20
"""Bytes in one file of a bundle, and in all of its checkpoints and models together."""


def collect(work: Path, out: Path) -> None:
    """Copy the small result files of every run to `out`. No text is copied."""
    out.mkdir(parents=True, exist_ok=True)
    for folder in sorted(path for path in (work / "runs").iterdir() if not path.name.startswith(".")):
        target_folder = out / folder.name
        target_folder.mkdir(parents=True, exist_ok=True)
        for name in SMALL_FILES:
            if (folder / name).exists():
                shutil.copyfile(folder / name, target_folder / name)
        if (target_folder / "run.toml").exists():  # without the paths of the machine
            text = (target_folder / "run.toml").read_text(encoding="utf-8")
            (target_folder / "run.toml").write_text(text.replace(f"{work.resolve()}/", ""), encoding="utf-8")
    if (work / "chosen_S.json").exists():
        shutil.copyfile(work / "chosen_S.json", out / "chosen_S.json")


def bundle(work: Path, target: Path, part: int = PART, limit: int = LIMIT) -> list[Path]:
    """Pack the results of every run into one tar file, cut into parts if it is large.

    A run in progress comes with its ledgers and its newest checkpoint, so that `restore` can continue it elsewhere; a
    complete run with its ledgers and its final model if `KEPT_WHOLE` names it, otherwise with its small files. If the
    limit is too small for all, final models are left out first, then runs in progress with the highest seeds; models
    that other runs begin from are kept before all others. Runs may be training meanwhile.

    Args:
        work: Folder of stores, ledgers and run folders.
        target: The file to write. Parts have the endings `.00`, `.01`, …
        part: Largest number of bytes of one file.
        limit: Largest number of bytes of checkpoints and models together.

    Returns:
        The files. They replace the parts of an earlier bundle of this name, which stays until then.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as scratch:
        copied, packed = Path(scratch) / "runs", Path(scratch) / "packed"
        collect(work, copied)
        (copied / "chosen_S.json").unlink(missing_ok=True)  # a result of blogs_64
        folders = [path for path in copied.iterdir() if path.is_dir()]

        def order(path: Path) -> tuple[bool, bool, list[str]]:
            is_complete = (path / "facts.json").exists()
            return not (is_complete and fnmatchcase(path.name, STARTS)), is_complete, path.name.split("-")[::-1]

        for folder in sorted(folders, key=order):
            limit -= _add_state(work, folder, limit)
        with tarfile.open(packed, "w:gz", compresslevel=1) as archive:
            archive.add(copied, arcname=".")
        number = -(-packed.stat().st_size // part)
        names = [target.name] if number == 1 else [f"{target.name}.{i:02d}" for i in range(number)]
        with open(packed, "rb") as file:
            for name in names:
                target.with_name(f".{name}.new").write_bytes(file.read(part))
    for old in parts_of(target):
        if old.name not in names:
            old.unlink()
    for name in names:
        os.replace(target.with_name(f".{name}.new"), target.with_name(name))
    return parts_of(target)


def _add_state(work: Path, folder: Path, limit: int) -> int:
    """Add to a folder of a bundle what continues the run, or its ledgers and model.

    Removes the ledger of other complete runs. Returns the bytes of the checkpoint or model.
    """
    source, is_complete = work / "runs" / folder.name, (folder / "facts.json").exists()
    if is_complete and not any(fnmatchcase(folder.name, pattern) for pattern in KEPT_WHOLE):
        (folder / "ledger.jsonl").unlink(missing_ok=True)
        return 0
    target = folder if is_complete else folder / "checkpoints"
    file = _copy_state(source, target, limit, is_complete=is_complete)
    if file is None:
        print(f"{folder.name}: {'its model' if is_complete else 'the run in progress'} is left out", flush=True)
        if not is_complete:
            shutil.rmtree(folder)
        return 0
    # In this order a run that trains meanwhile can be restored: its own ledger holds what the population's ledger holds,
    # and both hold what the checkpoint remembers.
    shutil.copyfile(work / "ledgers" / f"{folder.name}.jsonl", folder / "population_ledger.jsonl")
    shutil.copyfile(source / "ledger.jsonl", folder / "ledger.jsonl")
    shutil.copyfile(source / "tokens.json", folder / "tokens.json")
    return file.stat().st_size


def _copy_state(source: Path, target: Path, limit: int, *, is_complete: bool) -> Path | None:
    """Copy the final model or the newest checkpoint of a run; None if there is none, or if it is too large."""
    for _ in range(5):
        kept = [source / "model.safetensors"] if is_complete else sorted((source / "checkpoints").glob("round-*"))[-1:]
        files = [file for file in kept if file.exists()]
        if not files or files[0].stat().st_size > limit:
            return None
        target.mkdir(exist_ok=True)
        try:
            return Path(shutil.copyfile(files[0], target / files[0].name))
        except FileNotFoundError:  # training has replaced it by a newer one
            continue
    return None


def parts_of(target: Path) -> list[Path]:
    """The files of a bundle in order: the file itself, or its parts."""
    if target.exists():
        return [target]
    return sorted(target.parent.glob(f"{target.name}.[0-9][0-9]"))


def unpack(files: Sequence[Path], out: Path) -> list[Path]:
    """Unpack a bundle, given as its file or its parts, and return the folders of its runs."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile() as joined_parts:
        for file in sorted(files):
            joined_parts.write(file.read_bytes())
        joined_parts.seek(0)
        with tarfile.open(fileobj=joined_parts, mode="r:gz") as archive:
            names = {Path(name).parts[0] for name in archive.getnames() if len(Path(name).parts) > 1}
            archive.extractall(out, filter="data")
    return [out / name for name in sorted(names)]


def restore(kept: Sequence[Path], work: Path) -> None:
    """Copy runs back into the work folder, so that `run` continues those in progress and passes over the others.

    Args:
        kept: Result folders with `checkpoints/`, or the files of a bundle.
        work: Folder with the stores.
    """
    folders = [path for path in kept if path.is_dir()]
    with tempfile.TemporaryDirectory() as scratch:
        if files := [path for path in kept if not path.is_dir()]:
            folders += unpack(files, Path(scratch))
        for folder in folders:
            _restore_run(folder, work)
    take_chosen_norm(work)


def take_chosen_norm(work: Path) -> None:
    """Copy the S that was chosen once, on blogs, into the work folder, unless it has one."""
    if not (work / "chosen_S.json").exists():
        shutil.copyfile(HERE / "results" / "blogs_64" / "chosen_S.json", work / "chosen_S.json")


def _restore_run(kept: Path, work: Path) -> None:
    """Copy one run back, with the paths of this machine."""
    folder = work / "runs" / kept.name
    shutil.copytree(kept, folder)
    text = (folder / "run.toml").read_text(encoding="utf-8")
    corpus = tomllib.loads(text)["corpus"]["path"]
    for name in (corpus, "ledgers/", "runs/"):  # `collect` removed the path of the work folder
        text = text.replace(f'"{name}', f'"{work.resolve()}/{name}')
    (folder / "run.toml").write_text(text, encoding="utf-8")
    shutil.copyfile(work / corpus / "vocabulary.txt", folder / "vocabulary.txt")
    (work / "ledgers").mkdir(parents=True, exist_ok=True)
    if (folder / "population_ledger.jsonl").exists():
        shutil.move(folder / "population_ledger.jsonl", work / "ledgers" / f"{kept.name}.jsonl")
