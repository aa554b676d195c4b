"""Transforms of clauses and sentences: clauses exchanged, sentences shuffled, contractions made and undone."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from swift.config.fields import setting
from swift.data.augment.language import FUNCTION_WORDS
from swift.data.augment.synonyms import shipped_table
from swift.data.augment.text import capitalised, kept_spans, like, paragraphs, sentences, uncapitalised
from swift.data.augment.transform import TRANSFORMS, Request, Transform, Unchanged

# --- clauses ---

_SUBORDINATORS = (
    "even though|as soon as|as long as|now that|although|because|whenever|whereas|unless|though|before|after|until|"
    "while|since|when|once|if"
)
_FIRST = re.compile(
    rf"(?P<link>{_SUBORDINATORS})(?P<clause> [^,;:—]+), (?:then )?(?P<main>[^,;:—]+)(?P<end>[.!?]+)", re.I
)
# a clause behind its main clause: only links that can't be part of the main clause (`I wonder if`, `the day when`)
_LAST = re.compile(
    r"(?P<main>[^,;:—?]+) (?P<link>because|although|even though|whereas|unless)(?P<clause> [^,;:—?]+)(?P<end>[.!])"
)
_NEGATION = re.compile(r"(?i)\b(?:not|no|never|nor|neither|none|hardly|scarcely|cannot)\b|n['’]t\b")
_NO_CLAUSE = re.compile(r"(?i) (?:of|then|so|not|only|all|possible|necessary|needed|any)\b")
_LONGEST = 1000  # characters of a sentence that is looked at: searching takes quadratic time
_SMALL = re.compile(rf"(?i)\b(?:{_SUBORDINATORS})\b")


@TRANSFORMS.register("clause_reorder")
@dataclass(kw_only=True)
class ClauseReorder(Transform):
    """Exchanges a main clause and a subordinate one: `If it rains, we stay.` and `We stay if it rains.`

    Only sentences of two clauses whose border is certain are touched; both directions.
    """

    name: ClassVar[str] = "clause_reorder"
    english_only: ClassVar[bool] = True

    n: int | None = setting(None, help="sentences to change; null: all that can be")

    def check(self) -> None:
        super().check()
        self.require(self.n is None or self.n >= 0, "n", "must be at least 0")

    def rewrite(self, request: Request) -> str:
        pieces: list[str] = []
        able: dict[int, str] = {}
        for piece, free in paragraphs(request.text, self.kinds):
            if not free:
                pieces.append(piece)
                continue
            found, gaps = sentences(piece, self.kinds)
            for sentence, gap in zip(found, gaps):
                pieces.append(gap)
                changed = self._reorder(sentence)
                if changed:
                    able[len(pieces)] = changed
                pieces.append(sentence)
            pieces.append(gaps[-1])
        if not able:
            raise Unchanged("nothing_to_change")
        places = list(able)
        count = len(places) if self.n is None else min(self.n, len(places))
        for index in request.rng.permutation(len(places))[:count]:
            pieces[places[index]] = able[places[index]]
        return "".join(pieces)

    def _reorder(self, sentence: str) -> str | None:
        """The sentence with its clauses exchanged; None where that isn't certain to be right."""
        if len(sentence) > _LONGEST:
            return None
        match = _FIRST.fullmatch(sentence)
        last = None if match else _LAST.fullmatch(sentence)
        found = match or last
        if not found or _NO_CLAUSE.match(found["clause"]) or len(found["clause"].split()) < 2:
            return None
        link, clause, main, end = found["link"], found["clause"], found["main"], found["end"]
        borders = {found.start(g) for g in ("clause", "main")} | {found.end("main")}
        if any(low < at < high for low, high in kept_spans(sentence, self.kinds) for at in borders):
            return None
        if _SMALL.search(main) or _SMALL.search(clause):
            return None  # a third clause
        if match:
            if len(main.split()) < 2 or re.match(r"(?i)(?:and|or|but|so)\b", main):
                return None
            return f"{capitalised(main)} {link[0].lower()}{link[1:]}{clause}{end}"
        first = main.split()[0]
        small = uncapitalised(first)
        known = small in FUNCTION_WORDS or small in shipped_table()
        if _NEGATION.search(main) or len(main.split()) < 2 or not (first[:1].isupper() and (known or small == first)):
            return None  # `not … because` can be read in two ways; a small first word is no sentence of its own
        return f"{capitalised(link)}{clause}, {small}{main[len(first) :]}{end}"


