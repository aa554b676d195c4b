"""Data sets by id: what an id means, which files it chooses, and downloads from a hub that is served here."""

from __future__ import annotations

import fnmatch
import http.server
import json
import os
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swift.core import network
from swift.core.errors import DataError, DependencyError, NetworkError
from swift.data import hubs
from swift.data.hubs import HubId, card_layout, choose_files, fetch_dataset, named_layout, parse_hub_id
from swift.data.patterns import path_pattern
from swift.data.sources import parse_source


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("hf::o/n", HubId("hf", "o/n")),
        ("ms::o/n.x-1", HubId("ms", "o/n.x-1")),
        ("hf::squad", HubId("hf", "squad")),
        ("hf::o/n:sub", HubId("hf", "o/n", subset="sub")),
        ("hf::o/n:a/b", HubId("hf", "o/n", subset="a/b")),
        ("hf::o/n:sub:test", HubId("hf", "o/n", subset="sub", split="test")),
        ("hf::o/n::test", HubId("hf", "o/n", split="test")),
        ("hf::o/n@v1.0:sub", HubId("hf", "o/n", "v1.0", "sub")),
        ("hf::o/n@refs/convert/parquet", HubId("hf", "o/n", "refs/convert/parquet")),
        ("o/n", None),
        ("s3::o/n", None),
    ],
)
def test_ids(text: str, meant: HubId | None) -> None:
    assert parse_hub_id(text) == meant


def test_ids_without_a_prefix_follow_use_hf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_uses_hf", True)
    assert parse_hub_id("o/n:s", bare=True) == HubId("hf", "o/n", subset="s")
    network.choose_hub(False)
    assert parse_hub_id("o/n", bare=True) == HubId("ms", "o/n")
    assert parse_hub_id("hf::o/n", bare=True) == HubId("hf", "o/n")
    assert parse_hub_id("n", bare=True) is None and parse_hub_id("a/b/c", bare=True) is None
    for wrong in ("hf::", "hf::a/b/c", "ms::../x", "hf::a b"):
        with pytest.raises(DataError, match="is not the id"):
            parse_hub_id(wrong)


CARD = """---
license: mit
configs:
- config_name: main
  default: true
  data_files:
  - split: train
    path: "data/train-*"
  - split: test
    path: ["data/test-*", "data/more/**"]
- config_name: extra
  data_dir: other
  data_files: "*.jsonl"
- config_name: whole
  data_dir: other
---
# Text
"""
NAMES = [
    "data/more/x/y.jsonl",
    "data/test-00000.parquet",
    "data/train-00000.parquet",
    "data/train-00001.parquet",
    "other/a.jsonl",
    "other/sub/validation.jsonl",
]


def chosen(layout: hubs.Layout, names: list[str], subset: str = "", split: str | None = None) -> list[str]:
    return choose_files(HubId("hf", "o/n", subset=subset, split=split), layout, names)[0]


@pytest.mark.timeout(10)
def test_a_card_of_empty_lines_takes_no_time() -> None:
    assert card_layout("---" + "\n" * 200_000, NAMES) == {}


