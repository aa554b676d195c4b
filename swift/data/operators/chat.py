"""Whether a conversation is one: roles in order, no empty or repeated turns, tool calls that their tools allow.

Reads rows of every known layout, in their normal form (`swift.data.shapes`). Plain text passes. Doesn't repair: a turn
that is missing can't be made up, and one that is cut out leaves answers to questions that nobody asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from swift.config.fields import setting
from swift.data.engine.document import Document
from swift.data.engine.operator import OPERATORS, MapOperator
from swift.data.engine.tally import Tally
from swift.data.operators.json_schema import misfit
from swift.data.operators.rules import check_choice, wrong
from swift.data.rows import Row, RowProblem, RowRef
from swift.data.shapes import RowOptions, normalise_row

Fault = tuple[str, str]  # reason, note
_OPTIONS = RowOptions(need_answer=False)


@OPERATORS.register("chat_checks")
@dataclass
class ChatChecks(MapOperator):
    """Drop or note conversations with a fault: role order, empty or repeated turns, tool calls that no tool allows.

    A row that can't be read as a conversation is dropped for the reason that training would refuse it.
    """

    role_order: bool = setting(
        True, help="system only first; then user and assistant in turn, tools only behind the turn that called them"
    )
    first_role: Literal["user", "assistant", "any"] = setting("user", help="who speaks first, after the system message")
    last_role: Literal["assistant", "user", "any"] = setting("assistant", help="who speaks last")
    empty_turns: bool = setting(True, help="find turns of white space that hold no tool call either")
    duplicate_turns: bool = setting(True, help="find turns that repeat an earlier one of the same role word for word")
    duplicate_characters: int = setting(20, help="shorter turns may be repeated")
    tool_schema: bool = setting(
        True, help="each call names a declared tool, and its arguments fit that tool's parameters"
    )
    tool_results: bool = setting(True, help="each call has its result before the next turn, each result its call")
    action: Literal["drop", "tag"] = setting(
        "drop", help="drop the conversation for its first fault, or write all faults to meta.chat_faults and keep it"
    )

    def check(self) -> None:
        check_choice(self, "first_role", ("user", "assistant", "any"))
        check_choice(self, "last_role", ("assistant", "user", "any"))
        check_choice(self, "action", ("drop", "tag"))
        if self.duplicate_characters < 0:
            raise wrong("duplicate_characters", self.duplicate_characters, "at least 0")

    def run(self, batch: list[Document], tally: Tally) -> list[Document]:
        kept = []
        for document in batch:
            faults = [] if document.roles is None else list(self._faults(document))
            if not faults:
                kept.append(document)
            elif self.action == "drop":
                tally.drop(document, *faults[0])
            else:
                reasons = sorted({reason for reason, _ in faults})
                document.meta["chat_faults"] = reasons
                for reason in reasons:
                    tally.count("chat_faults", reason)
                kept.append(document)
        return kept

    def _faults(self, document: Document) -> Iterator[Fault]:
        try:
            row, _ = normalise_row(document.to_record(), RowRef(document.id, 0), _OPTIONS)
        except RowProblem as problem:
            yield problem.reason, problem.message
            return
        messages = row.messages
        if self.role_order:
            yield from _order_faults(messages)
        spoken = [message["role"] for message in messages if message["role"] != "system"]
        if self.first_role != "any" and spoken and spoken[0] != self.first_role:
            yield "first_role", f"the first turn is by {spoken[0]}"
        if self.last_role != "any" and spoken and spoken[-1] != self.last_role:
            yield "last_role", f"the last turn is by {spoken[-1]}"
        if self.empty_turns:
            for number, message in enumerate(messages, 1):
                if not message["content"].strip() and not message.get("tool_calls"):
                    yield "empty_turn", f"message {number} ({message['role']}) is empty"
        if self.duplicate_turns:
            yield from self._duplicates(messages)
        if self.tool_schema:
            yield from _schema_faults(row)
        if self.tool_results:
            yield from _result_faults(messages)

    def _duplicates(self, messages: list[dict[str, Any]]) -> Iterator[Fault]:
        seen: dict[tuple[str, str], int] = {}
        for number, message in enumerate(messages, 1):
            words = " ".join(message["content"].split())
            key = (message["role"], words)
            if message["role"] == "tool" or len(words) < self.duplicate_characters:
                continue
            if key in seen:
                yield "duplicate_turn", f"message {number} ({message['role']}) repeats message {seen[key]}"
            seen.setdefault(key, number)


def _order_faults(messages: list[dict[str, Any]]) -> Iterator[Fault]:
    """What may follow what: nothing and system: user (or assistant); user: assistant; assistant: user, or tool if it
    called one; tool: tool, assistant."""
    before: dict[str, Any] | None = None
    for number, message in enumerate(messages, 1):
        role = message["role"]
        last = before["role"] if before else None
        allowed = {
            None: ("system", "user", "assistant"),
            "system": ("user", "assistant"),
            "user": ("assistant",),
            "assistant": ("tool", "user") if before and before.get("tool_calls") else ("user",),
            "tool": ("tool", "assistant"),
        }[last]
        if role not in allowed:
            yield "role_order", f"message {number} ({role}) follows {last or 'nothing'}"
        before = message


def _schema_faults(row: Row) -> Iterator[Fault]:
    tools = {tool["function"]["name"]: tool["function"].get("parameters") for tool in row.tools or ()}
    for number, message in enumerate(row.messages, 1):
        for call in message.get("tool_calls", ()):
            name = call["function"]["name"]
            if name not in tools:
                yield "undeclared_tool", f"message {number} calls {name}; declared: {', '.join(tools) or 'none'}"
            elif fault := misfit(call["function"]["arguments"], tools[name]):
                yield "tool_arguments", f"message {number}, call of {name}: {fault}"


def _result_faults(messages: list[dict[str, Any]]) -> Iterator[Fault]:
    """Every call is answered by a tool message behind it, by id where both have one, else by number. Calls that end the
    conversation wait for their results and are no fault."""
    number = 0
    while number < len(messages):
        calls = messages[number].get("tool_calls", [])
        number += 1
        start = number
        while number < len(messages) and messages[number]["role"] == "tool":
            number += 1
        results = messages[start:number]
        if number == len(messages) and calls and not results:
            return
        known = {call["id"] for call in calls if call.get("id")}
        answered: set[str] = set()
        for place, result in enumerate(results, start + 1):
            wanted = result.get("tool_call_id")
            if not calls or (known and wanted and wanted not in known):
                yield "result_without_call", f"message {place} (tool) answers no call"
            elif known and wanted in answered:
                yield "result_without_call", f"message {place} (tool) answers a call that has its answer"
            elif wanted:
                answered.add(wanted)
        if len(results) < len(calls):
            yield "missing_result", f"message {start} has {len(calls)} call(s) and {len(results)} result(s) behind it"
        elif calls and len(results) > len(calls):
            yield (
                "result_without_call",
                f"message {start} has {len(calls)} call(s) and {len(results)} results behind it",
            )
