# ruff: noqa: E501
"""The text of a page without what is around it, and the marks that its parts get."""

from __future__ import annotations

import sys
import time
import types

import pytest

from swift.core.errors import DependencyError, UsageError
from swift.data.engine.document import document_from
from swift.data.engine.operator import Context
from swift.data.engine.tally import Tally
from swift.data.operators.html_blocks import main_text
from swift.data.operators.html_text import HtmlMainText

FIRST = (
    "The first paragraph has <b>bold</b> words and a <a href='x'>link</a>, and it is long enough to be the page's own."
)
LAST = "The last paragraph says once more what the page is about, so that every reader leaves it with the main thing."
PAGE = f"""<!DOCTYPE html><html><head><title>Title</title><style>p {{}}</style><script>var x = "no";</script></head><body>
<header class="masthead"><a href="/">The Site</a></header>
<nav><ul><li><a href="/">Home</a></li><li><a href="/about">About the site and its people</a></li></ul></nav>
<div class="cookie-banner">We use cookies to make this site better for all of you who read it, so please say yes now.</div>
<div id="content">
 <h1>The  heading</h1>
 <p>{FIRST}</p>
 <p>A short one.<br>And its second line.</p>
 <h2>A list</h2>
 <ul><li>the first thing to do here<ul><li>a thing inside</li></ul></li><li><p>the second thing to do here and now</p></li></ul>
 <ol><li>one is the first of all numbers that count</li><li>two is the next one behind it</li></ol>
 <pre><code>def f(x):
    return x  # a + b</code></pre>
 <table><tr><th>name</th><th>what it is good for</th></tr><tr><td>a|b</td><td>nothing at all, but it has many words in here</td></tr></table>
 <blockquote><p>{LAST}</p></blockquote>
 <h3>Related pages</h3>
 <p><a href="1">Another page that you may like to read</a> <a href="2">and one more page with a long name</a></p>
</div>
<div hidden>Hidden words that nobody sees but that are more than fifteen of them, as you can count here.</div>
<aside><p>About the author: she has written more than fifteen words about herself, and they stand beside the page.</p></aside>
<footer><p>Copyright by all of us who have made this page with more than fifteen words in its footer here.</p></footer>
</body></html>"""
PLAIN = """The heading

The first paragraph has bold words and a link, and it is long enough to be the page's own.

A short one.
And its second line.

A list

- the first thing to do here
  - a thing inside
- the second thing to do here and now

1. one is the first of all numbers that count
2. two is the next one behind it

def f(x):
    return x  # a + b

name\twhat it is good for
a|b\tnothing at all, but it has many words in here

The last paragraph says once more what the page is about, so that every reader leaves it with the main thing."""
MARKDOWN = (
    PLAIN.replace("The heading", "# The heading")
    .replace("A list", "## A list")
    .replace("def f(x):\n    return x  # a + b", "```\ndef f(x):\n    return x  # a + b\n```")
    .replace("name\twhat it is good for\na|b\t", "| name | what it is good for |\n| --- | --- |\n| a\\|b | ")
    .replace("words in here\n", "words in here |\n")
)


def test_a_page() -> None:
    assert main_text(PAGE) == PLAIN
    assert main_text(PAGE, markdown=True) == MARKDOWN


@pytest.mark.parametrize("wrapper", ["main", "article", "div class='wrapper-with-sidebar'", "div class='menu'"])
def test_most_of_the_page_is_text_whatever_it_is_called(wrapper: str) -> None:
    tag = wrapper.split()[0]
    html = f"<body><p>Elsewhere</p><{wrapper}><p>{FIRST}</p><p>{LAST}</p></{tag}></body>"
    assert LAST in main_text(html)


def test_short_blocks_stay_only_beside_long_ones() -> None:
    html = f"<p>far</p><p>near</p><p>{LAST}</p><p>near too</p><p>far too</p>"
    assert main_text(html).split("\n\n") == ["near", LAST, "near too"]


def test_chinese_words_are_counted_by_letters() -> None:
    sentence = "这一段文字介绍了如何从网页中提取正文，长度足够，所以应当保留下来。"
    assert main_text(f"<body><p>{sentence}</p><ul><li><a>首页</a></li></ul></body>") == sentence


@pytest.mark.parametrize(
    "html",
    [
        "",
        "<",
        "<p",
        "<html></html>",
        "<div>" * 3000 + "x",
        "<p>\x00</p>",
        "<a>only a link, but with a great many words in it</a>",
    ],
)
def test_nothing_is_left_and_nothing_breaks(html: str) -> None:
    assert main_text(html) == ""


