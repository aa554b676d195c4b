"""`swift data convert IN --to LAYOUT --output_file OUT`: rows of one layout rewritten as rows of another."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, cast

from swift.config.data import RowsConfig
from swift.config.fields import setting
from swift.config.parse import parse_command_line
from swift.core.errors import UsageError


@dataclass
class ConvertOptions:
    """Conversion"""

    to: str | None = setting(None, help="pairs, binary, sft, embedding, rerank or labelled")
    output_file: str | None = setting(
        None, help="file to write: .jsonl, .jsonl.gz, .jsonl.zst or .parquet", aliases=("output",)
    )
    layout: str | None = setting(
        None, help="how rows are read: pairs, binary, labelled, embedding, rerank or chat; default: as they look"
    )
    json: bool = setting(False, help="print what became of the rows as JSON")


@dataclass
class ConvertConfig:
    """Rewrite rows of one layout as rows of another; each row is used or dropped under a reason."""

    convert: ConvertOptions = field(default_factory=ConvertOptions)
    data: RowsConfig = field(default_factory=RowsConfig)


def convert(arguments: list[str]) -> int:
    """Run the conversion; the exit code is 1 when no row is written."""
    words, files = list(arguments), []
    while words and not words[0].startswith("-"):
        files.append(words.pop(0))
    if files:
        words = ["--dataset", *files, *words]
    usage = "FILE ... --to binary --output_file OUT.jsonl"
    parsed = parse_command_line(ConvertConfig, words, command="data convert", usage=usage)
    config = parsed.config
    options = config.convert
    from swift.data.convert_rows import TARGETS, convert_rows

    if not config.data.dataset:
        raise UsageError("`swift data convert` needs data", fix=f"swift data convert {usage}")
    _require("--to", options.to, TARGETS)
    _require("--layout", options.layout or "chat", ("chat", "pairs", "binary", "labelled", "embedding", "rerank"))
    if not options.output_file:
        raise UsageError("there is no file to write", where="--output_file", fix="--output_file OUT.jsonl")
    report = convert_rows(
        config.data.dataset,
        config.data,
        cast(Any, options.to),
        options.output_file,
        layout=cast(Any, options.layout),
    )
    print(json.dumps(report.summary(), ensure_ascii=False, indent=2) if options.json else report.render())
    return int(not report.written)


def _require(flag: str, value: str | None, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(
            f"{flag} is {value!r}" if value else f"{flag} is missing", where=flag, fix=f"one of {', '.join(known)}"
        )
