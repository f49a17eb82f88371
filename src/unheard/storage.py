"""Durable files: every file that must survive a crash is written by this module.

Each function leaves the old content or the new content, never a mixture, and returns only after the bytes are on disk
(fsync of the file, and of its folder where a name was added). Only "charge before release" (docs/privacy.md) depends on
this for the guarantee; everywhere else it keeps a crash from losing work. Functions raise `OSError` as the operating
system reports it, or `FileInUse` if another process holds a lock; callers turn both into errors that name the cure.

    replace_file(path, content)                 atomic replace of a whole file
    with open_replacement(path) as file: ...    the same for a file that is written piece by piece
    create_file(path, content)                  a new file for its owner alone; fails if the path exists
    append(path, content, expected_size=size)   append to a log that has exactly `size` bytes
    append_line(path, line)                     append to a log of lines whose last line may be torn
    truncate(path, size, expected_size=...)     cut the torn end of a log
    with locked(path, wait=60.0): ...           one process at a time; the lock ends with its process
    with staged_folder(out) as folder: ...      fill a folder beside `out`, then move it there in one step
    delete_folder(folder)                       delete a folder; the deletion survives a crash
    special_file(folder)                        a pipe or device in a folder that is about to be read

Locks use the `filelock` package, so importing this module works on Linux, macOS and Windows.
"""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import filelock

STAGED: set[Path] = set()
"""Folders that this process fills under a temporary name. Whoever ends the process without unwinding deletes them."""
POLL_SECONDS = 0.002
"""How often a waiting process tries the lock again. A holder keeps it for about as long as one fsync takes."""


class FileInUse(OSError):
    """Another process holds the lock."""


def replace_file(path: Path, content: bytes, *, owner_only: bool = False) -> None:
    """Replace a file atomically: after a crash the old or the new content is there, whole.

    Args:
        path: The file to write. Its folder must exist.
        content: The whole new content.
        owner_only: Whether only its owner may read it, from its first byte on.

    Raises:
        OSError: The file could not be written. The old content is unchanged.
    """
    with open_replacement(path, owner_only=owner_only) as file:
        file.write(content)


@contextlib.contextmanager
def open_replacement(path: Path, *, owner_only: bool = False) -> Iterator[BinaryIO]:
    """Open a temporary file for writing that replaces `path` when the block ends; an error deletes it instead."""
    file = _open_for_writing(path.with_name(f".{path.name}.new"), owner_only)
    try:
        yield file
        finish_file(file, path)
    except BaseException:
        file.close()
        Path(file.name).unlink(missing_ok=True)
        raise


def finish_file(file: BinaryIO, path: Path) -> None:
    """Sync and close a file that was written under a temporary name, and rename it to `path` in the same folder."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    os.replace(file.name, path)
    sync_folder(path.parent)


def create_file(path: Path, content: bytes) -> None:
    """Create a file that only its owner may read: after a crash it is there whole or not at all.

    Raises:
        FileExistsError: Something is at the path, whatever it is. It is left as it is.
        OSError: The file could not be written. Nothing is at the path.
    """
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name[:50]}.", suffix=".new", dir=path.parent)
    try:
        _write_and_sync(descriptor, content, expected_size=0)
        try:
            os.link(name, path)  # unlike a rename, it never replaces what another process has created meanwhile
        except FileExistsError:
            raise
        except OSError:  # a filesystem without hard links; there a crash can leave a part of the file
            _write_and_sync(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), content, expected_size=0)
    finally:
        os.unlink(name)
    sync_folder(path.parent)


def append(path: Path, content: bytes, *, expected_size: int) -> None:
    """Append bytes in one write and sync them.

    Args:
        path: An existing file.
        content: What to append.
        expected_size: The file's size as the caller knows it. A file of another size was written by another process;
            it is left unchanged and `OSError` (EBUSY) is raised.
    """
    _write_and_sync(os.open(path, os.O_WRONLY | os.O_APPEND), content, expected_size)


def append_line(path: Path, line: bytes) -> None:
    """Append one line to a log of lines and sync it; the file is created if it is missing.

    A last line that a crash has torn is left as a line of its own, so that the new line is whole. Readers of such a log
    skip lines that they cannot parse. One process writes at a time.

    Args:
        path: The log. Its folder must exist.
        line: The line without its newline.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    size = os.fstat(descriptor).st_size
    os.lseek(descriptor, max(size - 1, 0), os.SEEK_SET)
    is_torn = os.read(descriptor, 1) not in (b"", b"\n")
    _write_and_sync(descriptor, (b"\n" if is_torn else b"") + line + b"\n", expected_size=size)


