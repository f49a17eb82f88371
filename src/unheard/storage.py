"""Write files that survive a crash. All files that must be durable are written by this module.

After a crash a file has its old content or its new content, never a mixture. A function returns only after the bytes are
on disk (fsync of the file, and of its folder if a name was added). The guarantee depends on this in one place, "charge
before release" (docs/privacy.md); elsewhere it prevents that a crash loses work. Functions raise `OSError` as the
operating system reports it, or `FileInUse` if another process holds a lock; callers turn both into errors that say what
to do.

    replace_file(path, content)                 replace a whole file atomically
    with open_replacement(path) as file: ...    the same for a file that is written piece by piece
    create_file(path, content)                  create a file that only its owner can read; fails if the path exists
    append(path, content, expected_size=size)   append to a log that has exactly `size` bytes
    append_line(path, line)                     append to a log of lines whose last line may be incomplete
    truncate(path, size, expected_size=...)     cut off the incomplete end of a log
    with locked(path, wait=60.0): ...           hold a lock, which ends with the process
    with staged_folder(out) as folder: ...      fill a folder next to `out`, then move it there in one step
    delete_folder(folder)                       delete a folder; the deletion survives a crash
    special_file(folder)                        find a pipe or a device in a folder before reading it
    regular_file(path)                          refuse a pipe, a device or a huge file before reading it

Locks use the `filelock` package, so importing this module works on Linux, macOS and Windows.
"""

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import filelock

STAGED: set[Path] = set()
"""Folders that this process is filling under a temporary name. If the process ends early, `delete_staged` removes them."""
LARGEST_INPUT = 1 << 30
"""The most bytes of a file that is read into memory as a whole because a user named it."""
POLL_SECONDS = 0.002
"""Seconds between two attempts to take a lock. Short, because most locks are held only for the time of one fsync."""


class FileInUse(OSError):
    """Another process holds the lock that `locked` tried to take."""


def replace_file(path: Path, content: bytes, *, owner_only: bool = False) -> None:
    """Replace a file atomically: after a crash the file has all of the old content or all of the new content.

    Args:
        path: The file to write. Its folder must exist.
        content: The whole new content.
        owner_only: Whether only the file's owner may read it, also while it is being written.

    Raises:
        OSError: The file could not be written. The old content is unchanged.
    """
    with open_replacement(path, owner_only=owner_only) as file:
        file.write(content)


@contextlib.contextmanager
def open_replacement(path: Path, *, owner_only: bool = False) -> Iterator[BinaryIO]:
    """Open a temporary file for writing. It replaces `path` when the block ends without an error, else it is deleted.

    Args:
        path: The file to replace. Its folder must exist.
        owner_only: Whether only the file's owner may read it, also while it is being written.
    """
    file = _open_for_writing(path.with_name(f".{path.name}.new"), owner_only)
    try:
        yield file
        finish_file(file, path)
    except BaseException:
        file.close()
        Path(file.name).unlink(missing_ok=True)
        raise


