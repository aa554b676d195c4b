"""The text of an answer whose tokens come from a server, made here, so that it is what other backends make of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swift.inference.decoding import AnswerText
from swift.inference.requests import Request, Update


class OwnText:
    """One answer.

    Args:
        tokenizer: of the model.
        stop_token_ids: what ends an answer unless the request says otherwise.
    """

    def __init__(self, request: Request, tokenizer: Any, stop_token_ids: Sequence[int]) -> None:
        params = request.params
        special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        # a stop word that is a special token never shows in the text
        self._words = {special[word]: word for word in params.stop if word in special}
        self._own = frozenset(params.stop_token_ids)
        self._ends = self._own | frozenset(() if params.ignore_eos else stop_token_ids)
        self._text = AnswerText(tokenizer, params.stop, skip_special_tokens=params.skip_special_tokens)

    def take(self, update: Update, *, last: bool) -> bool:
        """Fill in the text of an update's tokens, and the end and its reason where they end the answer.

        Args:
            last: no more tokens will come.

        Returns:
            whether the tokens end the answer.
        """
        final = update.tokens[-1] if update.tokens else None
        ended = final is not None and (final in self._ends or final in self._words)
        update.text = "".join(self._text.push(token) for token in (update.tokens[:-1] if ended else update.tokens))
        stopped = self._text.stopped_by
        if ended or stopped is not None:
            own = final if final in self._own else None
            update.finish_reason = "stop"
            update.stop_reason = stopped if stopped is not None else self._words.get(final or 0, own)
        if last or ended or stopped is not None:
            update.text += self._text.flush()
        return ended or stopped is not None
