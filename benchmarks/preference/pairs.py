"""Write the benchmark's preference pairs: questions about the Python standard library, and two answers to each.

    python benchmarks/preference/pairs.py pairs.jsonl [--rows 500] [--quoted 0.0]

The chosen answer is the thing's own docstring or source, the rejected one is another thing's, so their lengths differ
as those of two people's answers do; three rows in ten have a system prompt. `--quoted` is the share of questions that
quote the source they ask about: long prompts, as people have who ask about a text. Texts are cut so that no sequence
is longer than 512 tokens. The text is Python's (PSF-2.0), read from the running interpreter, so nothing is shipped.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from sft_data import MODULES, answers

LONGEST, QUOTE = 1320, 700  # characters at most of a question with an answer, and of what it quotes
SYSTEM = "You are a careful Python teacher."
Message = dict[str, str]


def rows(count: int = 500, quoted: float = 0.0) -> Iterator[tuple[list[Message], str, str]]:
    """(messages of the prompt, chosen, rejected); the same ones every time for one Python version."""
    chance = random.Random(0)
    known = answers()
    chance.shuffle(known)
    texts = _quotes() if quoted else []
    chance.shuffle(texts)
    for number in range(count):
        question, chosen = known[number % len(known)]
        if chance.random() < quoted:
            source, chosen = texts[number % len(texts)]
            question = f"What does this do?\n\n```python\n{source}\n```"
        rejected = known[(number + len(known) // 2) % len(known)][1]
        room = LONGEST - len(question)
        messages = [{"role": "user", "content": question}]
        if chance.random() < 0.3:
            messages.insert(0, {"role": "system", "content": SYSTEM})
        yield messages, chosen[:room], rejected[:room]


def _quotes() -> list[tuple[str, str]]:
    """Sources of functions with a docstring, without it, and the docstring."""
    found = []
    for module in MODULES.split():
        for name, thing in sorted(vars(sys.modules[module]).items()):
            text = inspect.getdoc(thing) if inspect.isfunction(thing) and not name.startswith("_") else None
            if not text:
                continue
            source = _source(thing)
            bare = source.replace(thing.__doc__, "", 1).replace(6 * '"', "...", 1)
            if bare != source and len(bare) > 200:
                found.append((bare[:QUOTE], text))
    return found


def _source(function: object) -> str:
    try:
        return inspect.getsource(function)  # type: ignore[arg-type]
    except OSError:
        return ""


def write(path: Path, rows_wanted: int = 500, quoted: float = 0.0, *, form: str = "messages") -> Path:
    """Write pairs as jsonl.

    Args:
        form: `messages`, with the rejected answer in `rejected_response` (swift, ms-swift), or `prompt` with `chosen`
            and `rejected` (TRL).
    """
    with path.open("w") as file:
        for prompt, chosen, rejected in rows(rows_wanted, quoted):
            answer = [{"role": "assistant", "content": chosen}]
            row: dict[str, object]
            if form == "messages":
                row = {"messages": prompt + answer, "rejected_response": rejected}
            else:
                row = {"prompt": prompt, "chosen": answer, "rejected": [{"role": "assistant", "content": rejected}]}
            file.write(json.dumps(row) + "\n")
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--quoted", type=float, default=0.0)
    parser.add_argument("--form", choices=("messages", "prompt"), default="messages")
    chosen_options = parser.parse_args()
    write(chosen_options.path, chosen_options.rows, chosen_options.quoted, form=chosen_options.form)
