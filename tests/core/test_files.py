"""Writes that the file system refuses: told by name, with advice that fits, and never as a traceback."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from swift.core.errors import SwiftError
from swift.core.files import disk_errors, is_disk_fault, require_space, require_writable, write_atomic


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "free space"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "no right to write"),
        (errno.EIO, "fault"),
        (errno.ENOENT, "another place"),
    ],
)
def test_the_advice_fits_the_cause(number, advice, tmp_path):
    with pytest.raises(SwiftError, match="could not write") as caught, disk_errors(tmp_path / "file", 2048):
        raise OSError(number, os.strerror(number))
    assert advice in caught.value.fix
    assert ("free space" in caught.value.fix) == (number == errno.ENOSPC)
    assert "2.0 KiB needed" in caught.value.where


def test_places_that_can_t_be_written_are_named(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    for path, advice in [
        (tmp_path / "file/below", "in the way"),
        (tmp_path / "file/far/below", "not a folder"),
        (tmp_path / "folder", "folder"),
        (tmp_path / ("n" * 300), "too long"),
    ]:
        with pytest.raises(SwiftError, match="could not write") as caught:
            write_atomic(path, "text")
        assert advice in caught.value.fix, path
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


class SafetensorError(Exception):
    """Named as the library's own, which this floor doesn't import."""


def test_a_library_s_refusal_is_told_from_its_other_errors(tmp_path):
    full = SafetensorError("I/O error: No space left on device (os error 28)")
    with pytest.raises(SwiftError, match="could not write") as caught, disk_errors(tmp_path):
        raise full
    assert "free space" in caught.value.fix
    with pytest.raises(SwiftError) as caught, disk_errors(tmp_path):
        raise SafetensorError("I/O error: Read-only file system (os error 30)")
    assert "read-only" in caught.value.fix
    other = SafetensorError("Some tensors share memory")
    assert not is_disk_fault(other)
    with pytest.raises(SafetensorError), disk_errors(tmp_path):
        raise other
    with pytest.raises(BlockingIOError), disk_errors(tmp_path):
        raise BlockingIOError(errno.EAGAIN, "locked")


def test_space_is_looked_up_where_the_file_will_be(tmp_path, monkeypatch):
    asked = []
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(Path(path)) or real(path)._replace(free=1000))
    require_space(tmp_path / "not/yet", 1000)
    with pytest.raises(SwiftError, match="not enough free space"):
        require_space(tmp_path / "not/yet", 1001)
    assert asked[-1] == tmp_path


def test_what_can_be_written_is_found_out_without_a_trace(tmp_path):
    (tmp_path / "kept.jsonl").write_text("rows")
    require_writable(tmp_path / "kept.jsonl")
    require_writable(tmp_path / "new" / "results.jsonl")
    assert (tmp_path / "kept.jsonl").read_text() == "rows"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["kept.jsonl", "new"]
    for place in (tmp_path, tmp_path / "kept.jsonl" / "results.jsonl"):
        with pytest.raises(SwiftError, match="could not write"):
            require_writable(place)
