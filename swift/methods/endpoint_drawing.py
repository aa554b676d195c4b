"""Answers drawn from an endpoint that speaks OpenAI's chat completions, as work of a batch job (`inference.batch`)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from swift.config.inference import GenerationConfig
from swift.core.chat_client import ChatClient, NoAnswer, said
from swift.data.rows import RowProblem
from swift.inference.batch import error_result
from swift.inference.inputs import InputRow, Inputs, split_reference


@dataclass
class EndpointDrawing:
    """See `inference.batch.Work`.

    Attributes:
        model: its name at the endpoint.
        generation: how to answer; what the protocol has no field for was refused before.
        system: system prompt of rows that have none.
        concurrency: questions at a time.
    """

    client: ChatClient
    model: str
    generation: GenerationConfig
    system: str | None = None
    concurrency: int = 8

    def read(self, inputs: Inputs, indices: range) -> Iterator[InputRow]:
        for index, (ref, row) in enumerate(inputs.rows()):
            if index not in indices:
                continue
            found = InputRow(index, ref)
            if isinstance(row, RowProblem):
                found.problem = (row.reason, row.message)
            else:
                found.row = row
                messages, found.reference = split_reference(row.messages)
                if not messages:
                    found.problem = ("no_prompt", "the row has no conversation before its answer")
            yield found

    def answer(self, rows: Iterator[InputRow]) -> Iterator[tuple[int, dict[str, Any]]]:
        running: dict[Future[dict[str, Any]], int] = {}
        with ThreadPoolExecutor(self.concurrency) as pool:
            try:
                for place, row in enumerate(rows):
                    if row.problem is not None:
                        yield place, error_result(row, *row.problem)
                        continue
                    running[pool.submit(self._draw, row)] = place
                    if len(running) >= 2 * self.concurrency:
                        yield from _ended(running)
                while running:
                    yield from _ended(running)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _draw(self, row: InputRow) -> dict[str, Any]:
        """All answers to a row, one question for each: not every endpoint knows `n`."""
        try:
            texts = [self._ask(row, draw) for draw in range(self.generation.num_return_sequences)]
        except NoAnswer as error:
            return error_result(row, "not_answerable", str(error))
        each = [{"response": text, "finish_reason": reason, "num_tokens": count} for text, reason, count in texts]
        return {
            **row.result(),
            "status": "ok",
            **each[0],
            "num_prompt_tokens": 0,
            **({"responses": each} if len(each) > 1 else {}),
        }

    def _ask(self, row: InputRow, draw: int) -> tuple[str, str, int]:
        """One answer: its text, why it ended, how many tokens it has."""
        assert row.row is not None
        messages, _ = split_reference(row.row.messages)
        if self.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        seed = hashlib.sha256(f"{self.generation.seed}/{row.index}/{draw}".encode()).digest()
        body = {
            "model": self.model,
            "messages": messages,
            "seed": int.from_bytes(seed[:4], "big") >> 1,
            "temperature": self.generation.temperature,
            "top_p": self.generation.top_p,
            "max_tokens": self.generation.max_new_tokens,
            "stop": self.generation.stop_words or None,
            "tools": row.row.tools or None,
        }
        answer = self.client.ask({name: value for name, value in body.items() if value is not None})
        (text, *_), choice = said(answer), answer["choices"][0]
        usage = answer.get("usage") or {}
        return text, str(choice.get("finish_reason") or "stop"), int(usage.get("completion_tokens") or 0)


def _ended(running: dict[Future[dict[str, Any]], int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Wait for one at least, and hand out those that have ended."""
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        yield running.pop(future), future.result()
