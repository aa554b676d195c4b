"""How fast the cleaning operators are, one by one and together, and beside datatrove's and data-juicer's if installed.

    python benchmarks/data/clean.py                     # 50 MB of prose, documents of about 5 kB
    python benchmarks/data/clean.py --mb 20 --peers     # also datatrove's and data-juicer's
    python benchmarks/data/clean.py --html              # also main text extraction, on generated pages

Figures are MB of UTF-8 text per second of CPU time of the whole process (all threads), on documents in batches of 200.
"Together" is a recipe of the six: what one drops, the next doesn't see. "Without drops" has every bound taken away or
out of reach, so each operator sees every document; lines and personal data are still removed.
"""

from __future__ import annotations

import argparse
import html
import importlib.util
import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from prose import prose

from swift.data.engine.document import Document, document_from
from swift.data.engine.operator import OPERATORS, Context, MapOperator
from swift.data.engine.plugins import load_builtin
from swift.data.engine.tally import Tally

SIX = ("normalise", "gopher_quality", "gopher_repetition", "fineweb_quality", "c4_quality", "pii")
OTHERS: dict[str, dict[str, Any]] = {
    "language": {},
    "symbol_ratio": {},
    "length": {"min_words": 1},
    "sample": {"share": 0.5},
    "url_blocklist": {"domains": ["example.com"], "in_text": True},
}
BATCH = 200
JUICER = (
    "word_repetition_filter",
    "character_repetition_filter",
    "special_characters_filter",
    "words_num_filter",
    "fix_unicode_mapper",
    "clean_email_mapper",
    "clean_ip_mapper",
)


def batches_of(texts: list[str]) -> list[list[Document]]:
    rows = [document_from({"text": text}, f"prose:{i}") for i, text in enumerate(texts)]
    return [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]


def opened(name: str, settings: dict[str, Any]) -> MapOperator:
    operator = OPERATORS[name](**settings)
    assert isinstance(operator, MapOperator)
    operator.check()
    operator.open(Context())
    operator.run(batches_of(["A first text, so that kernels are compiled. Schön."])[0], Tally())
    return operator


def unbound(name: str) -> dict[str, Any]:
    """Settings of an operator with which it drops nothing."""
    kind = OPERATORS[name]
    off = {f.name: 1.0 for f in fields(kind) if name.startswith(("gopher", "fineweb")) and f.name.endswith("_share")}
    off |= {f.name: 0.0 for f in fields(kind) if f.name in ("min_line_end_share", "min_alphabetic_word_share")}
    if name == "fineweb_quality":
        off |= {"max_short_line_share": None, "max_duplicate_line_character_share": None, "min_line_end_share": None}
    if name == "gopher_quality":
        off |= {"max_symbol_word_ratio": 1e9, "min_words": 0, "max_words": 10**9, "min_stop_words": 0}
        off |= {"min_mean_word_length": 0, "max_mean_word_length": 1e9}
    if name == "c4_quality":
        off = {"min_sentences": 0, "drop_curly_brackets": False, "drop_lorem_ipsum": False}
    return off


def measure(label: str, texts: list[str], steps: list[MapOperator]) -> None:
    batches = batches_of(texts)
    tallies = [Tally() for _ in steps]
    start = time.process_time()
    left = 0
    for batch in batches:
        for step, tally in zip(steps, tallies):
            if batch:
                batch = step.run(batch, tally)
        left += len(batch)
    seconds = time.process_time() - start
    size = sum(len(text.encode("utf-8", "replace")) for text in texts) / 1e6
    print(f"{label:34s} {size / seconds:8.1f} MB/CPU-s   {left} of {len(texts)} documents left", flush=True)


def measure_peer(label: str, texts: list[str], judge: Callable[[str, int], bool]) -> None:
    start = time.process_time()
    left = sum(judge(text, number) for number, text in enumerate(texts))
    seconds = time.process_time() - start
    size = sum(len(text.encode("utf-8", "replace")) for text in texts) / 1e6
    print(f"{label:34s} {size / seconds:8.1f} MB/CPU-s   {left} of {len(texts)} documents left", flush=True)


def peers(texts: list[str]) -> None:
    """The same rules by datatrove, on as many documents as take a few seconds each."""
    if importlib.util.find_spec("datatrove") is None:
        print("datatrove is not installed")
        return
    from datatrove.data import Document as Theirs
    from datatrove.pipeline.filters import (
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
    )
    from datatrove.pipeline.formatters import PIIFormatter

    filters = (GopherQualityFilter(), GopherRepetitionFilter(), FineWebQualityFilter(), C4QualityFilter())
    few = texts[: max(1, len(texts) // 20)]

    def judge(kind: Any) -> Callable[[str, int], bool]:
        return lambda text, number: kind.filter(Theirs(text=text, id=str(number))) is True

    for kind in filters:
        kind.filter(Theirs(text="A first text, so that models are loaded.", id=""))
        measure_peer(f"datatrove {type(kind).__name__}", few, judge(kind))
    formatter = PIIFormatter()
    measure_peer("datatrove PIIFormatter", few, lambda text, number: bool(formatter.format(text)))


def juicer(texts: list[str]) -> None:
    """data-juicer's operators of the same purpose, on a twentieth of the documents."""
    if importlib.util.find_spec("data_juicer") is None:
        print("data-juicer is not installed")
        return
    from data_juicer.ops import OPERATORS as THEIRS

    few = texts[: max(1, len(texts) // 20)]
    size = sum(len(text.encode("utf-8", "replace")) for text in few) / 1e6
    for name in JUICER:
        importlib.import_module(f"data_juicer.ops.{name.rpartition('_')[2]}.{name}")
        operator = THEIRS.modules[name]()
        batch: dict[str, Any] = {"text": list(few)}
        start = time.process_time()
        if name.endswith("filter"):
            batch["__dj__stats__"] = [{} for _ in few]
            list(operator.process_batched(operator.compute_stats_batched(batch)))
        else:
            operator.process_batched(batch)
        print(f"data-juicer {name:30s} {size / (time.process_time() - start):8.1f} MB/CPU-s", flush=True)


def pages(texts: list[str]) -> list[str]:
    """The texts as HTML pages with a menu and a footer."""
    menu = "<nav><ul>" + "<li><a href='/x'>A page of the site</a></li>" * 30 + "</ul></nav>"
    return [
        f"<html><body>{menu}<div class='content'>"
        + "".join(f"<p>{html.escape(part)}</p>" for part in text.split("\n\n"))
        + "</div><footer>All rights reserved</footer></body></html>"
        for text in texts
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=50.0)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--html", action="store_true")
    options = parser.parse_args()
    load_builtin()
    texts = prose(int(options.mb * 1e6))
    start = time.process_time()
    six = [opened(name, {}) for name in SIX]
    print(f"start of the six operators: {time.process_time() - start:.2f} CPU-s")
    for step, name in zip(six, SIX):
        measure(name, texts, [step])
    for name, settings in OTHERS.items():
        measure(name, texts, [opened(name, settings)])
    measure("together", texts, six)
    measure("together, without drops", texts, [opened(name, unbound(name)) for name in SIX])
    if options.html:
        measure("html_main_text", pages(texts[: len(texts) // 5]), [opened("html_main_text", {})])
    if options.peers:
        peers(texts)
        juicer(texts)


if __name__ == "__main__":
    main()
