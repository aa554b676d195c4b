"""The preview: pieces join to the whole text, colours follow the weights, nothing from data reaches HTML unescaped."""

from __future__ import annotations

import html
import re

import pytest
from fixtures import make_tokenizer

from swift.config.data import TemplateConfig
from swift.data.columns import Layout
from swift.data.encoding.encode import ChatEncoder
from swift.data.encoding.units import UnitEncoder
from swift.data.labels import LabelSpace
from swift.data.preview import ExampleView, ProblemView, html_page, pieces_of, terminal_text, view_row
from swift.data.rows import Row, RowRef

TALK = [{"role": "user", "content": "<b>5 & 6</b> [red]x[/red]\x1b[31m"}, {"role": "assistant", "content": "你好😀 ok"}]


@pytest.fixture
def view() -> ExampleView:
    encoder = ChatEncoder(make_tokenizer(), TemplateConfig())
    (found,) = view_row(encoder, encoder.tokenizer, Row(RowRef("a.jsonl", 3), TALK))
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
    (view,) = view_row(encoder, encoder.tokenizer, Row(RowRef("a.jsonl", 1), talk))
    assert 'class="w a"' in html_page([view], "t").split("<h2>")[1] and "weight 0.25" in html_page([view], "t")


def test_a_problem_is_shown_with_its_place_and_fix():
    encoder = ChatEncoder(make_tokenizer(), TemplateConfig(max_length=4))
    (view,) = view_row(encoder, encoder.tokenizer, Row(RowRef("a.jsonl", 9), TALK))
    assert isinstance(view, ProblemView)
    for shown in (terminal_text(view, colour=False).plain, html_page([view], "t")):
        assert "a.jsonl:9" in shown and "too_long" in shown and "--max_length" in shown


# --- units ---


def unit_view(layout: Layout, row: Row, labels: LabelSpace | None = None) -> ExampleView:
    encoder = ChatEncoder(make_tokenizer(), TemplateConfig(loss_scale="last_round"))
    (view,) = view_row(UnitEncoder(encoder, layout, labels=labels), encoder.tokenizer, row, labels)
    assert isinstance(view, ExampleView)
    return view


def marked(view: ExampleView) -> list[str]:
    return re.findall("⟦(.*?)⟧", terminal_text(view, colour=False).plain, re.DOTALL)


def test_a_pair_shows_the_prompt_once_and_each_answer():
    question, answer = {"role": "user", "content": "Where to?"}, {"role": "assistant", "content": "你好😀 Paris"}
    worse = [{"role": "assistant", "content": "你好😀 no idea"}]
    row = Row(RowRef("a.jsonl", 1), [question, answer], rejected=[worse], margins=[0.5], answer_at=1)
    view = unit_view("pairs", row)
    text = terminal_text(view, colour=False).plain
    assert text.count("Where to?") == 1 and view.counts.endswith("; margin 0.5")
    assert marked(view) == ["你好😀 Paris<|im_end|>", "你好😀 no idea<|im_end|>"]
    heads = [stretch.heading for stretch in view.stretches]
    trained = [sum(len(piece.ids) for piece in s.pieces if piece.weight) for s in view.stretches]
    sizes = [sum(len(piece.ids) for piece in s.pieces) for s in view.stretches]
    assert heads == [
        f"shared prompt: {sizes[0]} tokens",
        f"chosen: {sizes[1]} tokens, {trained[1]} trained",
        f"rejected: {sizes[2]} tokens, {trained[2]} trained",
    ]
    assert trained[0] == 0 and all(trained[1:]) and sum(sizes) == view.num_tokens
    assert all(f"— {head}\n" in text for head in heads)
    page = html_page([view], "t")
    assert page.count("<pre>") == 3 and all(f"<p>{head}</p>" in page for head in heads)


def test_an_answer_with_a_label_is_named_by_it():
    for label, name in ((True, "chosen"), (False, "rejected")):
        view = unit_view("binary", Row(RowRef("a.jsonl", 1), TALK, label=label, answer_at=1))
        assert [s.heading.partition(":")[0] for s in view.stretches] == ["prompt", name]
        assert marked(view) == ["你好😀 ok<|im_end|>"]


def test_labels_are_shown_by_name():
    names = LabelSpace("single_label_classification", 2, ("good", "bad"))
    row = Row(RowRef("a.jsonl", 1), TALK[:1], label="bad")
    assert unit_view("labelled", row, names).counts.endswith("; label bad")
    number = LabelSpace("regression", 1)
    assert unit_view("labelled", Row(RowRef("a.jsonl", 1), TALK[:1], label=0.25), number).counts.endswith(
        "; label 0.25"
    )
    words = LabelSpace("single_label_classification", 2, ("O", "LOC"))
    row = Row(RowRef("a.jsonl", 1), [], words=["to", "Paris"], label=["O", "LOC"])
    assert unit_view("tokens", row, words).counts.endswith("; labels O LOC")


def test_texts_that_are_alike_or_not():
    like, unlike = ([{"role": "user", "content": text}] for text in ("rain", "stone"))
    row = Row(RowRef("a.jsonl", 1), TALK[:1], positives=[like], negatives=[unlike])
    for layout, kinds in (("embedding", ["anchor", "positive", "negative"]), ("rerank", ["positive", "negative"])):
        heads = [s.heading.partition(":")[0] for s in unit_view(layout, row).stretches]
        assert [head for head in heads if head != "shared prompt"] == kinds
    assert unit_view("embedding", Row(RowRef("a.jsonl", 1), TALK[:1], positives=[like], label=0.8)).counts.endswith(
        "; label 0.8"
    )
