"""Megabytes of text per CPU-second for each transform of swift.data.augment that runs without a model.

    OMP_NUM_THREADS=1 python benchmarks/data/augment_texts.py [--megabytes 50]

The text is generated: English-like sentences over the words of the shipped table, 2 kB a row, every twentieth row with
code, a link and numbers. Process CPU time, one process; loading the table is not counted.
"""

from __future__ import annotations

import argparse
import random
import time

from swift.data.augment import build_augmenter
from swift.data.augment.language import FUNCTION_WORDS
from swift.data.augment.synonyms import shipped_table

NAMES = (
    "synonym_replacement",
    "random_insertion",
    "random_swap",
    "random_deletion",
    "keyboard_typo",
    "ocr_noise",
    "clause_reorder",
    "sentence_shuffle",
    "contraction",
)
EXTRA = "\n```py\nx = 1\n```\nSee https://example.org/a?b=1 for the 42 values of {{NAME}}."


def corpus(num_bytes: int) -> list[str]:
    """Rows of about 2 kB."""
    draw = random.Random(1)
    words = sorted(word for word in shipped_table().lines if len(word) < 9)
    small = sorted(FUNCTION_WORDS)
    rows: list[str] = []
    size = 0
    while size < num_bytes:
        sentences = []
        while sum(map(len, sentences)) < 2000:
            chosen = [draw.choice(small if draw.random() < 0.5 else words) for _ in range(draw.randrange(6, 18))]
            sentences.append(" ".join(chosen).capitalize() + draw.choice([".", ".", "?"]))
        row = " ".join(sentences) + (EXTRA if len(rows) % 20 == 0 else "")
        rows.append(row)
        size += len(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=float, default=50)
    rows = corpus(int(parser.parse_args().megabytes * 1e6))
    megabytes = sum(map(len, rows)) / 1e6
    print(f"{len(rows):,} rows, {megabytes:.1f} MB\n{'transform':<22}{'MB/CPU-s':>9}{'rows/CPU-s':>12}{'changed':>9}")
    for name in NAMES:
        counted = {} if name in ("clause_reorder", "sentence_shuffle", "contraction") else {"share": 0.05}
        augmenter = build_augmenter({"text": {name: counted}})
        augmenter("The quick warm-up of a house.")
        start = time.process_time()
        changed = 0
        for number, row in enumerate(rows):
            changed += augmenter(row, row_id=number) != row
        took = time.process_time() - start
        print(f"{name:<22}{megabytes / took:>9.2f}{len(rows) / took:>12,.0f}{changed / len(rows):>9.1%}")


if __name__ == "__main__":
    main()