def test_the_card_says_which_files_belong_together() -> None:
    layout = card_layout(CARD, NAMES)
    train = ["data/train-00000.parquet", "data/train-00001.parquet"]
    assert chosen(layout, NAMES) == chosen(layout, NAMES, "main") == chosen(layout, NAMES, "train") == train
    test = ["data/more/x/y.jsonl", "data/test-00000.parquet"]
    assert chosen(layout, NAMES, "test") == chosen(layout, NAMES, "", "test") == test
    assert chosen(layout, NAMES, "extra") == ["other/a.jsonl"]
    assert chosen(layout, NAMES, "whole", "validation") == ["other/sub/validation.jsonl"]
    assert chosen(layout, NAMES, "main/extra") == [*train, "other/a.jsonl"]
    assert set(chosen(layout, NAMES, "main", "all")) == {n for n in NAMES if n.startswith("data/")}
    for subset, split, message in (
        ("mian", None, "no subset 'mian'"),
        ("main", "tset", "no split 'tset'"),
        ("whole", "train", "no split 'train'"),
    ):
        with pytest.raises(DataError, match=message):
            chosen(layout, NAMES, subset, split)
    assert card_layout("# no head", NAMES) == card_layout("---\n: [\n---\n", NAMES) == {}
    two = "---\nconfigs:\n- {config_name: a, data_files: data/*}\n- {config_name: b, data_files: other/*}\n---\n"
    with pytest.raises(DataError, match="several subsets: a, b"):
        chosen(card_layout(two, NAMES), NAMES)
    assert chosen(card_layout(two, NAMES), NAMES, "all") == [*NAMES[1:4], "other/a.jsonl"]


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("data/train-*", "data/train-0.parquet", True),
        ("data/train-*", "data/train-a/0.parquet", False),
        ("./a.jsonl", "a.jsonl", True),
        ("**/a.jsonl", "a.jsonl", True),
        ("**/a.jsonl", "x/y/a.jsonl", True),
        ("x/**", "x/y/a.jsonl", True),
        ("a-[0-4].csv", "a-3.csv", True),
        ("a-[0-4].csv", "a-5.csv", False),
        ("a-[!0-4].csv", "a-5.csv", True),
        ("a[!0]b.csv", "a/b.csv", False),
        ("*-*-of-*.csv", "a-1-of-2.csv", True),
        ("*-*-of-*.csv", "a-1-2.csv", False),
        ("**/**/a.jsonl", "a.jsonl", True),
        ("a?.csv", "a+.csv", True),
        ("a+.csv", "aa.csv", False),
    ],
)
def test_patterns_of_cards(pattern: str, name: str, matches: bool) -> None:
    layout = card_layout(f"---\nconfigs: [{{data_files: '{pattern}'}}]\n---\n", [name])
    assert bool(layout) == matches


@pytest.mark.timeout(10)
@pytest.mark.parametrize("pattern", ["*a*a*a*a*a*b.jsonl", "**/**/**/**/**/b.jsonl"])
def test_patterns_with_many_stars_take_no_time(pattern: str) -> None:
    for name in ("a" * 300, "a/" * 120 + "c"):
        assert path_pattern(pattern).fullmatch(name) is None


@pytest.mark.parametrize(
    ("names", "subset", "split", "expected"),
    [
        (["a.jsonl", "b.jsonl"], "", None, ["a.jsonl", "b.jsonl"]),
        (["train.jsonl", "test.jsonl"], "", None, ["train.jsonl"]),
        (["train.jsonl", "test.jsonl"], "test", None, ["test.jsonl"]),
        (["my_train_v2.csv", "my_dev.csv"], "validation", None, ["my_dev.csv"]),
        (["data/train-0.parquet", "data/test-0.parquet"], "", None, ["data/train-0.parquet"]),
        (["train/0.txt", "test/0.txt", "notes.md"], "", None, ["train/0.txt"]),
        (["en/train.jsonl", "de/train.jsonl", "de/test.jsonl"], "de", None, ["de/train.jsonl"]),
        (["en/train.jsonl", "de/train.jsonl", "de/test.jsonl"], "de", "test", ["de/test.jsonl"]),
        (["en/train.jsonl", "de/train.jsonl"], "all", None, ["en/train.jsonl", "de/train.jsonl"]),
        (["book.txt", "a.jsonl"], "", None, ["a.jsonl"]),
        (["book.txt"], "", None, ["book.txt"]),
        (["test.jsonl"], "", None, ["test.jsonl"]),
        (["a.jsonl", "b.jsonl"], "b.jsonl", None, ["b.jsonl"]),
        (["constraint.jsonl", "latest.jsonl"], "", None, ["constraint.jsonl", "latest.jsonl"]),
    ],
)
def test_without_a_card_names_decide(names: list[str], subset: str, split: str | None, expected: list[str]) -> None:
    assert sorted(chosen(named_layout(names), names, subset, split)) == sorted(expected)


def test_no_training_split_is_not_guessed() -> None:
    names = ["test.jsonl", "validation.jsonl"]
    with pytest.raises(DataError, match="no training split"):
        chosen(named_layout(names), names)


