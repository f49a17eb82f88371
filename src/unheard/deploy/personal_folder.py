"""Where a personal model lives: a folder that only its person can read, and that no other command takes for a run.

In: a place for it. Out: a folder of mode 0700 with files of mode 0600, apart from every run and every export. It has no run.toml
and no ledger, and its model file is not of the kind that `init_from` reads: it cannot be resumed, reported, exported or begun from.
"""

from collections.abc import Mapping
from pathlib import Path

from unheard import storage
from unheard.errors import InvalidValue, RunFolderExists

RECORD, MODEL = "personal.json", "personal.safetensors"
SHARED = ("ledger.jsonl", "model.safetensors", "checkpoints", "export.json", "corpus.json")
"""Files by which a folder that may be copied, published or trained on is known. A run file alone is none: it lies anywhere."""


def is_personal(path: Path) -> bool:
    return (path / RECORD).is_file()


def check_place(out: str | Path) -> Path:
    """Refuse a place inside anything that is shared: whoever copies that would copy the person's model with it."""
    place = Path(out).resolve()
    for above in (place, *place.parents):
        if found := next((name for name in SHARED if (above / name).exists()), None):
            raise InvalidValue(
                f"--out {out} lies in {above}, which is shared ({found}). A personal model has one person's words in it: keep it "
                "apart, in a folder of that person's own."
            )
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise RunFolderExists(f"{out} already holds something: choose another --out, or remove it first.")
    return place


def write_personal(place: Path, files: Mapping[str, bytes]) -> None:
    """Write all files or none; only the owner may read them, from the first byte on."""
    with storage.staged_folder(place) as folder:
        for name, content in files.items():
            storage.create_file(folder / name, content)
        if place.exists():
            place.rmdir()  # it was empty; its mode may have been anything
