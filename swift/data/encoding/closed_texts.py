"""Texts without an answer to generate, ended by eos: what classifiers and embedding models read.

The messages are rendered by the chat template without a generation prompt, and the last token is always eos: the
template's own where it ends so, else one that is appended. Where the chat template is off, the contents stand one after
the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from swift.data.encoding.encode import ChatEncoder
from swift.data.encoding.spans import Conversation
from swift.data.encoding.template import Refusal, Renderer
from swift.data.rows import Row, RowProblem

_STAND_IN = "\ue0f5Zq\ue0f6"


@dataclass
class ClosedText:
    """The tokens of a text.

    Attributes:
        input_ids: int32 [n], the last one eos.
        offsets: the characters [start, end) of the text of the last message that each token holds; None for tokens that
            hold none of it. Only where they were asked for.
    """

    input_ids: np.ndarray
    offsets: list[tuple[int, int] | None]


class ClosedTexts:
    """Encodes rows with the tokenizer, template and settings of a chat encoder."""

    def __init__(self, chat: ChatEncoder) -> None:
        self.chat = chat

    def encode_batch(self, rows: Sequence[Row], *, offsets: bool = False) -> list[ClosedText | RowProblem]:
        """The rows' tokens in order; a row that the template refuses comes back as its problem."""
        outcomes: list[ClosedText | RowProblem] = []
        places: list[int] = []
        texts: list[str] = []
        shown: list[tuple[int, int]] = []
        for number, row in enumerate(rows):
            try:
                text, span = self._text(row, offsets)
            except RowProblem as problem:
                outcomes.append(problem)
                continue
            outcomes.append(RowProblem("empty", "the text has no tokens"))
            places.append(number)
            texts.append(text)
            shown.append(span)
        if not texts:
            return outcomes
        plain = not self.chat.use_chat_template
        encodings = self.chat.tokenizer(
            texts, add_special_tokens=plain, return_attention_mask=False, verbose=False
        ).encodings
        for number, encoding, (start, end) in zip(places, encodings, shown, strict=True):
            outcomes[number] = self._closed(encoding, start, end) if encoding.ids else outcomes[number]
        return outcomes

    def _closed(self, encoding: Any, start: int, end: int) -> ClosedText:
        eos = self.chat.tokenizer.eos_token_id
        ids = list(encoding.ids)
        places: list[tuple[int, int] | None] = []
        for token in range(len(ids)):
            chars = encoding.token_to_chars(token)
            inside = chars is not None and chars[0] < end and chars[1] > start
            places.append((max(chars[0], start) - start, min(chars[1], end) - start) if inside else None)
        if ids[-1] != eos:
            ids.append(eos)
            places.append(None)
        return ClosedText(np.array(ids, dtype=np.int32), places)

    def _text(self, row: Row, offsets: bool) -> tuple[str, tuple[int, int]]:
        """The text to tokenise, and where in it that of the last message lies."""
        last = row.messages[-1]["content"]
        if not self.chat.use_chat_template:
            text = "".join(str(message.get("content") or "") for message in row.messages)
            return text, (len(text) - len(last), len(text))
        talk = self.chat.conversation(row)
        text = self._render(talk)
        ends = text.rstrip()
        if self.chat.eos_token and ends.endswith(self.chat.eos_token):
            text = ends  # eos is what is read, not the line break behind it
        if not offsets:
            return text, (0, 0)
        stand_in = replace(talk, messages=[*talk.messages[:-1], {**talk.messages[-1], "content": _STAND_IN}])
        start = self._render(stand_in).find(_STAND_IN)
        if start < 0 or not text.startswith(last, start):
            raise RowProblem(
                "text_not_shown",
                "the template doesn't show the text as it is, so its characters can't be told",
                "--use_chat_template false, or remove white space around the text",
            )
        return text, (start, start + len(last))

    def _render(self, talk: Conversation) -> str:
        template = self.chat.tokenizer.get_chat_template(None, talk.tools)
        try:
            return Renderer(self.chat.tokenizer, template)(talk.messages, talk.tools, talk.kwargs)
        except Refusal as error:
            raise RowProblem(
                "template_refused",
                f"the chat template refuses the text: {error}",
                "--use_chat_template false, or another --template FILE.jinja",
            ) from error
