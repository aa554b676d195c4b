"""The language of a text, guessed from its small words, so that English word tables are used on English only.

Deliberately simple, with no model and no package: the same answer on every machine. Where a recipe has found the
language out already (the operator `language`), that answer is used instead.
"""

from __future__ import annotations

import re
from collections import Counter

from swift.data.augment.text import is_latin, is_unspaced, word_set
from swift.data.augment.transform import UNKNOWN_LANGUAGE

_SAMPLE = 2000

# the small words of a language; English ones double as the words that are never replaced
FUNCTION_WORDS = word_set(
    """a about above across after again against all almost alone along already also although always am among an and
    another any anybody anyone anything anywhere are around as at away back be became because become becomes
    been before behind being below between both but by can cannot could did do does doing done down during each
    either else enough even ever every everybody everyone everything everywhere except few first for from
    further get gets getting got had half has have having he hence her here hers herself him himself his how
    however i if in indeed instead into is it its itself just last least less let lets like made make makes
    making many may maybe me might mine more moreover most much must my myself near neither never next no nobody
    none nor not nothing now nowhere of off often on once one ones only onto or other others otherwise our ours
    ourselves out over own per perhaps please quite rather really said same say says second seem seems several
    shall she should since so some somebody someone something sometimes somewhere soon still such than that the
    their theirs them themselves then there therefore these they thing things third this those though three
    through throughout thus till to together too toward towards two under unless until up upon us use used very
    via was we well were what whatever when whenever where whereas wherever whether which while who whoever
    whole whom whose why will with within without would yes yet you your yours yourself yourselves mr mrs ms dr"""
)

_MARKS = {
    "en": word_set(
        """a the and of to is in that it was for on are with as be this have from not you or by an at which we
        they but what how why can do does i he she his her my your will would there their if please when who
        where"""
    ),
    "fr": word_set(
        """le la les des et est une un du que qui dans pour pas ce cette il elle sur avec au aux ne je vous
        nous sont par plus mais ou où comment pourquoi quel quelle ses son sa mon ma leur être"""
    ),
    "de": word_set(
        """der die das und ist ein eine einen dem den des nicht mit von zu sich auf für es im ich du sie wir
        ihr wie was warum auch als bei oder aber wird sind haben hat kann einer eines"""
    ),
    "es": word_set(
        """el la los las de y es un una que en no por para con se su del al lo como más pero sus le ya o este
        esta cómo qué está son ser yo tú muy también hay"""
    ),
    "it": word_set(
        """il lo la gli le di e è un una che in non per con si del della dei al da come più ma sono questo
        questa cosa perché nel nella anche ho ha io"""
    ),
    "pt": word_set(
        """o a os as de e é um uma que em não por para com se do da dos das no na ao como mais mas são este
        esta eu você qual está também foi"""
    ),
    "nl": word_set(
        """de het een en van is dat in niet op te met voor zijn er aan om ook als maar die wat hoe waarom ik je
        wij jullie naar bij wordt worden deze"""
    ),
}
_CONTRACTION = re.compile(r"(?i)n['’]t\b|\b(?:I|you|he|she|it|we|they|that|there)['’](?:m|s|re|ve|ll|d)\b")
_LATIN_WORD = re.compile(r"[^\W\d_]+")
_ENGLISH_ENDINGS = re.compile(r"(?:ing|tion|ness|ould|ght|ck|sh|th|ly)$")


def guess_language(text: str) -> str:
    """`en`, `fr`, `de`, `es`, `it`, `pt` or `nl`, or `und` where the small words don't tell.

    Only the first 2,000 characters are looked at. Text without any small word counts as English when it is pure ASCII
    and a quarter of its words end as English ones do.
    """
    sample = text[:_SAMPLE]
    if not is_latin(sample) or any(map(is_unspaced, sample[:200])):
        return UNKNOWN_LANGUAGE
    words = _LATIN_WORD.findall(sample.lower())
    counts = Counter(words)
    scores = {code: sum(counts[word] for word in marks & counts.keys()) for code, marks in _MARKS.items()}
    scores["en"] += len(_CONTRACTION.findall(sample))
    best = max(scores, key=lambda code: scores[code])  # the first of equals: English
    if scores[best] == 0:
        endings = sum(bool(_ENGLISH_ENDINGS.search(word)) for word in words)
        return "en" if sample.isascii() and 4 * endings >= len(words) else UNKNOWN_LANGUAGE
    tied = [code for code, score in scores.items() if score == scores[best]]
    return best if len(tied) == 1 or (best == "en" and sample.isascii()) else UNKNOWN_LANGUAGE