def test_other_splits_are_mentioned() -> None:
    layout = named_layout(["train.jsonl", "test.jsonl"])
    notes = choose_files(HubId("hf", "o/n"), layout, [])[1]
    assert notes == ["hf::o/n: the split 'train' is read; there are also test"]


# --- a hub ---

FILES: dict[str, bytes] = {
    "README.md": CARD.encode(),
    "data/train-00000.jsonl": b'{"text": "one"}\n',
    "data/train-00001.jsonl": b'{"text": "two"}\n',
    "data/test-00000.jsonl": b'{"text": "test"}\n',
    "other/a.jsonl": b'{"text": "other"}\n',
}


@pytest.fixture
def hub() -> Iterator[http.server.ThreadingHTTPServer]:
    """The data sets `owner/rows` and `owner/program`; everything else is unknown."""
    sha = "2" * 40

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def send(self, body: bytes, kind: str = "application/json", status: int = 200, **headers: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Type", kind)
            for key, value in headers.items():
                self.send_header(key.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self) -> None:
            path = self.path.split("?")[0].replace("%2F", "/")
            files = {"loader.py": b"x", "README.md": b"#"} if "owner/program" in path else FILES
            known = ("/api/datasets/owner/rows", "/api/datasets/owner/program", "/datasets/owner/")
            if not path.startswith(known):
                return self.send(b"{}", status=404, X_Error_Code="RepoNotFound", X_Error_Message="no such repository")
            if "/revision/" in path and path.rsplit("/", 1)[-1] not in ("main", "v1", sha):
                return self.send(b"{}", status=404, X_Error_Code="RevisionNotFound", X_Error_Message="none")
            if "/tree/" in path:
                entries = [{"type": "file", "path": n, "size": len(d), "oid": n} for n, d in files.items()]
                return self.send(json.dumps(entries).encode())
            if path.startswith("/api/"):
                info = {"id": "owner/rows", "sha": sha, "siblings": [{"rfilename": name} for name in files]}
                return self.send(json.dumps(info).encode())
            name = path.split("/resolve/")[1].split("/", 1)[1]
            if name not in files:
                return self.send(b"", status=404, X_Error_Code="EntryNotFound")
            return self.send(files[name], "application/octet-stream", ETag=f'"{hash(name)}"', X_Repo_Commit=sha)

        do_HEAD = do_GET

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def in_a_process(arguments: list[str], endpoint: str, home: Path, *, offline: bool = False) -> list[str]:
    """For each argument, what a fresh process reads: the names of its rows, or the error."""
    code = f"""
from swift.core.errors import SwiftError
from swift.core.network import follow_flags
from swift.data.readers import FileTally, parse_raw, read_raw
from swift.data.sources import parse_source
follow_flags(offline={offline}, use_hf=True)
for argument in {arguments!r}:
    try:
        source = parse_source(argument)
        rows = [(str(f.ref(n)), parse_raw(r)["text"]) for f in source.files for n, r in read_raw(f, FileTally())]
        print(" ".join(f"{{ref}}={{text}}" for ref, text in rows), "|", *source.notes)
    except SwiftError as error:
        print(type(error).__name__, error.render().replace(chr(10), " "))
"""
    env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    env.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=home)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_download_then_offline_then_hub_down(hub: http.server.ThreadingHTTPServer, tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{hub.server_address[1]}"
    first, second, test, revised, absent, program, no_split, no_revision = in_a_process(
        [
            "hf::owner/rows",
            "owner/rows#1",
            "hf::owner/rows:test",
            "hf::owner/rows@v1:extra",
            "owner/other",
            "hf::owner/program",
            "hf::owner/rows:main:dev",
            "hf::owner/rows@v2",
        ],
        endpoint,
        tmp_path,
    )
    train = "hf::owner/rows/data/train-00000.jsonl:1=one hf::owner/rows/data/train-00001.jsonl:1=two"
    assert first == f"{train} | hf::owner/rows: the split 'train' is read; there are also test"
    assert second.startswith(f"{train} | owner/rows: no such folder is here, so it is taken for the id hf::owner/rows")
    assert test.startswith("hf::owner/rows/data/test-00000.jsonl:1=test |")
    assert revised.startswith("hf::owner/rows/other/a.jsonl:1=other |")
    assert absent.startswith("DataError there is no file or folder 'owner/other', and the Hugging Face hub has no")
    assert "is a program" in program and "refs/convert/parquet" in program
    assert no_split.startswith("DataError hf::owner/rows:main has no split 'dev'")
    assert no_revision.startswith("DataError owner/rows has no revision 'v2'")

    cache = Path(tmp_path / "elsewhere")
    cache.mkdir()
    assert in_a_process(["owner/rows"], endpoint, cache)[0].startswith(train)
    assert not list(cache.glob("**/test-00000.jsonl")), "only what is wanted is downloaded"
    hub.shutdown()
    hub.server_close()
    nowhere = "http://127.0.0.1:9"
    for offline in (True, False):
        found, missing, never = in_a_process(
            ["owner/rows", "owner/rows:test", "owner/never"], nowhere, cache, offline=offline
        )
        assert found.startswith(train + " |")
        assert offline or "could not be reached" in found
        for line in (missing, never):
            assert (
                line.startswith("NetworkError there is no file or folder 'owner/")
                and "not (wholly) on this machine" in line
            )


def test_modelscope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def dataset_snapshot_download(name: str, **settings: Any) -> str:
        calls.append({"name": name, **settings})
        if settings["local_files_only"] and name != "o/cached":
            raise ValueError("not in the cache")
        for file, content in FILES.items():
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_bytes(content)
        return str(tmp_path)

    fake = types.SimpleNamespace(dataset_snapshot_download=dataset_snapshot_download)
    monkeypatch.setitem(sys.modules, "modelscope", fake)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    source = parse_source("ms::o/n@v2:extra#3")
    assert [file.name for file in source.files] == ["ms::o/n/other/a.jsonl"] and source.count == 3
    assert calls[0]["name"] == "o/n" and calls[0]["revision"] == "v2" and "*.jsonl.zst" in calls[0]["allow_patterns"]
    assert parse_source("ms::o/n@v2:extra#3").files == source.files and len(calls) == 1, "asked once per process"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(NetworkError, match="forbidden"):
        fetch_dataset(HubId("ms", "o/never"), [])
    assert len(fetch_dataset(HubId("ms", "o/cached"), [])) == 2
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(DependencyError, match="modelscope"):
        fetch_dataset(HubId("ms", "o/third"), [])


def test_of_modelscope_only_the_wanted_files_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [{"Path": name, "Type": "blob"} for name in ("README.md", "test/a.jsonl", "x[1].jsonl")]
    listed += [{"Path": "train", "Type": "tree"}]
    listed += [{"Path": f"train/{number:03}.jsonl", "Type": "blob"} for number in range(150)]
    fetched: list[str] = []

    class HubApi:
        def get_dataset_files(self, repo_id: str, recursive: bool, page_number: int, page_size: int) -> list[Any]:
            assert repo_id == "o/large" and recursive
            return listed[(page_number - 1) * page_size : page_number * page_size]

    def dataset_snapshot_download(name: str, *, allow_patterns: list[str], **settings: Any) -> str:
        for entry in listed:
            if any(fnmatch.fnmatch(entry["Path"], pattern) for pattern in allow_patterns):
                fetched.append(entry["Path"])
                (tmp_path / entry["Path"]).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / entry["Path"]).write_text('{"text": "a"}\n')
        return str(tmp_path)

    fake = types.SimpleNamespace(dataset_snapshot_download=dataset_snapshot_download)
    for name, module in {"": fake, ".hub": fake, ".hub.api": types.SimpleNamespace(HubApi=HubApi)}.items():
        monkeypatch.setitem(sys.modules, f"modelscope{name}", module)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    (file,) = fetch_dataset(HubId("ms", "o/large", split="test"), [])
    assert file.name == "ms::o/large/test/a.jsonl" and fetched == ["README.md", "test/a.jsonl"]
    assert len(fetch_dataset(HubId("ms", "o/large"), [])) == 150


def test_a_check_of_names_downloads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swift.data.sources.fetch_dataset", lambda *_: pytest.fail("downloads"))
    assert parse_source("hf::o/n:sub#5", fetch=False).files == ()
    assert parse_source("o/n", fetch=False).files == ()
