"""Write the benchmark's conversations: questions about the Python standard library, answered by its own docstrings.

    python benchmarks/sft_data.py rows.jsonl

2,000 rows of one to three turns, three in ten with a system prompt; the lengths are those of chat data (median about
110 tokens, some above 4,000). The text is Python's (PSF-2.0), read from the running interpreter, so nothing is shipped.
"""

from __future__ import annotations

import importlib
import inspect
import json
import random
import sys
from pathlib import Path

MODULES = """
os json re random statistics collections itertools functools heapq bisect textwrap shutil tempfile pathlib csv
datetime calendar argparse logging socket subprocess threading queue urllib.parse http.client email.message
xml.dom.minidom zipfile tarfile fractions decimal contextlib inspect ast dis pickle copy types typing string
difflib unittest.mock asyncio.tasks concurrent.futures.thread http.server configparser ipaddress mailbox imaplib
smtplib ftplib pdb doctest tokenize traceback warnings weakref
"""


def answers() -> list[tuple[str, str]]:
    """(question, answer) pairs: what something does, and its source."""
    found: list[tuple[str, str]] = []
    seen: set[int] = set()

    def visit(name: str, thing: object, depth: int) -> None:
        if id(thing) in seen or not callable(thing):
            return
        seen.add(id(thing))
        text = inspect.getdoc(thing)
        if text and len(text) > 40:
            found.append((f"What does `{name}` do?", text))
        if inspect.isfunction(thing):
            try:
                source = inspect.getsource(thing)
            except OSError:
                source = ""
            if source:
                found.append((f"Show me the source code of `{name}`.", f"```python\n{source}\n```"))
        if inspect.isclass(thing) and depth == 0:
            for child, value in vars(thing).items():
                if not child.startswith("__"):
                    visit(f"{name}.{child}", value, depth + 1)

    for module_name in MODULES.split():
        for name, thing in sorted(vars(importlib.import_module(module_name)).items()):
            if not name.startswith("_"):
                visit(f"{module_name}.{name}", thing, 0)
    return found


def write(path: Path, rows: int = 2000) -> Path:
    """Write `rows` conversations; the same ones every time for one Python version."""
    chance = random.Random(0)
    pairs = answers()
    chance.shuffle(pairs)
    at = 0
    with path.open("w") as file:
        for _ in range(rows):
            messages = []
            turns = chance.choice([1, 1, 1, 2, 3])
            if chance.random() < 0.3:
                messages.append({"role": "system", "content": "You are a careful Python teacher."})
            for _ in range(turns):
                question, answer = pairs[at % len(pairs)]
                at += 1
                messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


if __name__ == "__main__":
    write(Path(sys.argv[1]))