def truncate(path: Path, size: int, *, expected_size: int) -> None:
    """Cut a file to `size` bytes and sync it.

    Args:
        path: An existing file.
        size: The size to keep.
        expected_size: As in `append`: a file of another size is left unchanged and `OSError` (EBUSY) is raised.
    """
    descriptor = os.open(path, os.O_WRONLY)
    try:
        _check_size(descriptor, expected_size)
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path, *, wait: float = 0.0) -> Iterator[None]:
    """Hold an exclusive lock on a lock file; the operating system releases it when the process ends.

    Args:
        path: The lock file. It is created if missing and never deleted.
        wait: Seconds to wait for another process that holds the lock.

    Raises:
        FileInUse: Another process still holds the lock after `wait` seconds.
    """
    lock = filelock.FileLock(path, timeout=wait, poll_interval=POLL_SECONDS, mode=0o600)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise FileInUse(errno.EAGAIN, "another process holds the lock", str(path)) from None
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """Fill a new folder beside `out`, and move it to `out` in one step when the block ends without an error.

    If the block raises, or `out` was filled by another process meanwhile, the staged folder is deleted and `out` is
    unchanged. Only the owner may enter the staged folder.

        with staged_folder(Path("exports/model")) as folder:
            (folder / "config.json").write_text("{}")

    Args:
        out: The final path: missing, or an empty folder. Its parents are created.

    Raises:
        OSError: `out` holds something, or cannot be written.
    """
    folder = new_folder_beside(out)
    try:
        yield folder
        move_into_place(folder, out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        STAGED.discard(folder)


def new_folder_beside(out: Path) -> Path:
    """Make a folder with a unique name in the parent of `out`, on the same filesystem."""
    out = Path(os.path.abspath(out))
    out.parent.mkdir(parents=True, exist_ok=True)
    # DP: a unique name: two processes that begin in one place must not fill one folder.
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name[:50]}.", suffix=".new", dir=out.parent))
    STAGED.add(folder)
    return folder


def move_into_place(folder: Path, out: Path) -> None:
    """Rename a filled folder to `out`, which is missing or an empty folder, and sync the parent."""
    os.replace(folder, out)
    STAGED.discard(folder)
    sync_folder(Path(os.path.abspath(out)).parent)


def delete_staged() -> None:
    """Delete the folders that this process is filling, at its end.

    Each is renamed first, so that it cannot be moved into place meanwhile.
    """
    for folder in list(STAGED):
        gone = folder.with_name(f"{folder.name}.stopped")
        with contextlib.suppress(OSError):
            os.rename(folder, gone)
            shutil.rmtree(gone, ignore_errors=True)


def delete_folder(folder: Path) -> None:
    """Delete a folder with its files, and make the deletion durable; does nothing if there is no folder."""
    if os.path.lexists(folder):
        shutil.rmtree(folder)
        sync_folder(folder.parent)


def special_file(folder: Path) -> Path | None:
    """The first entry of a folder that is neither a file nor a folder (links are followed); None if there is none.

    Somebody else's folder may hold a pipe, which a reader would wait for, or a link to an endless device.
    """
    try:
        with os.scandir(folder) as entries:
            special = [entry.path for entry in entries if not (entry.is_file() or entry.is_dir())]
    except OSError:  # no folder, which its reader reports
        return None
    return next((Path(path) for path in sorted(special) if os.path.exists(path)), None)


def sync_folder(path: Path) -> None:
    """Write a folder's list of names to disk, so that a new or renamed file survives a power loss.

    Windows cannot sync a folder; there the call does nothing.
    """
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_for_writing(path: Path, owner_only: bool) -> BinaryIO:
    """Open a new file, readable by its owner only if so wanted."""
    if not owner_only:
        return open(path, "wb")
    path.unlink(missing_ok=True)
    # DP: what is as secret as the users' text is never readable by others, not even while it is written.
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600))


def _write_and_sync(descriptor: int, content: bytes, expected_size: int) -> None:
    """Append content to a file of a known size, whole or not at all."""
    try:
        _check_size(descriptor, expected_size)
        if os.write(descriptor, content) != len(content):
            # Half a line is of no use; if it stayed, the next open would cut it.
            os.ftruncate(descriptor, expected_size)
            raise OSError(errno.ENOSPC, "only part of the content could be written")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_size(descriptor: int, expected: int) -> None:
    if os.fstat(descriptor).st_size != expected:
        raise OSError(errno.EBUSY, "another process has written to the file")
