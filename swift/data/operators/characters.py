"""What kind of character each code point is, as one table that kernels and plain code share.

Scripts that are written without spaces (`swift.data.scripts`) have no words between spaces: each of their letters is a
word of its own, so that rules about numbers of words don't drop such texts.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from swift.data.scripts import UNSPACED_BLOCKS

SPACE = 1
ALPHA = 2
ALNUM = 4
UNSPACED = 8  # a letter of a script without spaces
BULLET = 16
DASH_BULLET = 32  # a bullet where white space follows
SENTENCE_END = 64
WIDE_END = 128  # ends a sentence without a space behind it
CLOSING = 256  # may stand between the end of a sentence and the space
C4_END = 512
LINE_END = 1024

BULLETS = "•‣⁃◦∙●○▪▫■□▶►◀◆◇★☆✓✔➢➤→·–—"
DASHES = "-*+"
ENDS = ".!?…‽؟۔।॥։።፧၊။៕"
WIDE_ENDS = "。！？｡．"
CLOSERS = "\"'”’»)]}」』）】》›"
C4_ENDS = '.!?"' + "”" + "。！？｡」』…؟۔।"
LINE_ENDS = ENDS + WIDE_ENDS + "\"'”’»」』;:)" + "）；："
TABLE_SIZE = 0x32400  # no letter, digit or space lies beyond


@cache
def character_table() -> np.ndarray:
    """The bits above for each code point below `TABLE_SIZE`, uint16."""
    table = np.zeros(TABLE_SIZE, np.uint16)
    characters = list(map(chr, range(TABLE_SIZE)))
    table[[c.isspace() for c in characters]] |= SPACE
    table[[c.isalpha() for c in characters]] |= ALPHA
    table[[c.isalnum() for c in characters]] |= ALNUM
    for first, last in UNSPACED_BLOCKS:  # what is a letter in them
        block = table[first : last + 1]
        block[(block & ALPHA) != 0] |= UNSPACED
    sets = (
        (BULLETS, BULLET),
        (DASHES, DASH_BULLET),
        (ENDS, SENTENCE_END),
        (WIDE_ENDS, SENTENCE_END | WIDE_END),
        (CLOSERS, CLOSING),
        (C4_ENDS, C4_END),
        (LINE_ENDS, LINE_END),
    )
    for members, bits in sets:
        table[list(map(ord, members))] |= bits
    return table


def kind(character: str) -> int:
    """The bits of one character."""
    code = ord(character)
    return int(character_table()[code]) if code < TABLE_SIZE else 0