def finish_file(file: BinaryIO, path: Path) -> None:
    """Sync and close a file that was written under a temporary name, then rename it to `path` in the same folder."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    os.replace(file.name, path)
    sync_folder(path.parent)


def create_file(path: Path, content: bytes) -> None:
    """Create a file that only its owner may read. After a crash the file is complete or missing.

    Filesystems without hard links are an exception: there, a crash or an error can leave an incomplete file.

    Raises:
        FileExistsError: A file, folder or link is at the path. It is left unchanged.
        OSError: The file could not be written.
    """
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name[:50]}.", suffix=".new", dir=path.parent)
    try:
        _write_and_sync(descriptor, content, expected_size=0)
        try:
            os.link(name, path)  # unlike a rename, a link never replaces a file that another process has just created
        except FileExistsError:
            raise
        except OSError:  # the filesystem has no hard links; a crash during this write can leave an incomplete file
            _write_and_sync(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), content, expected_size=0)
    finally:
        os.unlink(name)
    sync_folder(path.parent)


def append(path: Path, content: bytes, *, expected_size: int) -> None:
    """Append bytes in one write and sync them.

    Args:
        path: An existing file.
        content: The bytes to append.
        expected_size: The size that the caller expects the file to have.

    Raises:
        OSError: The file could not be written. With EBUSY: it does not have the expected size, because another process
            has written to it; it is left unchanged.
    """
    _write_and_sync(os.open(path, os.O_WRONLY | os.O_APPEND), content, expected_size)


def append_line(path: Path, line: bytes) -> None:
    """Append one line to a log of lines and sync it; the file is created if it is missing.

    If a crash has left an incomplete last line, a newline is added to it first, so that the new line is on its own.
    Readers of the log must expect such an incomplete line. Only one process may write at a time.

    Args:
        path: The log. Its folder must exist.
        line: The line without its newline.
    """
    is_new = not os.path.lexists(path)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    size = os.fstat(descriptor).st_size
    os.lseek(descriptor, max(size - 1, 0), os.SEEK_SET)
    is_torn = os.read(descriptor, 1) not in (b"", b"\n")
    _write_and_sync(descriptor, (b"\n" if is_torn else b"") + line + b"\n", expected_size=size)
    if is_new:
        sync_folder(path.parent)


def truncate(path: Path, size: int, *, expected_size: int) -> None:
    """Cut a file to `size` bytes and sync it.

    Args:
        path: An existing file.
        size: The number of bytes to keep, from the beginning.
        expected_size: The size that the file must have before. If it has another size, it is left unchanged and
            `OSError` (EBUSY) is raised.
    """
    descriptor = os.open(path, os.O_WRONLY)
    try:
        _check_size(descriptor, expected_size)
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Lock:
    """An exclusive lock on a lock file, for an object that takes it often. The operating system releases it when the
    process ends.

    Args:
        path: The lock file. It is created if missing and never deleted.
        wait: Seconds to wait for another process that holds the lock.
    """

    def __init__(self, path: Path, *, wait: float = 0.0) -> None:
        self.path = path
        self._lock = filelock.FileLock(path, timeout=wait, poll_interval=POLL_SECONDS, mode=0o600)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock while the `with` block runs.

        Raises:
            FileInUse: Another process, thread or object still holds the lock after `wait` seconds.
        """
        try:
            self._lock.acquire()
        except filelock.Timeout:
            raise FileInUse(errno.EAGAIN, "another process holds the lock", str(self.path)) from None
        try:
            yield
        finally:
            self._lock.release()


def locked(path: Path, *, wait: float = 0.0) -> contextlib.AbstractContextManager[None]:
    """Hold the lock on a lock file while a `with` block runs. The arguments and errors are those of `Lock`."""
    return Lock(path, wait=wait).held()


@contextlib.contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """Create a folder next to `out` for the block to fill, and move it to `out` in one step when the block ends.

    If the block raises an error, or another process has put files into `out` meanwhile, the new folder is deleted and
    `out` is unchanged. Only the owner may open the folder.

        with staged_folder(Path("exports/model")) as folder:
            (folder / "config.json").write_text("{}")

    Args:
        out: The final path: missing, or an empty folder. Its parents are created.

    Raises:
        OSError: `out` is not empty, or cannot be written.
    """
    folder = new_folder_beside(out)
    try:
        yield folder
        rename_folder(folder, out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        STAGED.discard(folder)


def is_missing_or_empty(path: Path) -> bool:
    """Whether there is nothing at `path`, or an empty folder: a place where a command may put a new folder."""
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def new_folder_beside(out: Path) -> Path:
    """Create a folder with a unique name next to `out`, on the same filesystem, and return its path.

    The folder is added to `STAGED` until `rename_folder` renames it.
    """
    out = Path(os.path.abspath(out))
    out.parent.mkdir(parents=True, exist_ok=True)
    # DP: a unique name: two processes that begin in one place must not fill one folder.
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name[:50]}.", suffix=".new", dir=out.parent))
    STAGED.add(folder)
    return folder


