"""Copy the results of runs, and pack results and the state of runs into bundles that another machine can continue.

The input is the work folder of `private_run.py`. `collect` copies the result files. `bundle` packs them together with
the files that are needed to continue each run. `unpack` extracts a bundle, and `restore` copies its runs into a work
folder. No text of users is copied.

    bundle(work, Path("out/a.tar.gz"))                             # at any time, also while runs are training
    restore([Path("out/a.tar.gz")], other_work)
"""

import gzip
import itertools
import os
import re
import shutil
import tarfile
import tempfile
import tomllib
import zlib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from reproduction.bootstrap import POSTS, USERS

HERE = Path(__file__).resolve().parent
RECORDS = ("ledger.jsonl", "metrics.jsonl", "sittings.jsonl", "statement.json", "facts.json")
SMALL_FILES = ("run.toml", *RECORDS, USERS, POSTS)
"""Files of a run folder that `collect` copies. None of them holds text."""
STARTS = "trade-S20-*"
"""Pattern of the runs whose final models are the first models of other runs."""
KEPT_WHOLE = ("private*", "public*", "epsilon*", "z1-*", "baseline-C5000-*", STARTS)
"""Patterns of the runs whose model and ledgers are bundled even when the run is complete."""
IN_STATE = "state.txt"
"""File in the results of a run whose state is in the second file of the bundle. Without that file it is not restored."""
PART, LIMIT = 15 * 2**20, 60 * 2**20
"""Default largest size in bytes of one file of a bundle, and of all checkpoints and models in a bundle."""


def collect(work: Path, out: Path) -> None:
    """Copy the small result files of every run to a subfolder of `out` named like the run. No text is copied."""
    out.mkdir(parents=True, exist_ok=True)
    for folder in sorted(path for path in (work / "runs").iterdir() if not path.name.startswith(".")):
        target_folder = out / folder.name
        target_folder.mkdir(parents=True, exist_ok=True)
        for name in SMALL_FILES:
            if (folder / name).exists():
                shutil.copyfile(folder / name, target_folder / name)
        if (target_folder / "run.toml").exists():  # published results must not show the paths of this machine
            text = (target_folder / "run.toml").read_text(encoding="utf-8")
            (target_folder / "run.toml").write_text(text.replace(f"{work.resolve()}/", ""), encoding="utf-8")
    if (work / "chosen_S.json").exists():
        shutil.copyfile(work / "chosen_S.json", out / "chosen_S.json")