# --- sentences ---

_ENDED = re.compile(r"[.!?…。！？．؟۔।][\"')\]”’»」』）]*$")


@TRANSFORMS.register("sentence_shuffle")
@dataclass(kw_only=True)
class SentenceShuffle(Transform):
    """Puts the sentences of each paragraph into another order. Works in every language."""

    name: ClassVar[str] = "sentence_shuffle"

    keep_first: bool = setting(False, help="the first sentence of a paragraph stays first")
    keep_last: bool = setting(False, help="the last one stays last")

    def rewrite(self, request: Request) -> str:
        pieces: list[str] = []
        for piece, free in paragraphs(request.text, self.kinds):
            if not free:
                pieces.append(piece)
                continue
            found, gaps = sentences(piece, self.kinds)
            low, high = int(self.keep_first), len(found) - int(self.keep_last)
            moving = found[low:high]
            if len(set(moving)) > 1 and _ENDED.search(found[-1]):
                order = list(request.rng.permutation(len(moving)))
                while [moving[i] for i in order] == moving:
                    order = list(request.rng.permutation(len(moving)))
                found[low:high] = [moving[i] for i in order]
                gaps = _parting(found, gaps)
            pieces += [text for pair in zip(gaps, found) for text in pair]
            pieces.append(gaps[-1])
        changed = "".join(pieces)
        if changed == request.text:
            raise Unchanged("too_short")
        return changed


def _parting(found: list[str], gaps: list[str]) -> list[str]:
    """The gaps, with a space where a sentence that needs one now follows another without."""
    for number in range(1, len(found)):
        if not gaps[number] and found[number - 1][-1:].isascii() and found[number - 1][-1:].isprintable():
            gaps[number] = " "
    return gaps


# --- contractions ---

_HE = "he|she|it|that|there|what|who"
_INVERTED = re.compile(r"(?i)\s+(?:I|you|he|she|it|we|they|this|that|these|those|there|anyone|everyone|someone)\b")
_NEGATABLE = "is|are|was|were|do|does|did|have|has|had|would|could|should|must|need|might"
_NOT = re.compile(
    rf"(?i)(?<![\w'’-])(?P<verb>{_NEGATABLE}|will|can)(?P<space> )?(?<=[a-zA-Z ])not(?![\w'’-])(?! (?:only|just)\b)"
)
_N_T = re.compile(rf"(?i)(?<![\w'’-])(?P<verb>{_NEGATABLE}|wo|ca)n['’]t(?![\w'’-])")
_WORD_AFTER = r"(?= (?:{words})(?![\w'’-])|{more})"
_BE_WORDS = "a|an|the|my|your|his|her|our|their|very|so|quite|really|just|still|also|now|never|always"
_AFTER_BE = _WORD_AFTER.format(words=_BE_WORDS, more=r" [a-z]+ing\b")
_AFTER_BE_OR_NOT = _WORD_AFTER.format(words=_BE_WORDS + "|not", more=r" [a-z]+ing\b")
_AFTER_HAVE = _WORD_AFTER.format(
    words="been|never|already|just|seen|done|had|made|become|taken|always|also", more="(?!)"
)
_AFTER_WILL = _WORD_AFTER.format(
    words="be|have|do|go|see|get|make|take|give|let|know|find|want|use|try|come|work|tell|help|need|never|always|also",
    more="(?!)",
)
_LONG: list[tuple[re.Pattern[str], str]] = [
    (re.compile(rf"(?i)(?<![\w'’-])(?P<subject>I)(?P<verb> am){_AFTER_BE_OR_NOT}"), "'m"),
    (re.compile(rf"(?i)(?<![\w'’-])(?P<subject>you|we|they)(?P<verb> are){_AFTER_BE}"), "'re"),
    (re.compile(rf"(?i)(?<![\w'’-])(?P<subject>{_HE})(?P<verb> is){_AFTER_BE}"), "'s"),
    (re.compile(rf"(?i)(?<![\w'’-])(?P<subject>I|you|we|they)(?P<verb> have){_AFTER_HAVE}"), "'ve"),
    (re.compile(rf"(?i)(?<![\w'’-])(?P<subject>I|you|he|she|it|we|they)(?P<verb> will){_AFTER_WILL}"), "'ll"),
]
_SHORT: list[tuple[re.Pattern[str], str]] = [
    (re.compile(r"(?i)(?<![\w'’-])(?P<subject>I)['’](?P<verb>m)(?![\w'’-])"), " am"),
    (re.compile(r"(?i)(?<![\w'’-])(?P<subject>you|we|they)['’](?P<verb>re)(?![\w'’-])"), " are"),
    # 's is `is`, `has` or a possessive: only where what follows leaves no doubt
    (
        re.compile(rf"(?i)(?<![\w'’-])(?P<subject>{_HE})['’](?P<verb>s){_AFTER_BE_OR_NOT}(?! \w+ing of)"),
        " is",
    ),
    (re.compile(r"(?i)(?<![\w'’-])(?P<subject>I|you|we|they)['’](?P<verb>ve)(?![\w'’-])"), " have"),
    (re.compile(r"(?i)(?<![\w'’-])(?P<subject>I|you|he|she|it|we|they)['’](?P<verb>ll)(?![\w'’-])"), " will"),
]


