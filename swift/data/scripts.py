"""Scripts that are written without spaces between words: the one table of them.

Whoever counts words takes each of their letters for one (quality rules), each character for a token (near-duplicates),
or a character with its marks for a word (augmentation).
"""

from __future__ import annotations

UNSPACED_BLOCKS = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x0F00, 0x0FFF),  # Tibetan
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x2E80, 0x2FDF),  # radicals
    (0x3005, 0x3007),  # iteration mark, closing mark, zero
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x31F0, 0x31FF),  # Katakana, for Ainu
    (0x3400, 0x4DBF),  # Han
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0xFF66, 0xFF9F),  # half-width Katakana
    (0x20000, 0x3FFFF),  # Han, the later planes
)
UNSPACED_RANGES = "".join(f"{chr(first)}-{chr(last)}" for first, last in UNSPACED_BLOCKS)  # for `[…]` in expressions
