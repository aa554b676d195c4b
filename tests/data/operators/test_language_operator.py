"""Languages of short texts by the packaged model, offline."""

from __future__ import annotations

from typing import Any

import pytest

from swift.core.errors import UsageError
from swift.data.engine.document import Document, document_from
from swift.data.engine.operator import Context
from swift.data.engine.tally import Tally
from swift.data.operators.language import LANGUAGES, Language

TEXTS = {
    "en": "The weather was fine yesterday, and we went for a long walk along the river with our dog.",
    "de": "Das Wetter war gestern schön, und wir sind mit unserem Hund lange am Fluss spazieren gegangen.",
    "fr": "Hier il faisait beau et nous avons fait une longue promenade au bord de la rivière avec notre chien.",
    "ru": "Вчера была хорошая погода, и мы долго гуляли вдоль реки с нашей собакой.",
    "zh": "昨天天气很好，我们带着狗沿着河边走了很久。",
    "ja": "昨日は天気が良かったので、犬と一緒に川沿いを長く散歩しました。",
    "th": "เมื่อวานอากาศดีมาก เราพาสุนัขไปเดินเล่นริมแม่น้ำเป็นเวลานาน",
    "unknown": "12345 --- 67.8 !!!",
}


def run(rows: list[Document], **settings: Any) -> tuple[list[Document], Tally]:
    operator = Language(**settings)
    operator.check()
    operator.open(Context(offline=True))
    tally = Tally()
    return operator.run(rows, tally), tally


def rows() -> list[Document]:
    return [document_from({"text": text}, code) for code, text in TEXTS.items()]


def test_languages_are_found_noted_and_counted() -> None:
    kept, tally = run(rows())
    assert [document.meta["language"] for document in kept] == list(TEXTS)
    assert all(document.meta["language_score"] > 0.8 for document in kept[:-1])
    assert dict(tally.labels["language"]) == dict.fromkeys(TEXTS, 1)
    assert kept[0].to_record()["meta"]["language"] == "en"


def test_keep_drop_and_score() -> None:
    kept, tally = run(rows(), keep=["en", "zh"])
    assert [document.id for document in kept] == ["en", "zh"]
    assert dict(tally.dropped) == {"language": 6}
    kept, _ = run(rows(), drop=["de", "unknown"])
    assert [document.id for document in kept] == ["en", "fr", "ru", "zh", "ja", "th"]
    kept, tally = run(rows(), min_score=0.8)
    assert dict(tally.dropped) == {"low_score": 1} and len(kept) == 7


def test_only_the_beginning_is_looked_at() -> None:
    text = TEXTS["en"] * 20 + TEXTS["ru"] * 200
    (document,), _ = run([document_from({"text": text}, "f:1")], characters=1000)
    assert document.meta["language"] == "en"
    (document,), _ = run([document_from({"text": text}, "f:1")], characters=100_000)
    assert document.meta["language"] == "ru"


def test_half_characters_and_line_ends_are_no_trouble() -> None:
    (document,), _ = run([document_from({"text": "\ud800" + TEXTS["fr"].replace(" ", "\n")}, "f:1")])
    assert document.meta["language"] == "fr"


def test_wrong_codes_are_refused_with_the_nearest() -> None:
    assert {"en", "zh", "als", "yue"} <= LANGUAGES and len(LANGUAGES) == 176
    with pytest.raises(UsageError, match="english"):
        Language(keep=["english"]).check()
    with pytest.raises(UsageError, match="also in keep"):
        Language(keep=["en"], drop=["en"]).check()
    with pytest.raises(UsageError, match="min_score"):
        Language(min_score=65).check()