@TRANSFORMS.register("contraction")
@dataclass(kw_only=True)
class Contraction(Transform):
    """Contracts (`do not` to `don't`, `we are` to `we're`) or expands; a negation always stays a negation.

    Forms that can be read in two ways are left alone: `he'd`, a final `it is`, `Don't you`, `not only`.
    """

    name: ClassVar[str] = "contraction"
    english_only: ClassVar[bool] = True

    direction: Literal["both", "contract", "expand"] = setting(
        "both", help="contract, expand, or whichever is drawn for a text"
    )
    n: int | None = setting(None, help="places to change; null: all that can be")

    def check(self) -> None:
        super().check()
        self.require(self.n is None or self.n >= 0, "n", "must be at least 0")

    def rewrite(self, request: Request) -> str:
        text = request.text
        found = {way: self._places(text, way) for way in ("contract", "expand")}
        ways = [way for way in found if self.direction in ("both", way) and found[way]]
        if not ways:
            raise Unchanged("nothing_to_change")
        edits = found[ways[request.rng.integers(len(ways))]]
        count = len(edits) if self.n is None else min(self.n, len(edits))
        chosen = sorted(edits[index] for index in request.rng.permutation(len(edits))[:count])
        pieces, end = [], 0
        for start, stop, new in chosen:
            if start >= end:  # `it is not` is one place for two rules
                pieces += [text[end:start], new]
                end = stop
        return "".join(pieces) + text[end:]

    def _places(self, text: str, way: str) -> list[tuple[int, int, str]]:
        """(start, end, new text) of every place that can be changed that way; they don't overlap."""
        mark = "’" if "’" in text and "'" not in text else "'"
        if way == "expand" and "'" not in text and "’" not in text:
            return []
        kept = kept_spans(text, self.kinds)
        negations, rules = (_NOT, _LONG) if way == "contract" else (_N_T, _SHORT)
        edits = [(*m.span(), new) for m in negations.finditer(text) if (new := _NEGATIONS[way](m, mark))]
        for pattern, ending in rules:
            for match in pattern.finditer(text):
                if match["subject"].isupper() and match["subject"] != "I":
                    continue
                new = match["subject"] + ending.replace("'", mark)
                edits.append((match.start(), match.end(), new))
        free: list[tuple[int, int, str]] = []
        position = 0
        for start, stop, new in sorted(edits):
            while position < len(kept) and kept[position][1] <= start:
                position += 1
            inside = position < len(kept) and kept[position][0] < stop
            if not inside and (not free or start >= free[-1][1]):
                free.append((start, stop, new))
        return free


def _contracted(match: re.Match[str], mark: str) -> str | None:
    verb, found = match["verb"], match.group()
    if found.isupper() or found[-3:] != "not":  # emphasis
        return None
    if (not match["space"]) != (verb.lower() == "can" and found.lower() == "cannot"):
        return None
    if _INVERTED.match(match.string, match.end()):
        return None
    irregular = {"will": "wo", "can": "ca"}.get(verb.lower())
    return (like(irregular, verb) if irregular else verb) + f"n{mark}t"


def _expanded(match: re.Match[str], _mark: str) -> str | None:
    verb = match["verb"]
    if match.group().isupper() or _INVERTED.match(match.string, match.end()):
        return None  # `Don't you` would become `Do not you`
    if verb.lower() == "ca":
        return like("cannot", verb)
    return (like("will", verb) if verb.lower() == "wo" else verb) + " not"


_NEGATIONS: dict[str, Callable[[re.Match[str], str], str | None]] = {"contract": _contracted, "expand": _expanded}
