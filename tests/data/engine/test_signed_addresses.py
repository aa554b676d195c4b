"""Recipes and trainings over addresses that are signed: nothing of the signature is kept, and each is asked seldom."""

from __future__ import annotations

import functools
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from swift.config.data import DataConfig, TemplateConfig
from swift.core.errors import SwiftError
from swift.data.dataset import data_fingerprint, prepare_datasets
from swift.data.encoding.encode import ChatEncoder
from swift.data.files import DataFile, stamp_of

ROWS = [{"text": f"row {number} of the file"} for number in range(20)]


class _Web:
    def __init__(self, root: str) -> None:
        self.root = root
        self.asked: list[str] = []

    def signed(self, name: str, signature: str = "SECRETSIG") -> str:
        return f"{self.root}/{name}?X-Amz-Signature={signature}&X-Amz-Expires=60"


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Web]:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    (tmp_path / "www").mkdir()
    (tmp_path / "www" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "www" / "bad.jsonl").write_text('{"text": "fine"}\n{broken\n')
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def end_headers(self) -> None:
            if self.path.startswith("/tagged"):
                self.send_header("ETag", "a tag")
            super().end_headers()

        def log_message(self, *args: Any) -> None:
            asked.append(f"{self.command} {self.path}")

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(tmp_path / "www"))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    web = _Web(f"http://127.0.0.1:{server.server_address[1]}")
    web.asked = asked
    yield web
    server.shutdown()
    server.server_close()


def recipe(*inputs: str, folder: Path, **keys: Any) -> dict[str, Any]:
    output = {"path": str(folder), "format": "jsonl"}
    return {"input": list(inputs), "output": output, "executor": {"num_proc": 1}, "steps": ["exact_dedup"], **keys}


def everything(folder: Path) -> str:
    return "".join(path.read_bytes().decode("utf-8", "replace") for path in folder.rglob("*") if path.is_file())


def test_nothing_of_a_signature_is_written(web: _Web, tmp_path: Path, run: Callable[..., Any]) -> None:
    keys = {"keep_work": True, "on_bad_row": "drop", "max_bad_rows": 5}
    run(recipe(web.signed("a.jsonl"), web.signed("bad.jsonl"), folder=tmp_path / "out", **keys))
    written = everything(tmp_path / "out")
    assert "SECRETSIG" not in written and f"{web.root}/a.jsonl" in written


def test_ids_stay_when_an_address_is_signed_anew(web: _Web, tmp_path: Path, run: Callable[..., Any]) -> None:
    def made(signature: str) -> list[str]:
        out = tmp_path / signature
        run(recipe(web.signed("a.jsonl", signature), folder=out, steps=[{"sample": {"share": 0.5}}]))
        return [path.read_text() for path in sorted(out.glob("part-*"))]

    assert made("one") == made("another")
    assert DataFile(web.signed("a.jsonl")).ref(3) == DataFile(web.signed("a.jsonl", "other")).ref(3)
    assert DataFile("https://user:pw@host/a.jsonl").name == "https://host/a.jsonl"


def test_errors_name_no_signature(web: _Web, tmp_path: Path, run: Callable[..., Any]) -> None:
    for name in ("bad.jsonl", "gone.jsonl"):
        with pytest.raises(SwiftError) as caught:
            run(recipe(web.signed(name), folder=tmp_path / name))
        assert "SECRETSIG" not in str(caught.value) and name in str(caught.value)


def test_prepared_data_keep_no_signature_and_outlive_it(web: _Web, tokenizer: Any, tmp_path: Path) -> None:
    config = TemplateConfig(max_length=256)
    encoder = ChatEncoder(tokenizer, config)
    data = [DataConfig(dataset=[web.signed("a.jsonl", signature)]) for signature in ("SECRETSIG", "other")]
    assert data_fingerprint(data[0], config, encoder, 1) == data_fingerprint(data[1], config, encoder, 1)
    prepared = prepare_datasets(data[0], config, encoder, seed=1)
    assert prepared.train.ref(0).file == f"{web.root}/a.jsonl"
    assert "SECRETSIG" not in json.dumps(prepared.ledger.summary(), default=str)


def test_a_server_is_asked_seldom(web: _Web, tmp_path: Path, run: Callable[..., Any]) -> None:
    (tmp_path / "www" / "tagged.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    for name, most in (("tagged", 4), ("a", 8)):  # without a tag its beginning is read, at the start and at the end
        run(recipe(f"{web.root}/{name}.jsonl", folder=tmp_path / name))
        assert len(web.asked) <= most, web.asked
        web.asked.clear()


def test_a_change_is_seen_when_it_matters(web: _Web, tmp_path: Path) -> None:
    before = stamp_of(f"{web.root}/a.jsonl")
    (tmp_path / "www" / "a.jsonl").write_text('{"text": "another"}\n')
    assert stamp_of(f"{web.root}/a.jsonl") == before
    assert stamp_of(f"{web.root}/a.jsonl", fresh=True) != before
