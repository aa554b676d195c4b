"""`swift export --to_cached_dataset`: the same examples as training encodes; what doesn't fit a run is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swift.commands.export import export_dataset, main
from swift.config import ExportConfig, PtConfig, SftConfig, build_config
from swift.config.data import DataConfig, TemplateConfig
from swift.core.errors import CheckpointError, DataError, SwiftError, UsageError
from swift.data.dataset import Prepared, prepare_datasets
from swift.data.encoding.encode import ChatEncoder

Rows = Callable[[int], list[dict]]
Write = Callable[..., Path]
Export = Callable[..., Path]


@pytest.fixture
def rows(chat_rows: Rows, write_rows: Write, tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", chat_rows(30))


@pytest.fixture
def export(tiny_model_dir: Path, tmp_path: Path, rows: Path) -> Export:
    def run(**flags: Any) -> Path:
        settings = {"model": str(tiny_model_dir), "dataset": [str(rows)], "max_length": 256, "to_cached_dataset": True}
        settings |= {"output_dir": str(tmp_path / "out"), **flags}
        return export_dataset(build_config(ExportConfig, settings))

    return run


def read(tokenizer: Any, template: dict | None = None, seed: int = 42, **data: Any) -> Prepared:
    config = TemplateConfig(**{"max_length": 256, **(template or {})})
    return prepare_datasets(DataConfig(**data), config, ChatEncoder(tokenizer, config), seed=seed)


def content(dataset: Any) -> list:
    return [(ids.tolist(), weights.tolist(), str(dataset.ref(i))) for i, (ids, weights) in enumerate(dataset)]


@pytest.mark.parametrize("flags", [{}, {"split_dataset_ratio": 0.2}, {"dataset_shuffle": False}], ids=str)
def test_the_examples_are_those_of_the_rows(export: Export, tokenizer: Any, rows: Path, flags: dict) -> None:
    out = export(**flags)
    fresh = read(tokenizer, dataset=[str(rows)], **flags)
    cached = read(tokenizer, cached_dataset=[str(out)])
    assert content(cached.train) == content(fresh.train)
    assert cached.train.digest() == fresh.train.digest()
    assert (cached.val is None) == (fresh.val is None)
    if fresh.val is not None and cached.val is not None:
        assert content(cached.val) == content(fresh.val) and len(cached.val) == 6
        apart = read(tokenizer, cached_dataset=[f"{out}/train"], cached_val_dataset=[f"{out}/val"])
        assert content(apart.train) == content(fresh.train) and content(apart.val) == content(fresh.val)
        assert read(tokenizer, cached_dataset=[f"{out}/train"]).val is None
    assert not list(out.glob(".building")) and (out / "ledger.jsonl").is_file()


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("count", [7, 30, 75])
def test_counts_take_the_rows_that_a_file_would_give(
    export: Export, tokenizer: Any, rows: Path, count: int, shuffle: bool
) -> None:
    out = export()
    fresh = read(tokenizer, dataset=[f"{rows}#{count}"], dataset_shuffle=shuffle)
    cached = read(tokenizer, cached_dataset=[f"{out}#{count}"], dataset_shuffle=shuffle)
    assert content(cached.train) == content(fresh.train)
    tally = cached.ledger.sources[0]
    assert (tally.kept, tally.repeated, tally.examples) == (min(count, 30), max(0, count - 30), count)


def test_joined_and_split(export: Export, tokenizer: Any, rows: Path, chat_rows: Rows, write_rows: Write) -> None:
    more = write_rows(rows.with_name("more.jsonl"), chat_rows(45)[30:])
    out = export(dataset=[str(more)])
    fresh = read(tokenizer, dataset=[str(rows), str(more)], split_dataset_ratio=0.2)
    joined = read(tokenizer, dataset=[str(rows)], cached_dataset=[str(out)], split_dataset_ratio=0.2)
    assert joined.val is not None and fresh.val is not None and len(joined.val) == 9
    assert content(joined.train) == content(fresh.train) and content(joined.val) == content(fresh.val)
    assert [tally.source for tally in joined.ledger.sources] == [str(rows), str(out)]
    twice = read(tokenizer, cached_dataset=[str(out), f"{out}#3"])
    assert len(twice.train) == 18


def test_plain_text_for_pt(
    export: Export, tiny_model_dir: Path, tokenizer: Any, write_rows: Write, tmp_path: Path
) -> None:
    texts = write_rows(tmp_path / "text.jsonl", ({"text": f"number {i} " * (3 + 9 * (i % 4))} for i in range(20)))
    out = export(dataset=[str(texts)], cached_for="pt", max_length=16)
    config = PtConfig().template
    config.max_length = 16
    encoder = ChatEncoder(tokenizer, config)
    fresh, cached = (
        prepare_datasets(DataConfig(**{name: [str(place)]}), config, encoder, seed=42)
        for name, place in (("dataset", texts), ("cached_dataset", out))
    )
    assert content(cached.train) == content(fresh.train) and len(cached.train) > 20
    manifest = json.loads((out / "train" / "manifest.json").read_text())
    assert manifest["shards"][0]["weights"] == "ones" and manifest["shards"][0]["dtype"] == "uint16"
    assert (manifest["rows"], manifest["examples"]) == (20, len(fresh.train))


# --- refusals ---


@pytest.mark.parametrize(
    ("template", "words", "fix"),
    [
        ({"max_length": 257}, "max_length is 256 in the shards and 257 here", "--max_length 256"),
        ({"loss_scale": "all"}, "loss_scale is default in the shards and all here", "--loss_scale default"),
        ({"truncation_strategy": "left"}, "truncation_strategy", "--truncation_strategy delete"),
        ({"history_turns": "mask"}, "history_turns", "--history_turns split"),
        ({"system": "Be brief."}, "the system prompt", "swift export"),
        ({"use_chat_template": False}, "use_chat_template is true in the shards", "--use_chat_template true"),
        ({"add_non_thinking_prefix": False}, "add_non_thinking_prefix", "--add_non_thinking_prefix true"),
    ],
    ids=str,
)
def test_other_settings_are_refused_by_name(
    export: Export, tokenizer: Any, template: dict, words: str, fix: str
) -> None:
    out = export()
    with pytest.raises(DataError, match="other settings") as caught:
        read(tokenizer, template, cached_dataset=[str(out)])
    assert words in str(caught.value) and fix in (caught.value.fix or "") and str(out) in (caught.value.where or "")


def test_another_template_text_is_refused(export: Export, tokenizer: Any) -> None:
    out = export()
    tokenizer.chat_template += "\n"
    with pytest.raises(DataError, match="the chat template's text"):
        read(tokenizer, cached_dataset=[str(out)])


def other_rules(tokenizer: Any, part: str) -> Any:
    """The tokenizer with one part of its rules changed."""
    from tokenizers import Tokenizer, normalizers

    if part == "added tokens":
        tokenizer.add_tokens(["<new>"])
    elif part == "normaliser":
        tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    else:
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        if part == "merges":
            rules["model"]["merges"].pop()
        else:
            vocab = rules["model"]["vocab"]
            first, second = sorted(vocab)[300:302]
            vocab[first], vocab[second] = vocab[second], vocab[first]
        tokenizer._tokenizer = Tokenizer.from_str(json.dumps(rules))
    return tokenizer


@pytest.mark.parametrize("part", ["added tokens", "normaliser", "merges", "vocabulary"])
def test_another_tokenizer_is_refused_by_its_part(export: Export, tokenizer: Any, part: str) -> None:
    out = export()
    with pytest.raises(DataError, match=f"another tokenizer: {part} differs") as caught:
        read(other_rules(tokenizer, part), cached_dataset=[str(out)])
    assert "swift export" in (caught.value.fix or "")


def test_the_same_tokenizer_elsewhere_is_taken(export: Export, tokenizer: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    out = export()
    tokenizer.save_pretrained(tmp_path / "copy")
    assert len(read(AutoTokenizer.from_pretrained(tmp_path / "copy"), cached_dataset=[str(out)]).train) == 30


def test_a_changed_source_is_refused_and_a_touched_or_missing_one_is_not(
    export: Export, tokenizer: Any, rows: Path
) -> None:
    out = export()
    os.utime(rows, ns=(1, 1))  # the same content at another time
    assert len(read(tokenizer, cached_dataset=[str(out)]).train) == 30
    text = rows.read_text()
    rows.write_text(text.replace("paris", "tokio", 1))  # as long as before
    with pytest.raises(DataError, match="has changed") as caught:
        read(tokenizer, cached_dataset=[str(out)])
    assert caught.value.where == str(rows) and "swift export" in (caught.value.fix or "")
    rows.write_text(text + text.splitlines()[0] + "\n")
    with pytest.raises(DataError, match="has changed"):
        read(tokenizer, cached_dataset=[str(out)])
    rows.unlink()
    moved = out.rename(out.with_name("elsewhere"))
    cached = read(tokenizer, cached_dataset=[str(moved)])
    assert len(cached.train) == 30 and any("not at hand" in note for note in cached.ledger.notes)


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("{out}x", DataError, "did you mean"),
        ("{out}#0", UsageError, "rows"),
        ("{out}#many", UsageError, "rows"),
        ("{parent}", DataError, "unfinished, or no folder of token shards"),
    ],
)
def test_arguments_that_cannot_be_meant(
    export: Export, tokenizer: Any, text: str, error: type[SwiftError], words: str
) -> None:
    out = export()
    with pytest.raises(error) as caught:
        read(tokenizer, cached_dataset=[text.format(out=out, parent=out.parent)])
    assert words in str(caught.value)


def test_damage_is_named_when_it_is_read(export: Export, tokenizer: Any) -> None:
    out = export()
    path = out / "train" / "00000.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    train = read(tokenizer, cached_dataset=[str(out)]).train
    with pytest.raises(DataError, match="damaged") as caught:
        content(train)
    assert f"{path}, byte " in (caught.value.where or "")


def test_settings_are_checked_before_anything_is_loaded(tiny_model_dir: Path, tmp_path: Path) -> None:
    from swift.commands.precheck import precheck

    config = build_config(SftConfig, {"model": str(tiny_model_dir), "cached_dataset": [str(tmp_path / "none")]})
    with pytest.raises(UsageError, match="no folder"):
        precheck(config)
    with pytest.raises(UsageError, match="are being built"):
        main(ExportConfig())
    for name in ("output_dir", "model", "dataset"):
        given = {
            "to_cached_dataset": True,
            "dataset": ["x.jsonl"],
            "output_dir": str(tmp_path / "o"),
            "model": str(tiny_model_dir),
            name: [] if name == "dataset" else None,
        }
        with pytest.raises(UsageError, match=f"needs --{name}"):
            main(build_config(ExportConfig, given))


# --- again, at once, and after a kill ---


def stamps(folder: Path) -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def test_again_takes_what_is_there(export: Export, rows: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = export()
    before = stamps(out)
    export(dataset_num_proc=2)  # decides nothing but the time
    assert stamps(out) == before
    with pytest.raises(UsageError, match="other rows or settings") as caught:
        export(max_length=257)
    assert "--exist_ok" in (caught.value.fix or "") and stamps(out) == before
    export(max_length=257, exist_ok=True)
    assert json.loads((out / "train" / "manifest.json").read_text())["encoding"]["max_length"] == 257
    path = out / "train" / "00000.refs"
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(DataError, match="isn't what was written"):
        export(max_length=257)
    (out / "cached_dataset.json").unlink()  # unfinished: made anew
    export(max_length=257)
    rows.write_text(rows.read_text() * 2)
    with pytest.raises(UsageError, match="sources have changed"):
        export(max_length=257)


def test_foreign_folders_stay(export: Export, tmp_path: Path) -> None:
    (tmp_path / "out" / "train").mkdir(parents=True)
    (tmp_path / "out" / "train" / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="no export made"):
        export(exist_ok=True)
    assert (tmp_path / "out" / "train" / "mine.txt").read_text() == "mine"


def test_the_output_of_a_recipe_is_no_unfinished_export(export: Export, tmp_path: Path) -> None:
    """It has a manifest too, and lay where the part of the export would go."""
    train = tmp_path / "out" / "train"
    train.mkdir(parents=True)
    (train / "manifest.json").write_text('{"format": 2, "shards": []}')
    with pytest.raises(UsageError, match="no export made"):
        export()
    assert (train / "manifest.json").is_file()


def test_a_source_that_grows_meanwhile(export: Export, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from swift.data import dataset

    def growing(*args: Any, **kwargs: Any) -> Prepared:
        prepared = prepare_datasets(*args, **kwargs)
        with rows.open("a") as file:
            file.write(rows.read_text().splitlines()[0] + "\n")
        return prepared

    monkeypatch.setattr(dataset, "prepare_datasets", growing)
    with pytest.raises(DataError, match="changed while it was read"):
        export()


def test_two_at_once(export: Export, tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", f"import time; from swift.checkpoint.lock import RunLock; from pathlib import Path\n"
         f"lock = RunLock(Path({str(tmp_path / 'out')!r})); print('held', flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert holder.stdout is not None and holder.stdout.readline()
        with pytest.raises(CheckpointError):
            export()
    finally:
        holder.kill()
        holder.wait()
    export()


@pytest.mark.slow
def test_a_killed_export_is_made_anew(tiny_model_dir: Path, chat_rows: Rows, write_rows: Write, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "big.jsonl", chat_rows(40_000))
    words = [sys.executable, "-m", "swift.cli", "export", "--to_cached_dataset", "true", "--model", str(tiny_model_dir)]
    words += [
        "--dataset",
        str(data),
        "--max_length",
        "64",
        "--output_dir",
        str(tmp_path / "out"),
        "--dataset_num_proc",
        "2",
    ]
    process = subprocess.Popen(words, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    tokens = tmp_path / "out" / ".building" / "train-tokens" / "00000.bin"
    while not (tokens.exists() and tokens.stat().st_size > 100_000):
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out" / "cached_dataset.json").exists()
    refused = subprocess.run(
        [*words[:3], "sft", "--model", str(tiny_model_dir), "--cached_dataset", str(tmp_path / "out")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert refused.returncode == 2 and "unfinished" in refused.stderr + refused.stdout
    assert subprocess.run(words, check=False).returncode == 0
    clean = tmp_path / "clean"
    assert subprocess.run([*words[:-3], str(clean)], check=False).returncode == 0
    for name in ("00000.bin", "00000.idx", "00000.weights", "00000.refs", "00000.sums"):
        assert (clean / "train" / name).read_bytes() == (tmp_path / "out" / "train" / name).read_bytes()
    assert not (tmp_path / "out" / ".building").exists()
    shutil.rmtree(clean)
