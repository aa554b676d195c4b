"""Sample, filter and url_blocklist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swift.core.errors import UsageError
from swift.data.engine.document import Document, document_from
from swift.data.engine.operator import OPERATORS, Context
from swift.data.engine.tally import Tally
from swift.data.operators import filter, sample  # noqa: F401
from swift.data.operators.blocklist import host_of
from swift.data.operators.word_lists import WordList


def run(name: str, rows: list[Document], context: Context | None = None, **settings: Any) -> tuple[list[str], Tally]:
    operator = OPERATORS[name](**settings)
    operator.check()
    operator.open(context or Context())
    tally = Tally()
    kept = operator.run(rows, tally)
    assert len(kept) + tally.dropped.total() == len(rows)
    return [document.id for document in kept], tally


def rows(records: list[dict[str, Any]]) -> list[Document]:
    return [document_from({"text": "t", **record}, f"f:{i}") for i, record in enumerate(records)]


# --- sample ---


def test_a_sample_is_a_function_of_seed_and_document() -> None:
    many = rows([{}] * 4000)
    ids, tally = run("sample", many, share=0.3)
    assert 1100 < len(ids) < 1300  # four standard deviations are 116
    assert tally.dropped["not_drawn"] == 4000 - len(ids)
    half, _ = run("sample", many[::-1][:2000], share=0.3)
    assert set(half) == set(ids) & {document.id for document in many[2000:]}
    assert run("sample", many, Context(seed=1), share=0.3)[0] != ids
    assert run("sample", many, Context(label="sample-2"), share=0.3)[0] != ids
    assert set(run("sample", many, share=0.1)[0]) < set(ids)


def test_a_sample_by_weight() -> None:
    many = rows([{"meta": {"w": i % 4 / 2}} for i in range(4000)])  # 0, 0.5, 1, 1.5
    ids = set(run("sample", many, weight="meta.w")[0])
    drawn = [sum(f"f:{i}" in ids for i in range(rest, 4000, 4)) for rest in range(4)]
    assert drawn[0] == 0 and drawn[2] == drawn[3] == 1000 and 430 < drawn[1] < 570
    _, tally = run("sample", rows([{"w": "1"}, {"w": True}, {"w": float("nan")}, {}]), weight="w")
    assert dict(tally.dropped) == {"no_weight": 4}


# --- filter ---


@pytest.mark.parametrize(
    ("settings", "kept", "reasons"),
    [
        ({"min": 0.5}, [2], {"below_min": 1, "missing": 3}),
        ({"max": 0.5}, [0], {"above_max": 1, "missing": 3}),
        ({"min": 0.5, "missing": "keep"}, [1, 2, 3, 4], {"below_min": 1}),
        ({"any_of": [0.9, "x"]}, [1, 2], {"not_wanted": 2, "missing": 1}),
        ({"none_of": [True]}, [0, 1, 2], {"unwanted": 1, "missing": 1}),
        ({"any_of": [1]}, [], {"not_wanted": 4, "missing": 1}),  # true isn't 1
    ],
)
def test_filter(settings: dict[str, Any], kept: list[int], reasons: dict[str, int]) -> None:
    many = rows([{"a": {"b": value}} for value in (0.1, "x", 0.9, True)] + [{"a": 1}])
    ids, tally = run("filter", many, field="a.b", **settings)
    assert ids == [f"f:{i}" for i in kept]
    assert dict(tally.dropped) == reasons


def test_filter_sees_what_operators_found_before_the_row_s_own_meta() -> None:
    (document,) = rows([{"meta": {"language": "xx", "other": 1}}])
    document.meta["language"] = "en"
    assert run("filter", [document], field="meta.language", any_of=["en"])[0] == ["f:0"]
    assert run("filter", [document], field="meta.other", min=1)[0] == ["f:0"]


# --- url_blocklist ---


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("https://user:pw@WWW.Example.com:8080/a?b#c", "www.example.com"),
        ("http://example.com", "example.com"),
        ("//cdn.example.com/x", "cdn.example.com"),
        ("example.com/path", "example.com"),
        ("example.com.", "example.com"),
        ("https://bücher.example/x", "xn--bcher-kva.example"),
        ("wikipedia", ""),
        ("a text with a dot. Really", ""),
        ("rows.jsonl:3", "rows.jsonl"),
        ("", ""),
    ],
)
def test_hosts(address: str, host: str) -> None:
    assert host_of(address) == host


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"url": "https://bad.com/x"}, "domain"),
        ({"url": "https://a.b.bad.com"}, "domain"),
        ({"url": "https://notbad.com"}, None),
        ({"url": "https://bad.com.example.org"}, None),
        ({"url": "https://good.org/?next=https://bad.com"}, None),
        ({"source": "evil.org"}, "domain"),
        ({"meta": {"url": "http://EVIL.org:80/"}}, "domain"),
        ({"url": "https://shop.example/buy-Casino-now"}, "url_word"),
        ({"url": "https://shop.example/casinos"}, None),
        ({"url": "https://shop.example/poker%20night"}, "url_word"),
        ({"url": 5}, None),
        ({"text": "see https://www.bad.com/page, or not"}, None),
    ],
)
def test_url_blocklist(record: dict[str, Any], reason: str | None, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("# hosts\n0.0.0.0 evil.org # why\n*.wild.net\n")
    settings = {"domains": ["bad.com"], "domain_files": [str(hosts)], "words": ["casino", "Poker Night"]}
    _, tally = run("url_blocklist", rows([record]), **settings)
    assert list(tally.dropped) == ([reason] if reason else [])


def test_url_blocklist_in_text() -> None:
    texts = ["see https://www.bad.com/page, or not", "(www.bad.com)", "bad.com is a name", "a CASINO!", "casinos"]
    ids, tally = run(
        "url_blocklist", rows([{"text": text} for text in texts]), domains=["bad.com"], words=["casino"], in_text=True
    )
    assert ids == ["f:2", "f:4"]
    assert dict(tally.dropped) == {"domain_in_text": 2, "word_in_text": 1}


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("sample", {}, "every document"),
        ("sample", {"share": 30}, "share"),
        ("filter", {"field": "a"}, "no condition"),
        ("filter", {"field": "a", "min": 2, "max": 1}, "min"),
        ("filter", {"field": "a", "min": 2, "missing": "x"}, "missing"),
        ("url_blocklist", {}, "no list"),
        ("url_blocklist", {"domains": ["a.b"], "fields": []}, "nowhere"),
        ("url_blocklist", {"words": ["bad", " "]}, "words"),
        ("url_blocklist", {"domain_files": ["no-such-file"]}, "can't be read"),
    ],
)
def test_settings_that_cant_be_meant(name: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        OPERATORS[name](**settings).check()


def test_words_with_hyphens_are_found_in_addresses() -> None:
    urls = ["https://a.example/poker-night", "https://a.example/poker_night/1", "https://a.example/poker"]
    ids, _ = run("url_blocklist", rows([{"url": url} for url in urls]), words=["Poker-Night", "++"])
    assert ids == ["f:2"]


@pytest.mark.timeout(10)
def test_many_phrases_cost_little() -> None:
    words = [f"word{number} other" for number in range(20_000)] + ["c++", "二 字"]
    found = WordList(words)
    text = "word1 word2 others " * 20_000
    assert found.first(text) is None
    assert found.first(text + "Word19999 Other") == "word19999 other"
    assert found.first(text + "C++") == "c++"
    assert found.first("一二 字") == "二 字"
