"""A corpus of real English prose that every machine with this environment can build: the documentation inside packages.

Takes the docstrings and package descriptions of what is installed, in name order, joined to documents of about 5 kB; a
run of a given size always gets the same documents from the same environment. Every tenth document gets synthetic lines
that web text has and documentation hasn't: menus, addresses, numbers, repetition.
"""

from __future__ import annotations

import ast
import random
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

_MENU = ["Home", "About us", "Contact", "Login", "Share this", "Read more ...", "Next page", "Subscribe now!"]


def prose(target_bytes: int, *, document_bytes: int = 5000, seed: int = 0) -> list[str]:
    """Documents of `document_bytes` or a little more, `target_bytes` together; begins anew where the source ends."""
    rng = random.Random(seed)
    pieces = list(_pieces(Path(sysconfig.get_paths()["purelib"]), min(target_bytes, 12_000_000)))
    documents: list[str] = []
    total = 0
    current: list[str] = []
    size = 0
    while total < target_bytes:
        for piece in pieces:
            current.append(piece)
            size += len(piece)
            if size < document_bytes:
                continue
            if len(documents) % 10 == 9:
                current += _web_lines(rng)
            documents.append("\n\n".join(current))
            total += size
            current, size = [], 0
            if total >= target_bytes:
                break
        rng.shuffle(pieces)
    return documents


def _pieces(folder: Path, enough: int) -> Iterator[str]:
    total = 0
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".py":
            found = _docstrings(path)
        elif path.name == "METADATA" or path.suffix in (".md", ".rst"):
            found = [path.read_text(encoding="utf-8", errors="replace")[:20_000]]
        else:
            continue
        for text in found:
            if len(text) > 200:
                total += len(text)
                yield text
        if total > enough:
            return


def _docstrings(path: Path) -> list[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [text for node in ast.walk(tree) if isinstance(node, kinds) and (text := ast.get_docstring(node))]


def _web_lines(rng: random.Random) -> list[str]:
    number = rng.randrange(10**6)
    return [
        "\n".join(rng.choices(_MENU, k=8)),
        f"Write to user{number}@mail.example.com or call +1 415 555 {number % 10000:04d}. Server 8.8.{number % 256}.4.",
        f"Version 2.{number % 90}.1 was released on 2023-04-{number % 28 + 1:02d}, commit {number:06x}{number:06x}.",
        "It’s a “quoted” caf\u00c3\u00a9 \u2013 na\u00efve r\u00e9sum\u00e9\u200b.\r\n" * (number % 3),
    ]