def test_broken_markup_still_gives_its_text() -> None:
    assert main_text(f"<div><p>{LAST}<ul><li>one<li>two</table></b>").startswith(LAST)


def test_the_operator_changes_pages_only() -> None:
    operator = HtmlMainText()
    operator.check()
    operator.open(Context())
    tally = Tally()
    rows = [
        document_from({"text": PAGE}, "f:1"),
        document_from({"text": "if a < b: print(a) # no <tags> here"}, "f:2"),
        document_from({"text": "<html><body><a>menu</a></body></html>"}, "f:3"),
        document_from({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": PAGE}]}, "f:4"),
    ]
    kept = operator.run(rows, tally)
    assert [document.id for document in kept] == ["f:1", "f:2", "f:4"]
    assert [kept[0].text, kept[1].text] == [PLAIN, "if a < b: print(a) # no <tags> here"]
    assert kept[2].texts == ["x", PLAIN]
    assert dict(tally.dropped) == {"no_main_text": 1}
    assert dict(tally.changes) == {"main_text": 2}


def test_the_page_in_a_column_of_its_own() -> None:
    """As the reader of .html files leaves it beside all visible text."""
    operator = HtmlMainText()
    operator.open(Context())
    (document,) = operator.run([document_from({"text": "Home " + PLAIN, "title": "T", "html": PAGE}, "f:1")], Tally())
    assert document.to_record() == {"text": PLAIN, "title": "T"}
    column = HtmlMainText(column="page")
    column.open(Context())
    (document,) = column.run([document_from({"text": "x", "page": PAGE, "html": "h"}, "f:1")], Tally())
    assert document.to_record() == {"text": PLAIN, "html": "h"}


def test_other_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing package is named; one that is there is called (a stand-in with its interface)."""
    monkeypatch.setitem(sys.modules, "trafilatura", None)
    with pytest.raises(DependencyError, match="trafilatura"):
        HtmlMainText(backend="trafilatura").open(Context())
    stand_in = types.ModuleType("trafilatura")
    stand_in.extract = lambda html, output_format, include_comments: f"{output_format} of {len(html)}"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trafilatura", stand_in)
    operator = HtmlMainText(backend="trafilatura", format="markdown")
    operator.open(Context())
    (document,) = operator.run([document_from({"text": "<p>x</p>"}, "f:1")], Tally())
    assert document.text == "markdown of 8"
    with pytest.raises(UsageError, match="no Markdown"):
        HtmlMainText(backend="resiliparse", format="markdown").check()
    with pytest.raises(UsageError, match="backend"):
        HtmlMainText(backend="other").check()  # type: ignore[arg-type]


def test_a_small_page_makes_no_huge_text() -> None:
    assert len(main_text("<ul><li>x" * 3000 + LAST)) < 200_000


def test_plain_text_with_a_tag_or_two_is_no_page() -> None:
    operator = HtmlMainText()
    operator.open(Context())
    texts = ["# Title\n\nOne line<br>and another.\n\n```python\nx = 1\n```", "Write <a href='x'> or <span> in C++."]
    documents = operator.run([document_from({"text": text}, text[:3]) for text in texts], Tally())
    assert [document.text for document in documents] == texts


README = """<div align="center"><h1>Tool</h1></div>

## Use

```bash
tool --go
```

- one
- two
"""


@pytest.mark.parametrize(
    ("text", "is_html"),
    [
        (README, False),
        ("A text that says something long enough about life, and then <p> once, and nothing else at all.", False),
        ("<p>" + "word " * 200 + "</p>", True),
        ("<div><p>short</p><p>lines</p></div> and a rest", True),
        ("<!-- saved -->\n<!DOCTYPE html>\n<p>one\n- two\n</p> rest", True),
        ("<html>" + README, True),
        (
            "In HTML a page is put into <html><body> and these are closed again at its very end, which many of those who write one by hand forget.",
            False,
        ),
    ],
)
def test_markdown_with_tags_is_no_page(text: str, is_html: bool) -> None:
    for when, expected in (("auto", is_html), ("always", True)):
        operator = HtmlMainText(when=when)  # type: ignore[arg-type]
        operator.check()
        operator.open(Context())
        tally = Tally()
        operator.run([document_from({"text": text}, "f:1")], tally)
        assert (tally.labels["html"]["page"] > 0) == expected


def test_many_comments_take_no_time() -> None:
    start = time.monotonic()
    for text in ("<!--" * 50_000 + "<p>", "<p>" + "<a" * 50_000, "<!-- x -->" * 20_000 + "<p>"):
        operator = HtmlMainText()
        operator.open(Context())
        assert operator._is_html(text) in (True, False)
    assert time.monotonic() - start < 2