def is_utf8(path: str | os.PathLike[str]) -> bool:
    """Whether an absolute path is UTF-8 text. DuckDB and safetensors cannot open a path that is not."""
    try:
        os.path.abspath(path).encode()
        return True
    except UnicodeEncodeError:
        return False


def rename_folder(folder: Path, out: Path) -> None:
    """Rename a folder to `out`, and sync the parent of `out`, which must be missing or an empty folder.

    A folder of `new_folder_beside` is no longer in `STAGED` afterwards, so a stop of the command does not delete it.
    """
    os.replace(folder, out)
    STAGED.discard(folder)
    sync_folder(Path(os.path.abspath(out)).parent)


def delete_staged() -> None:
    """Delete the folders in `STAGED`. A command that is stopped early calls this before it ends.

    Each folder is renamed before it is deleted, so that no other thread moves a half-deleted folder into place.
    """
    for folder in list(STAGED):
        gone = folder.with_name(f"{folder.name}.stopped")
        with contextlib.suppress(OSError):
            os.rename(folder, gone)
            shutil.rmtree(gone, ignore_errors=True)


def delete_folder(folder: Path) -> None:
    """Delete a folder with its files, and sync its parent so that the deletion is durable. A missing folder is ignored."""
    if os.path.lexists(folder):
        shutil.rmtree(folder)
        sync_folder(folder.parent)


def special_file(folder: Path) -> Path | None:
    """Return the first entry of a folder that is neither a file nor a folder, or None. Links are followed.

    A folder that comes from somebody else may contain a pipe, on which a reader would wait forever, or a link to a
    device that never ends.
    """
    try:
        with os.scandir(folder) as entries:
            special = [entry.path for entry in entries if not (entry.is_file() or entry.is_dir())]
    except OSError:  # the folder cannot be read; the caller's own reading reports that
        return None
    return next((Path(path) for path in sorted(special) if os.path.exists(path)), None)


def regular_file(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file that a user named, if it can be read into memory as a whole. Links are followed.

    A reader would wait for a pipe forever, and a device may never end.

    Raises:
        OSError: There is no file, it is a pipe or a device, or it has more than `LARGEST_INPUT` bytes.
    """
    status = os.stat(path)
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):  # reading a folder raises its own error
        raise OSError(errno.EINVAL, "it is a pipe or a device; copy its content into a file", str(path))
    if status.st_size > LARGEST_INPUT:
        raise OSError(errno.EFBIG, f"it has more than {LARGEST_INPUT:,} bytes; name a smaller file", str(path))
    return Path(path)


def sync_folder(path: Path) -> None:
    """Sync the list of names in a folder to disk, so that a new or renamed file survives a power loss.

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
    """Open an empty file for writing. If `owner_only`, nobody but its owner can read it at any time."""
    if not owner_only:
        return open(path, "wb")
    path.unlink(missing_ok=True)
    # DP: what is as secret as the users' text is never readable by others, not even while it is written.
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600))


def _write_and_sync(descriptor: int, content: bytes, expected_size: int) -> None:
    """Append content to an open file, completely or not at all; sync the file and close the descriptor.

    Raises:
        OSError: The file does not have the expected size (EBUSY), or the content could not be written completely.
    """
    try:
        _check_size(descriptor, expected_size)
        if os.write(descriptor, content) != len(content):
            # Remove the partial line; otherwise the next reader has to repair the file.
            os.ftruncate(descriptor, expected_size)
            raise OSError(errno.ENOSPC, "only part of the content could be written")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_size(descriptor: int, expected: int) -> None:
    """Raise `OSError` (EBUSY) if an open file does not have the expected size."""
    if os.fstat(descriptor).st_size != expected:
        raise OSError(errno.EBUSY, "another process has written to the file")
