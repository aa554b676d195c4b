"""The preview: pieces join to the whole text, colours follow the weights, nothing from data reaches HTML unescaped."""

from __future__ import annotations

import html
import re

import pytest
from fixtures import make_tokenizer

from swift.config.data import TemplateConfig
from swift.data.encoding.encode import ChatEncoder
from swift.data.preview import ExampleView, ProblemView, html_page, pieces_of, terminal_text, view_row
from swift.data.rows import Row, RowRef

TALK = [{"role": "user", "content": "<b>5 & 6</b> [red]x[/red]\x1b[31m"}, {"role": "assistant", "content": "你好😀 ok"}]


@pytest.fixture
def view() -> ExampleView:
    encoder = ChatEncoder(make_tokenizer(), TemplateConfig())
    (found,) = view_row(encoder, Row(RowRef("a.jsonl", 3), TALK))
    assert isinstance(found, ExampleView)
    return found


def test_pieces_join_to_the_text_and_keep_every_token():
    tokenizer = make_tokenizer()
    text = "Grüße 😀👍🏽 你好 <|im_end|>\n  x"
    ids = tokenizer(text).input_ids
    pieces = pieces_of(tokenizer, ids, [1.0] * len(ids))
    assert "".join(piece.text for piece in pieces) == text
    assert [i for piece in pieces for i in piece.ids] == ids
    assert all("\ufffd" not in piece.text for piece in pieces)


def test_broken_bytes_do_not_swallow_the_rest():
    tokenizer = make_tokenizer()
    ids = tokenizer("😀").input_ids[:1] * 20 + tokenizer("end").input_ids
    pieces = pieces_of(tokenizer, ids, [0.0] * len(ids))
    assert [i for piece in pieces for i in piece.ids] == ids and pieces[-1].text.endswith("end"[-1])


def test_title_and_counts(view: ExampleView):
    assert view.title == "a.jsonl:3"
    trained = sum(len(piece.ids) for piece in view.pieces if piece.weight)
    assert view.num_trained == trained and view.counts.startswith(f"{view.num_tokens} tokens, {trained} trained")


def test_plain_terminal_marks_trained_stretches(view: ExampleView):
    text = terminal_text(view, colour=False).plain
    assert re.findall("⟦(.*?)⟧", text, re.DOTALL) == ["你好😀 ok<|im_end|>"]
    assert "\x1b" not in text and "\\x1b[31m" in text and "[red]x[/red]" in text


def test_coloured_terminal_styles_by_weight(view: ExampleView):
    text = terminal_text(view, colour=True)
    green = "".join(text.plain[s.start : s.end] for s in text.spans if "green" in str(s.style))
    assert green == "你好😀 ok<|im_end|>"


def test_html_is_escaped_and_marks_trained_tokens(view: ExampleView):
    page = html_page([view], "<title & more>", notes=["<note>"])
    assert "<b>" not in page and "<note>" not in page and "<title & more>" not in page
    assert "&lt;note&gt;" in page
    (shown,) = re.findall("<pre>(.*?)</pre>", page, re.DOTALL)
    assert TALK[0]["content"].replace("\x1b", "\\x1b") in html.unescape(re.sub("<[^>]*>", "", shown))
    assert "src=" not in page and "http" not in page
    trained = re.findall(r'<span class="t [ab]" title="id ([\d, ]+), weight 1">', page)
    assert [int(i) for ids in trained for i in ids.split(", ")] == [
        i for piece in view.pieces if piece.weight for i in piece.ids
    ]


def test_weights_other_than_one_have_their_own_colour():
    encoder = ChatEncoder(make_tokenizer(), TemplateConfig())
    talk = [TALK[0], {**TALK[1], "loss_scale": 0.25}]
    (view,) = view_row(encoder, Row(RowRef("a.jsonl", 1), talk))
    assert 'class="w a"' in html_page([view], "t").split("<h2>")[1] and "weight 0.25" in html_page([view], "t")


def test_a_problem_is_shown_with_its_place_and_fix():
    encoder = ChatEncoder(make_tokenizer(), TemplateConfig(max_length=4))
    (view,) = view_row(encoder, Row(RowRef("a.jsonl", 9), TALK))
    assert isinstance(view, ProblemView)
    for shown in (terminal_text(view, colour=False).plain, html_page([view], "t")):
        assert "a.jsonl:9" in shown and "too_long" in shown and "--max_length" in shown
