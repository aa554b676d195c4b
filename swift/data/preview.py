"""Shows what a row becomes: every token, and which of them are trained. For the terminal and as one HTML page.

A unit of several sequences is shown in its parts: the prompt that they share, then what each of them is.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from rich.text import Text

from swift.data.encoding.encode import Encoded
from swift.data.labels import LabelSpace
from swift.data.rows import Row, RowProblem
from swift.data.units import Kind, Unit

_REPLACEMENT = "\ufffd"  # what undecodable bytes come out as
_MAX_PARTS = 8  # tokens of one character at most
_MOST_LABELS = 40  # of single words, shown of one text


@dataclass(slots=True)
class Piece:
    """One token, or the tokens that share one character.

    `weight` is the loss weight of the first of them; 0 is not trained.
    """

    text: str
    ids: list[int]
    weight: float


class Encoder(Protocol):
    """What turns a row into examples: the chat encoder, or the one for units."""

    def encode(self, row: Row) -> list[Encoded]: ...


@dataclass(slots=True)
class Stretch:
    """Neighbouring tokens of an example: all of them, or the shared prompt or one part of a unit, with its heading."""

    pieces: list[Piece]
    heading: str = ""


@dataclass(slots=True)
class ExampleView:
    """One example ready to be shown.

    Attributes:
        title: where it comes from, `file:line`, and which example of the row.
        num_tokens, num_trained, truncated: counts of tokens.
        values: what else is known of a unit, in words.
    """

    title: str
    stretches: list[Stretch]
    num_tokens: int
    num_trained: int
    truncated: int
    values: str = ""

    @property
    def pieces(self) -> list[Piece]:
        """All tokens."""
        return [piece for stretch in self.stretches for piece in stretch.pieces]

    @property
    def counts(self) -> str:
        """The counts in words."""
        share = self.num_trained / self.num_tokens if self.num_tokens else 0.0
        cut = f", {self.truncated:,} cut off" if self.truncated else ""
        more = f"; {self.values}" if self.values else ""
        return f"{self.num_tokens:,} tokens, {self.num_trained:,} trained ({share:.0%}){cut}{more}"


@dataclass(slots=True)
class ProblemView:
    """A row that can't be used: where and why."""

    title: str
    problem: RowProblem


View = ExampleView | ProblemView


def view_row(encoder: Encoder, tokenizer: Any, row: Row, labels: LabelSpace | None = None) -> list[View]:
    """The examples that `row` becomes, or its problem.

    Args:
        labels: of rows with labels, for their names.
    """
    try:
        examples = encoder.encode(row)
    except RowProblem as problem:
        return [ProblemView(str(row.ref), problem)]
    views: list[View] = []
    for number, example in enumerate(examples, 1):
        title = str(row.ref) + (f" (example {number} of {len(examples)})" if len(examples) > 1 else "")
        num_trained = int(np.count_nonzero(example.loss_weights))
        unit = None if example.notes is None else Unit.read(example.notes)
        stretches = _stretches(tokenizer, example, unit)
        values = _values(unit, labels) if unit and unit.values else ""
        views.append(ExampleView(title, stretches, len(example.input_ids), num_trained, example.truncated, values))
    return views


def _stretches(tokenizer: Any, example: Encoded, unit: Unit | None) -> list[Stretch]:
    ids, weights = example.input_ids, example.loss_weights
    if unit is None:
        return [Stretch(pieces_of(tokenizer, ids, weights))]
    head = pieces_of(tokenizer, ids[: unit.prefix], weights[: unit.prefix])
    shared = "prompt" if len(unit.lengths) == 1 else "shared prompt"
    found = [Stretch(head, f"{shared}: {unit.prefix:,} tokens")] if unit.prefix else []
    last = head[-1].ids if head else []
    for part, kind in zip(unit.parts(), unit.kinds, strict=True):
        trained = int(np.count_nonzero(weights[part]))
        heading = f"{Kind(kind).name.lower()}: {part.stop - part.start:,} tokens, {trained:,} trained"
        found.append(Stretch(pieces_of(tokenizer, ids[part], weights[part], last), heading))
    return found


def _values(unit: Unit, labels: LabelSpace | None) -> str:
    """The unit's numbers, by what its parts say that they are."""
    numbers = [f"{value:g}" for value in unit.values]
    if Kind.CHOSEN in unit.kinds:
        return f"margin {numbers[0]}"
    if Kind.PLAIN not in unit.kinds:
        return f"label {numbers[0]}"
    if labels is not None and labels.names:
        numbers = [labels.names[int(value)] for value in unit.values]
    more = f" and {len(numbers) - _MOST_LABELS:,} more" if len(numbers) > _MOST_LABELS else ""
    return f"label{'s' if len(numbers) > 1 else ''} {' '.join(numbers[:_MOST_LABELS])}{more}"


def pieces_of(
    tokenizer: Any,
    ids: Sequence[int] | np.ndarray,
    weights: Sequence[float] | np.ndarray,
    before: Sequence[int] = (),
) -> list[Piece]:
    """Cut token ids into pieces whose texts, joined, are the decoded whole.

    Args:
        before: the tokens that these follow.
    """
    pieces: list[Piece] = []
    before = list(before)
    pending: list[int] = []
    first_weight = 0.0
    for position, (token, weight) in enumerate(zip(ids, weights, strict=True)):
        if not pending:
            first_weight = float(weight)
        pending.append(int(token))
        text = _text_after(tokenizer, before, pending)
        unfinished = text.endswith(_REPLACEMENT) and len(pending) < _MAX_PARTS and position + 1 < len(ids)
        if unfinished:
            continue
        pieces.append(Piece(text, pending, first_weight))
        before, pending = pending, []
    return pieces