def bundle(work: Path, target: Path, part: int = PART, limit: int = LIMIT) -> list[Path]:
    """Pack the results of every run into one tar file, and the state of runs into a second one. Runs may train meanwhile.

    The first file, `target`, holds the small result files of every run. The second, with the ending `.state`, holds what
    `restore` needs to continue a run elsewhere: for a run in progress the ledgers and the newest checkpoint, and for a
    complete run that matches `KEPT_WHOLE` the ledgers and the final model. The results are a file of their own so that
    they are not lost if a part of the state is. If the checkpoints and models exceed the limit, models of complete runs
    are left out first, then checkpoints of the runs with the highest seeds. Models that other runs start from have the
    highest priority.

    Args:
        work: Folder of stores, ledgers and run folders.
        target: The file to write. A file that is too large is cut into parts with the endings `.00`, `.01`, …
        part: Largest number of bytes of one file.
        limit: Largest number of bytes of checkpoints and models together.

    Returns:
        The files, results first. They replace those of an earlier bundle of this name only when all of them are written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as scratch:
        copied, states = Path(scratch) / "runs", Path(scratch) / "states"
        states.mkdir()
        collect(work, copied)
        (copied / "chosen_S.json").unlink(missing_ok=True)  # belongs to blogs_64
        folders = [path for path in copied.iterdir() if path.is_dir()]

        def order(path: Path) -> tuple[bool, bool, list[str]]:
            """Return the sort key that decides which state is kept when the limit is too small for all."""
            is_complete = (path / "facts.json").exists()
            return not (is_complete and fnmatchcase(path.name, STARTS)), is_complete, path.name.split("-")[::-1]

        for folder in sorted(folders, key=order):
            (folder / "ledger.jsonl").unlink(missing_ok=True)
            is_complete = (folder / "facts.json").exists()
            if not is_complete or any(fnmatchcase(folder.name, pattern) for pattern in KEPT_WHOLE):
                size = _add_state(work, states / folder.name, limit, is_complete=is_complete)
                if size:
                    (folder / IN_STATE).write_text(f"The state of this run is in {target.name}.state.\n")
                limit -= size
        written = _write_parts(copied, target, part)
        if any(states.iterdir()):
            written += _write_parts(states, target.with_name(f"{target.name}.state"), part)
    for old in _files_of(target):
        if old not in written:
            old.unlink()
    for file in written:
        os.replace(_unfinished(file), file)
    return written


def _write_parts(folder: Path, target: Path, part: int) -> list[Path]:
    """Pack a folder, and return the files of the archive. Each is written under the name `_unfinished` first."""
    with tempfile.TemporaryFile(dir=folder.parent) as packed:
        with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as archive:
            archive.add(folder, arcname=".")
        number = -(-packed.tell() // part)
        packed.seek(0)
        files = [target] if number == 1 else [target.with_name(f"{target.name}.{i:02d}") for i in range(number)]
        for file in files:
            _unfinished(file).write_bytes(packed.read(part))
    return files


def _unfinished(file: Path) -> Path:
    """Return the name of a file of a bundle while the bundle is written."""
    return file.with_name(f".{file.name}.new")


def _files_of(target: Path) -> list[Path]:
    """Return the existing files of a bundle."""
    pattern = re.compile(re.escape(target.name) + r"(\.state)?(\.\d\d)?")
    return [path for path in target.parent.iterdir() if pattern.fullmatch(path.name)]


def _add_state(work: Path, folder: Path, limit: int, *, is_complete: bool) -> int:
    """Copy the state of one run: its newest checkpoint, or its model if it is complete, both ledgers and tokens.json.

    If the checkpoint or model is missing or larger than `limit`, nothing is copied, and a line says so.

    Args:
        work: Folder of stores, ledgers and run folders.
        folder: The folder to write, named like the run.
        limit: Number of bytes that are left for checkpoints and models.
        is_complete: Whether the run is complete.

    Returns:
        The size of the checkpoint or model in bytes; 0 if nothing is copied.
    """
    source = work / "runs" / folder.name
    # Past noise is secret and never copied, so a run with correlated noise in progress cannot continue elsewhere.
    is_secret = (source / "noise").exists()
    target = folder if is_complete else folder / "checkpoints"
    file = None if is_secret else _copy_state(source, target, limit, is_complete=is_complete)
    if file is None:
        print(
            f"{folder.name}: {'its model' if is_complete else 'the state of the run in progress'} is left out",
            flush=True,
        )
        return 0
    # The run may be training. A ledger that is copied later has at least the entries of a file that is copied earlier.
    # In this order the run's ledger covers the population's ledger, and both cover the checkpoint, as `restore` needs.
    shutil.copyfile(work / "ledgers" / f"{folder.name}.jsonl", folder / "population_ledger.jsonl")
    shutil.copyfile(source / "ledger.jsonl", folder / "ledger.jsonl")
    shutil.copyfile(source / "tokens.json", folder / "tokens.json")
    return file.stat().st_size


def _copy_state(source: Path, target: Path, limit: int, *, is_complete: bool) -> Path | None:
    """Copy the final model or the newest checkpoint of a run to `target`, and return the path of the copy.

    Return None if there is no such file, or if it has more than `limit` bytes.
    """
    for _ in range(5):
        kept = [source / "model.safetensors"] if is_complete else sorted((source / "checkpoints").glob("round-*"))[-1:]
        files = [file for file in kept if file.exists()]
        if not files or files[0].stat().st_size > limit:
            return None
        target.mkdir(parents=True, exist_ok=True)
        try:
            return Path(shutil.copyfile(files[0], target / files[0].name))
        except FileNotFoundError:  # training has replaced this checkpoint by a newer one: try again
            continue
    return None


def unpack(files: Sequence[Path], out: Path) -> list[Path]:
    """Unpack the files of a bundle into `out` and return the folders of its runs.

    Raises:
        SystemExit: A part of an archive is missing or damaged. Archives before it in the order of names are unpacked, so
            that results are there although a part of the state is missing.
    """
    out.mkdir(parents=True, exist_ok=True)
    names: set[str] = set()
    for name, parts in itertools.groupby(sorted(files), key=lambda file: re.sub(r"\.\d\d$", "", file.name)):
        with tempfile.TemporaryFile() as joined_parts, tempfile.TemporaryFile() as unpacked:
            try:
                for file in parts:
                    joined_parts.write(file.read_bytes())
                joined_parts.seek(0)
                # The checksum is at the end, and tarfile does not read it: everything is read before a file is written.
                with gzip.open(joined_parts) as packed:
                    shutil.copyfileobj(packed, unpacked)
                unpacked.seek(0)
                with tarfile.open(fileobj=unpacked, mode="r:") as archive:
                    archive.extractall(out, filter="data")
                    names |= {Path(member).parts[0] for member in archive.getnames() if len(Path(member).parts) > 1}
            except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
                raise SystemExit(f"{name}: a part is missing or damaged ({error}). Give all of its parts.") from error
    return [out / name for name in sorted(names)]


def restore(kept: Sequence[Path], work: Path) -> None:
    """Copy runs back into the work folder, so that `run` continues runs in progress and skips complete ones.

    Args:
        kept: Folders of runs, as `unpack` returns them, or the files of a bundle.
        work: Folder with the stores.

    Raises:
        SystemExit: A part of the bundle is missing or damaged. No run is restored.
    """
    folders = [path for path in kept if path.is_dir()]
    with tempfile.TemporaryDirectory() as scratch:
        if files := [path for path in kept if not path.is_dir()]:
            folders += unpack(files, Path(scratch))
        for folder in folders:
            # Otherwise the run would start again from round 0, and what it was charged would be lost.
            has_state = (folder / "ledger.jsonl").exists() or not (folder / IN_STATE).exists()
            if not has_state or not (folder / "run.toml").exists():
                raise SystemExit(
                    f"{folder.name}: give both files of its bundle, the results and the `.state`, with all parts."
                )
        for folder in folders:
            if not (folder / "checkpoints").exists() and not (folder / "facts.json").exists():
                print(f"{folder.name}: starts again from round 0, because its state is not in the bundle", flush=True)
                continue
            _restore_run(folder, work)
    take_chosen_norm(work)


def take_chosen_norm(work: Path) -> None:
    """Copy the recorded S, which was chosen on blogs_64, into the work folder, unless the folder has its own."""
    if not (work / "chosen_S.json").exists():
        shutil.copyfile(HERE / "results" / "blogs_64" / "chosen_S.json", work / "chosen_S.json")


def _restore_run(kept: Path, work: Path) -> None:
    """Copy one run into the work folder and write the paths of this machine into its run file.

    Args:
        kept: The folder of the run from a bundle.
        work: Folder with the stores.
    """
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
