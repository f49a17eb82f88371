"""storage.py: after any failure the old content or the new content is there, and locks exclude other processes."""

import ast
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from unheard import storage

SOURCE = Path(storage.__file__).parent
ONLY_HERE = {"replace", "rename", "fsync", "ftruncate", "link", "mkdtemp", "mkstemp"}


def test_a_replaced_file_has_the_new_content_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    storage.replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


def test_a_failed_replace_keeps_the_old_content(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage.os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        storage.replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_is_synced_before_it_is_renamed(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(storage.os, "fsync", lambda fd: (calls.append("sync"), fsync(fd)))
    monkeypatch.setattr(storage.os, "replace", lambda a, b: (calls.append("rename"), replace(a, b)))
    storage.replace_file(tmp_path / "file", b"new")
    assert calls == ["sync", "rename", "sync"]  # the file, its new name, the folder


def test_a_new_file_never_replaces_one_that_exists(tmp_path):
    storage.create_file(tmp_path / "file", b"first")
    with pytest.raises(FileExistsError):
        storage.create_file(tmp_path / "file", b"second")
    assert (tmp_path / "file").read_bytes() == b"first"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_append_and_truncate_refuse_a_file_of_another_size(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"12345")
    for expected in (4, 6):
        with pytest.raises(OSError, match="another process"):
            storage.append(path, b"6", expected_size=expected)
        with pytest.raises(OSError, match="another process"):
            storage.truncate(path, 2, expected_size=expected)
    assert path.read_bytes() == b"12345"
    storage.append(path, b"6", expected_size=5)
    storage.truncate(path, 3, expected_size=6)
    assert path.read_bytes() == b"123"


def test_a_partial_append_is_taken_back(tmp_path, monkeypatch):
    path = tmp_path / "log"
    path.write_bytes(b"12345\n")
    write = os.write
    monkeypatch.setattr(storage.os, "write", lambda fd, content: write(fd, content[:3]))
    with pytest.raises(OSError, match="only part"):
        storage.append(path, b"678901\n", expected_size=6)
    assert path.read_bytes() == b"12345\n"


def test_a_line_is_appended_after_a_torn_one(tmp_path):
    path = tmp_path / "log"
    storage.append_line(path, b"1")
    storage.append_line(path, b"2")
    assert path.read_bytes() == b"1\n2\n"
    path.write_bytes(b'1\n{"tor')
    storage.append_line(path, b"3")
    assert path.read_bytes() == b'1\n{"tor\n3\n'


def test_a_new_file_is_whole_where_there_are_no_hard_links(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(storage.os, "link", refuse)
    storage.create_file(tmp_path / "file", b"first")
    with pytest.raises(FileExistsError):
        storage.create_file(tmp_path / "file", b"second")
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"first"


@pytest.mark.skipif(os.name != "posix", reason="other systems have no permissions of this kind")
@pytest.mark.parametrize("links", [True, False])
def test_what_is_for_its_owner_alone_is_never_readable_by_others(tmp_path, monkeypatch, links):
    """Also while it is written, on a file system without hard links, and for a user whose umask hides nothing."""
    modes, fsync = [], os.fsync

    def spy(descriptor):
        modes.extend(path.stat().st_mode for path in tmp_path.iterdir())
        fsync(descriptor)

    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(storage.os, "fsync", spy)
    if not links:
        monkeypatch.setattr(storage.os, "link", refuse)
    before = os.umask(0)
    try:
        storage.create_file(tmp_path / "created", b"secret")
        storage.replace_file(tmp_path / "replaced", b"secret", owner_only=True)
        with storage.locked(tmp_path / ".lock"), storage.staged_folder(tmp_path / "folder") as folder:
            (folder / "file").touch()
    finally:
        os.umask(before)
    modes += [path.stat().st_mode for path in tmp_path.iterdir()]
    assert len(modes) > 8
    assert not [oct(mode) for mode in modes if mode & 0o077]


@pytest.mark.skipif(os.name != "posix", reason="other systems have no permissions of this kind")
@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_a_crash_left_under_the_temporary_name_neither_shows_nor_stops_a_secret(tmp_path, kind):
    """A file of the same name that others may read is not written to, nor is the file that a link points to."""
    path, left, elsewhere = tmp_path / "keys", tmp_path / ".keys.new", tmp_path / "elsewhere"
    elsewhere.write_bytes(b"readable")
    elsewhere.chmod(0o666)
    if kind == "link":
        left.symlink_to(elsewhere)
    else:
        os.link(elsewhere, left)
    storage.replace_file(path, b"secret", owner_only=True)
    assert path.read_bytes() == b"secret"
    assert not path.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600
    assert elsewhere.read_bytes() == b"readable"
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "keys"]


HOLD = """
import pathlib, sys
from unheard import storage
with storage.locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_lock_excludes_another_process_and_ends_with_it(tmp_path):
    path = tmp_path / "lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(storage.FileInUse), storage.locked(path, wait=0.05):
        pass
    holder.kill()
    holder.communicate()
    with storage.locked(path, wait=5):
        pass


def test_a_lock_excludes_the_same_process(tmp_path):
    with storage.locked(tmp_path / "lock"), pytest.raises(storage.FileInUse), storage.locked(tmp_path / "lock"):
        pass


def test_a_staged_folder_appears_whole_or_not_at_all(tmp_path):
    out = tmp_path / "out"
    with storage.staged_folder(out) as folder:
        (folder / "a").write_text("1")
        assert not out.exists()
    assert (out / "a").read_text() == "1"
    with pytest.raises(RuntimeError), storage.staged_folder(tmp_path / "other") as folder:  # noqa: PT012
        (folder / "a").write_text("1")
        raise RuntimeError
    assert os.listdir(tmp_path) == ["out"]


def test_a_staged_folder_never_replaces_a_filled_one(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(OSError), storage.staged_folder(out) as folder:  # noqa: PT012
        (folder / "a").write_text("1")
        out.mkdir()
        (out / "b").write_text("2")
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(out) == ["b"]


def test_no_other_module_replaces_or_syncs_files():
    offenders = [
        f"{path.relative_to(SOURCE)}: {node.value.id}.{node.attr}"
        for path in SOURCE.rglob("*.py")
        if path.name != "storage.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.value.id in ("os", "tempfile") and node.attr in ONLY_HERE
    ]
    assert offenders == []


WRITES = {
    "replace_file": (lambda path: storage.replace_file(path, b"x"), True),
    "open_replacement": (lambda path: _through_replacement(path), True),
    "create_file": (lambda path: (path.unlink(), storage.create_file(path, b"x")), True),
    "append": (lambda path: storage.append(path, b"x", expected_size=3), False),
    "append_line": (lambda path: storage.append_line(path, b"x"), False),
    "append_line, new": (lambda path: (path.unlink(), storage.append_line(path, b"x")), True),
    "truncate": (lambda path: storage.truncate(path, 1, expected_size=3), False),
}


def _through_replacement(path):
    with storage.open_replacement(path) as file:
        file.write(b"x")


@pytest.mark.parametrize("name", WRITES)
def test_every_write_is_on_disk_with_its_name_when_it_returns(tmp_path, monkeypatch, name):
    """The final content of the file is synced, and then the folder that contains its new name."""
    synced, fsync = [], os.fsync

    def spy(descriptor):
        status = os.fstat(descriptor)
        synced.append((status.st_ino, status.st_size))
        fsync(descriptor)

    write, is_named_anew = WRITES[name]
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    monkeypatch.setattr(storage.os, "fsync", spy)
    write(path)
    status = path.stat()
    assert (status.st_ino, status.st_size) in synced
    if is_named_anew:
        assert synced[-1][0] == tmp_path.stat().st_ino


def test_a_deleted_folder_is_gone_for_good_and_one_that_is_missing_is_no_error(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(storage.os, "fsync", lambda d: (synced.append(os.fstat(d).st_ino), fsync(d))[1])
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").write_bytes(b"x")
    storage.delete_folder(folder)
    assert os.listdir(tmp_path) == []
    assert synced == [tmp_path.stat().st_ino]
    storage.delete_folder(folder)


@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_that_is_moved_into_place_is_there_for_good(tmp_path, monkeypatch, exists):
    """The folder that holds its new name is synced after the move, also if an empty folder was there."""
    steps, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(storage.os, "fsync", lambda d: (steps.append(os.fstat(d).st_ino), fsync(d))[1])
    monkeypatch.setattr(storage.os, "replace", lambda a, b: (steps.append("moved"), replace(a, b))[1])
    out = tmp_path / "runs" / "first"
    if exists:
        out.mkdir(parents=True)
    with storage.staged_folder(out) as folder:
        (folder / "file").write_bytes(b"x")
        assert folder in storage.STAGED
    assert steps == ["moved", out.parent.stat().st_ino]
    assert os.listdir(out.parent) == ["first"]
    assert folder not in storage.STAGED


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_another_process_creates_meanwhile_is_left_as_it_is(tmp_path, monkeypatch, links):
    path, real = tmp_path / "ledger.jsonl", os.link

    def link(source, target):
        path.write_bytes(b"of the other process")
        if links:
            return real(source, target)
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(storage.os, "link", link)
    with pytest.raises(FileExistsError):
        storage.create_file(path, b"new")
    assert path.read_bytes() == b"of the other process"
    assert os.listdir(tmp_path) == ["ledger.jsonl"]


def test_a_pipe_and_a_link_to_a_device_are_special_and_files_and_links_to_them_are_not(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "broken").symlink_to("nowhere")
    (tmp_path / "folder").mkdir()
    assert storage.special_file(tmp_path) is None
    assert storage.special_file(tmp_path / "missing") is None
    (tmp_path / "zeros").symlink_to("/dev/zero")
    assert storage.special_file(tmp_path) == tmp_path / "zeros"
    os.mkfifo(tmp_path / "pipe")
    assert storage.special_file(tmp_path) == tmp_path / "pipe"


def test_a_pipe_a_device_and_a_huge_file_are_refused_before_they_are_read(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    assert storage.regular_file(tmp_path / "link").read_bytes() == b"abc"
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="copy its content into a file"):
            storage.regular_file(path)
    os.truncate(tmp_path / "file", storage.LARGEST_INPUT)
    assert storage.regular_file(tmp_path / "file") == tmp_path / "file"
    os.truncate(tmp_path / "file", storage.LARGEST_INPUT + 1)
    with pytest.raises(OSError, match="name a smaller file"):
        storage.regular_file(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        storage.regular_file(tmp_path / "missing")
