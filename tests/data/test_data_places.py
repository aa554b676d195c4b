"""Training data from anywhere: preparation, checks and a whole run over URLs, and shards without rows among others."""

from __future__ import annotations

import functools
import gzip
import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from swift.config.data import DataConfig, TemplateConfig
from swift.core.errors import DataError, UsageError
from swift.data.dataset import Prepared, data_fingerprint, prepare_datasets
from swift.data.encoding.encode import ChatEncoder
from swift.data.readers import EmptyFileError
from swift.data.selection import iter_rows

Rows = Callable[[int], list[dict[str, Any]]]
CONFIG = TemplateConfig(max_length=256)


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.fixture
def prepare(tokenizer: Any) -> Callable[..., Prepared]:
    def run(*dataset: object, **settings: Any) -> Prepared:
        data = DataConfig(dataset=[str(item) for item in dataset], **settings)
        return prepare_datasets(data, CONFIG, ChatEncoder(tokenizer, CONFIG), seed=42)

    return run


@pytest.fixture
def box(chat_rows: Rows) -> Iterator[str]:
    system = fsspec.filesystem("memory")
    system.pipe("/box/a.jsonl", jsonl(chat_rows(10)))
    system.pipe("/box/b.jsonl.gz", gzip.compress(jsonl(chat_rows(4))))
    yield "memory://box"
    system.rm("/box", recursive=True)


def test_rows_from_a_url_are_those_of_a_file(
    prepare: Callable[..., Prepared], box: str, chat_rows: Rows, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(chat_rows(10)))
    for count in ("", "#4", "#23"):
        far, near = prepare(f"{box}/a.jsonl{count}").train, prepare(f"{path}{count}").train
        assert [far.ref(i).line for i in range(len(far))] == [near.ref(i).line for i in range(len(near))]
        assert all((far.tokens(i)[0] == near.tokens(i)[0]).all() for i in range(len(far)))
        assert far.ref(0).file == f"{box}/a.jsonl"
    assert len(prepare(box).train) == 14


def test_a_fingerprint_changes_with_the_content_behind_a_url(tokenizer: Any, box: str) -> None:
    data = DataConfig(dataset=[f"{box}/a.jsonl"])
    encoder = ChatEncoder(tokenizer, CONFIG)
    before = data_fingerprint(data, CONFIG, encoder, 1)
    assert data_fingerprint(data, CONFIG, encoder, 1) == before
    system = fsspec.filesystem("memory")
    content = system.cat("/box/a.jsonl")
    system.pipe("/box/a.jsonl", content.replace(b"a", b"b", 1))
    assert data_fingerprint(data, CONFIG, encoder, 1) != before


def test_shards_without_rows_are_noted_among_others(
    prepare: Callable[..., Prepared], chat_rows: Rows, tmp_path: Path
) -> None:
    for name, rows in (("a", 3), ("b", 0), ("c", 2), ("d", 0)):
        (tmp_path / f"{name}.jsonl").write_bytes(jsonl(chat_rows(rows)))
    (tmp_path / "d.jsonl").write_bytes(b"\n\n")
    for argument, expected in ((tmp_path, 5), (f"{tmp_path}#4", 4), (f"{tmp_path}#12", 12)):
        prepared = prepare(argument)
        assert len(prepared.train) == expected
        notes = [note for note in prepared.ledger.summary()["notes"] if "without rows" in note]
        assert len(notes) == 1 and "2 file(s)" in notes[0] and "b.jsonl" in notes[0] and "d.jsonl" in notes[0]
    with pytest.raises(EmptyFileError, match="0 bytes"):
        prepare(tmp_path / "b.jsonl")
    for name in ("a", "c"):
        (tmp_path / f"{name}.jsonl").write_bytes(b"")
    for argument in (tmp_path, f"{tmp_path}#4"):
        with pytest.raises(DataError):
            prepare(argument)


def test_documents_train_as_plain_text(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# Title\n\nText.\n")
    (tmp_path / "b.html").write_text("<title>T</title><p>Page")
    (tmp_path / "c.txt").write_text("line one\nline two\n")
    rows = [row for _, row in iter_rows([str(tmp_path)], DataConfig())]
    assert [getattr(row, "text", row) for row in rows] == ["# Title\n\nText.", "Page", "line one", "line two"]


def test_a_damaged_shard_in_the_middle_stops_with_its_name(
    prepare: Callable[..., Prepared], chat_rows: Rows, tmp_path: Path
) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(jsonl(chat_rows(30))))
    torn = (tmp_path / "b.jsonl.gz").read_bytes()
    (tmp_path / "b.jsonl.gz").write_bytes(torn[: len(torn) // 2])
    with pytest.raises(DataError, match="damaged or incomplete") as caught:
        prepare(tmp_path)
    assert f"{tmp_path / 'b.jsonl.gz'} (after" in (caught.value.where or "")


@pytest.fixture
def web(chat_rows: Rows, tmp_path: Path) -> Iterator[str]:
    (tmp_path / "www").mkdir()
    (tmp_path / "www" / "rows.jsonl.gz").write_bytes(gzip.compress(jsonl(chat_rows(12))))

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

    handler = functools.partial(Handler, directory=str(tmp_path / "www"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_a_check_over_http_and_offline(web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    command = [sys.executable, "-m", "swift.cli", "data", "check", f"{web}/rows.jsonl.gz"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "12" in done.stdout and "no bad rows" in done.stdout, done.stdout + done.stderr
    refused = subprocess.run([*command, "--offline", "true"], capture_output=True, text=True)
    assert refused.returncode != 0 and "the network is forbidden" in refused.stderr


@pytest.mark.slow
def test_training_over_http(web: str, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from swift.commands.sft import sft

    monkeypatch.delenv("HF_HUB_OFFLINE")
    settings: dict[str, Any] = {"model": str(tiny_model_dir), "output_dir": str(tmp_path / "out"), "max_steps": 2}
    url = f"{web}/rows.jsonl.gz"
    far = sft(dataset=[f"{url}#8"], **settings)
    assert far.last_checkpoint is not None
    ledger = (tmp_path / "out").glob("**/ledger.jsonl")
    assert json.loads(next(iter(ledger)).read_text().splitlines()[-1])["event"] == "summary"
    with pytest.raises((UsageError, DataError), match="the network is forbidden"):
        sft(dataset=[url], offline=True, **settings)