def _text_after(tokenizer: Any, before: list[int], ids: list[int]) -> str:
    """The text of `ids` behind `before`: some tokenizers decode a token differently at the start of a text."""
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    lead = tokenizer.decode(before, **options) if before else ""
    return tokenizer.decode([*before, *ids], **options)[len(lead) :]


def terminal_text(view: View, *, colour: bool) -> Text:
    """A view for the terminal. With `colour`, trained tokens are green (yellow at a weight other than 1) and the others
    grey, token by token in two shades; without, trained stretches stand in ⟦ ⟧."""
    if isinstance(view, ProblemView):
        text = Text(f"{view.title}: {view.problem.reason}: {view.problem.message}", style="red")
        return text.append(f"\n  fix: {view.problem.fix}", style="") if view.problem.fix else text
    text = Text(f"{view.title}: {view.counts}\n", style="bold")
    for stretch in view.stretches:
        if stretch.heading:
            line_end = "" if text.plain.endswith("\n") else "\n"
            text.append(f"{line_end}— {stretch.heading}\n", style="not bold italic")
        _append_pieces(text, stretch.pieces, colour=colour)
    return text


def _append_pieces(text: Text, pieces: Sequence[Piece], *, colour: bool) -> None:
    inside = False
    for number, piece in enumerate(pieces):
        trained = piece.weight != 0
        if not colour and trained != inside:
            text.append("⟦" if trained else "⟧", style="none")
        inside = trained
        text.append(_visible(piece.text), style=_style(piece.weight, number % 2 == 0) if colour else "none")
    if inside and not colour:
        text.append("⟧", style="none")


def _style(weight: float, even: bool) -> str:
    if weight == 0:
        return "not bold bright_black" if even else "not bold white"
    if weight == 1:
        return "not bold black on green" if even else "not bold black on bright_green"
    return "not bold black on yellow" if even else "not bold black on bright_yellow"


def _visible(text: str) -> str:
    """Line ends marked, other control characters written out: a row must not steer the terminal."""
    marked = text.replace("\r", "␍").replace("\n", "↵\n").replace("\t", "→\t")
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in marked)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 14px/1.6 ui-monospace, monospace; margin: 2em auto; max-width: 70em; padding: 0 1em; color: #222; }}
h2 {{ font-size: 1em; margin: 2em 0 .2em; }}
p {{ margin: .2em 0 .6em; color: #555; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f6f6; padding: 1em; border-radius: 6px; }}
span {{ border-radius: 2px; }} span.a {{ background: #e6e6e6; }} span.b {{ background: #efefef; }}
span.t.a {{ background: #9fdca6; }} span.t.b {{ background: #bfe9c3; }}
span.w.a {{ background: #f2d675; }} span.w.b {{ background: #f7e5a3; }}
.problem {{ color: #b00020; }}
@media (prefers-color-scheme: dark) {{
 body {{ background: #181818; color: #ddd; }} p {{ color: #aaa; }} pre {{ background: #222; }}
 span.a {{ background: #333; }} span.b {{ background: #2a2a2a; }}
 span.t.a {{ background: #1f5c2a; }} span.t.b {{ background: #2a7438; }}
 span.w.a {{ background: #6b5716; }} span.w.b {{ background: #836b1c; }}
 .problem {{ color: #ff8080; }}
}}
</style></head><body>
<h1>{title}</h1>
<p><span class="t a">trained</span> <span class="w a">trained, weight other than 1</span>
<span class="a">not trained</span>; point at a token for its id and weight.</p>
{body}
</body></html>
"""


def html_page(views: Sequence[View], title: str, notes: Sequence[str] = ()) -> str:
    """All views as one self-contained page; everything that comes from data is escaped."""
    parts = [f"<p>{html.escape(note)}</p>" for note in notes]
    for view in views:
        parts.append(f"<h2>{html.escape(view.title)}</h2>")
        if isinstance(view, ProblemView):
            message = f"{view.problem.reason}: {view.problem.message}" + (
                f" (fix: {view.problem.fix})" if view.problem.fix else ""
            )
            parts.append(f'<p class="problem">{html.escape(message)}</p>')
            continue
        parts.append(f"<p>{html.escape(view.counts)}</p>")
        for stretch in view.stretches:
            if stretch.heading:
                parts.append(f"<p>{html.escape(stretch.heading)}</p>")
            parts.append("<pre>" + "".join(_span(piece, i) for i, piece in enumerate(stretch.pieces)) + "</pre>")
    return _PAGE.format(title=html.escape(title), body="\n".join(parts))


def _span(piece: Piece, number: int) -> str:
    kind = "" if piece.weight == 0 else "t " if piece.weight == 1 else "w "
    shade = "a" if number % 2 == 0 else "b"
    ids = ", ".join(map(str, piece.ids))
    text = html.escape(_visible(piece.text))
    return f'<span class="{kind}{shade}" title="id {ids}, weight {piece.weight:g}">{text}</span>'
