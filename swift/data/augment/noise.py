"""Noise in single characters: what fingers do on a keyboard, and what a scanner makes of print.

Both work on Latin letters inside words, in any language, and leave protected spans alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal

from swift.config.fields import setting
from swift.data.augment.text import Words, is_latin
from swift.data.augment.transform import TRANSFORMS, Request, Unchanged, WordTransform

_ROWS = {
    "qwerty": ("qwertyuiop", "asdfghjkl", "zxcvbnm"),
    "qwertz": ("qwertzuiop", "asdfghjkl", "yxcvbnm"),
    "azerty": ("azertyuiop", "qsdfghjklm", "wxcvbn"),
}
_ROW_OFFSETS = (0.0, 0.25, 0.75)  # in widths of a key


@cache
def neighbours(layout: str) -> dict[str, str]:
    """For each letter the letters on the keys that touch its key."""
    where = {c: (x + _ROW_OFFSETS[y], y) for y, row in enumerate(_ROWS[layout]) for x, c in enumerate(row)}
    return {
        c: "".join(d for d, (u, v) in sorted(where.items()) if d != c and abs(v - y) <= 1 and abs(u - x) <= 1)
        for c, (x, y) in where.items()
    }


@TRANSFORMS.register("keyboard_typo")
@dataclass(kw_only=True)
class KeyboardTypo(WordTransform):
    """Makes a typing error in n words: a neighbouring key, a letter left out, doubled, or exchanged with the next."""

    name: ClassVar[str] = "keyboard_typo"

    layout: Literal["qwerty", "qwertz", "azerty"] = setting("qwerty", help="keyboard: qwerty, qwertz or azerty")
    kinds_of_error: list[str] = setting(
        help="which errors", factory=lambda: ["neighbour", "omission", "doubling", "transposition"]
    )
    min_length: int = setting(4, help="shorter words are left alone; the first letter of a word always is")

    def check(self) -> None:
        super().check()
        self.require(self.min_length >= 2, "min_length", "must be at least 2")
        known = set(_ERRORS)
        fine = bool(self.kinds_of_error) and set(self.kinds_of_error) <= known
        self.require(fine, "kinds_of_error", f"must list some of {', '.join(_ERRORS)}")

    def rewrite(self, request: Request) -> str:
        if not is_latin(request.text):
            raise Unchanged("unsupported_language")
        words, rng = Words.of(request.text, self.kinds), request.rng
        able = [place for place in words.free if len(words.parts[place]) >= self.min_length]
        wanted = self.number(len(words.free))
        for index in rng.permutation(len(able)):
            if wanted <= 0:
                break
            place = able[index]
            before = words.parts[place]
            error = self.kinds_of_error[rng.integers(len(self.kinds_of_error))]
            letters = [i for i in range(1, len(before)) if before[i].lower() in neighbours(self.layout)]
            if error == "transposition":
                letters = [i for i in letters if i + 1 in letters and before[i] != before[i + 1]]
            if not letters:
                continue
            at = letters[rng.integers(len(letters))]
            near = neighbours(self.layout)[before[at].lower()]
            key = near[rng.integers(len(near))]
            words.parts[place] = _ERRORS[error](before, at, key.upper() if before[at].isupper() else key)
            wanted -= words.parts[place] != before
        return str(words)


_ERRORS = {
    "neighbour": lambda word, at, key: word[:at] + key + word[at + 1 :],
    "omission": lambda word, at, _: word[:at] + word[at + 1 :],
    "doubling": lambda word, at, _: word[: at + 1] + word[at:],
    "transposition": lambda word, at, _: word[:at] + word[at + 1] + word[at] + word[at + 2 :],
}

# shapes that print makes look alike; each line holds for both directions where both are written out
_LOOKALIKES = {
    "rn": ("m",), "m": ("rn",), "cl": ("d",), "d": ("cl",), "vv": ("w",), "w": ("vv",), "li": ("h",), "h": ("b", "li"),
    "l": ("1", "I"), "I": ("l", "1"), "i": ("l", "j"), "o": ("0",), "O": ("0",), "e": ("c",), "c": ("e",), "a": ("o",),
    "s": ("5",), "S": ("5",), "B": ("8",), "g": ("q", "9"), "q": ("g",), "u": ("ii", "v"), "n": ("ri",), "t": ("f",),
    "f": ("t",), "b": ("h",), "Z": ("2",), "z": ("2",), "ri": ("n",), "ii": ("u",), "nn": ("mi",), "fi": ("h",),
    "D": ("O",), "E": ("F",), "G": ("6",), "y": ("v",), "v": ("y",),
}  # fmt: skip


@TRANSFORMS.register("ocr_noise")
@dataclass(kw_only=True)
class OcrNoise(WordTransform):
    """Misreads n words as a scanner would: one letter or pair of letters becomes another that looks like it."""

    name: ClassVar[str] = "ocr_noise"

    def rewrite(self, request: Request) -> str:
        if not is_latin(request.text):
            raise Unchanged("unsupported_language")
        words, rng = Words.of(request.text, self.kinds), request.rng
        wanted = self.number(len(words.free))
        for index in rng.permutation(len(words.free)):
            if wanted <= 0:
                break
            place = words.free[index]
            word = words.parts[place]
            spots = [
                (i, k)
                for i in range(len(word))
                for k in (1, 2)
                if i + k <= len(word) and word[i : i + k] in _LOOKALIKES
            ]
            if not spots:
                continue
            at, size = spots[rng.integers(len(spots))]
            choices = _LOOKALIKES[word[at : at + size]]
            words.parts[place] = word[:at] + choices[rng.integers(len(choices))] + word[at + size :]
            wanted -= 1
        return str(words)
