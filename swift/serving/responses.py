"""/v1/responses: OpenAI's newer form of a conversation, for text. Nothing is stored: each request brings everything.

A request becomes one of /v1/chat/completions; what differs is how it is written and answered.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from swift.serving.chat import Answer, prepare_talk
from swift.serving.errors import ApiError, JsonResponse, field_name
from swift.serving.exchange import exchange_of
from swift.serving.generation import Generation, Usage
from swift.serving.output_items import OutputItems
from swift.serving.schema import Body, ChatRequest, Count, Int, refuse
from swift.serving.services import services_of
from swift.serving.sse import EventStream, named_event

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (), "conversation": (), "background": (False,), "store": (False,), "prompt": (),
    "include": ([],), "truncation": ("disabled",), "service_tier": ("auto", "default"), "max_tool_calls": (),
    "top_logprobs": (0,), "context_management": ([],),
}  # fmt: skip


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextSettings(Body):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningSettings(Body):
    effort: str | None = None
    summary: None = None
    generate_summary: None = None


class ResponsesRequest(Body):
    """Body of /v1/responses."""

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = False
    store: bool | None = None
    prompt: dict[str, Any] | None = None
    include: list[str] | None = None
    truncation: str | None = None
    service_tier: str | None = None
    max_tool_calls: Int | None = None
    top_logprobs: Int | None = None
    context_management: list[Any] | None = None


async def responses(http: HttpRequest, body: ResponsesRequest) -> Response:
    """Answer a conversation, as items."""
    services = services_of(http)
    refuse(body, _UNSUPPORTED)
    talk = await prepare_talk(http, _as_chat(body))
    exchange = exchange_of(http.scope)
    params = talk.params[0]
    head: dict[str, Any] = {
        "id": f"resp_{exchange.id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": talk.model.name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": False,
        "temperature": params.temperature,
        "text": {"format": _format(body)},
        "tool_choice": body.tool_choice or "auto",
        "tools": [{"parameters": None, "strict": False, **tool} for tool in body.tools or []],
        "top_p": params.top_p,
        "truncation": "disabled",
        "metadata": body.metadata or {},
        **({} if body.user is None else {"user": body.user}),
    }
    answer, items = Answer(talk.reader()), OutputItems(exchange.id)
    generation = Generation(services, talk.model, talk.talker, talk.wanted(), http)
    try:
        await generation.begin()
        if body.stream:
            return EventStream(_events(generation, answer, items, head), generation, done=b"")
        async for found in generation.updates():
            for _, update in found:
                for piece in answer.add(update):
                    items.add(piece)
    except BaseException:
        generation.close()
        raise
    generation.close()
    items.finish([], complete=answer.finish_reason != "length")
    if services.config.log_contents:
        exchange.contents = {"input": body.input, "output": items.items}
    return JsonResponse(_whole(head, answer, items, generation.usage))


async def _events(
    generation: Generation, answer: Answer, items: OutputItems, head: dict[str, Any]
) -> AsyncIterator[bytes]:
    number = -1

    def written(events: list[dict[str, Any]]) -> bytes:
        nonlocal number
        chunks = []
        for each in events:
            number += 1
            chunks.append(named_event({**each, "sequence_number": number}))
        return b"".join(chunks)

    yield written([{"type": kind, "response": head} for kind in ("response.created", "response.in_progress")])
    try:
        async for found in generation.updates():
            events = [
                each for _, update in found for piece in answer.add(update) for each in items.add(piece)
            ]  # fmt: skip
            if events:
                yield written(events)
    except ApiError as error:
        yield written([{"type": "error", "code": error.code, "message": error.message, "param": error.param}])
        return
    complete = answer.finish_reason != "length"
    events = items.finish([], complete=complete)
    kind = "response.completed" if complete else "response.incomplete"
    yield written([*events, {"type": kind, "response": _whole(head, answer, items, generation.usage)}])
    if generation.services.config.log_contents:
        exchange_of(generation.http.scope).contents = {"output": items.items}


def _whole(head: dict[str, Any], answer: Answer, items: OutputItems, usage: Usage) -> dict[str, Any]:
    complete = answer.finish_reason != "length"
    return {
        **head,
        "status": "completed" if complete else "incomplete",
        "incomplete_details": None if complete else {"reason": "max_output_tokens"},
        "completed_at": int(time.time()) if complete else None,
        "output": items.items,
        "usage": {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt + usage.generated,
        },
    }


def _format(body: ResponsesRequest) -> dict[str, Any]:
    if body.text is None or body.text.format is None:
        return {"type": "text"}
    return body.text.format.model_dump(by_alias=True, exclude_none=True)


def _as_chat(body: ResponsesRequest) -> ChatRequest:
    """The same as a request of /v1/chat/completions.

    Raises:
        ApiError: 400, an item or a tool that isn't one of text.
    """
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        for number, item in enumerate(body.input):
            _add_item(messages, item, f"input[{number}]")
    given: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tools": [_tool(tool, f"tools[{number}]") for number, tool in enumerate(body.tools or [])] or None,
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "response_format": _response_format(body),
    }
    try:
        return ChatRequest.model_validate(given)
    except ValidationError as error:
        problem = max(error.errors(), key=lambda each: len(each["loc"]))
        where = field_name(problem["loc"])
        where = where.replace("messages", "input", 1)
        raise ApiError(400, f"{where}: {problem['msg']}", param=where) from error


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        messages.append({"role": item.get("role"), "content": item.get("content")})
    elif kind == "function_call":
        call = {
            "id": item.get("call_id"),
            "function": {"name": item.get("name"), "arguments": item.get("arguments", "{}")},
        }
        if messages and messages[-1].get("tool_calls"):  # several calls of one answer
            messages[-1]["tool_calls"].append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        output = item.get("output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    elif kind != "reasoning":  # thoughts of earlier answers aren't shown to the model again
        raise ApiError(400, f"{where} is of type {kind!r:.60}, which is not supported", param=where)


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise ApiError(400, f"{where} is of type {tool.get('type')!r:.60}: only functions can be called", param=where)
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(given: str | dict[str, Any] | None) -> Any:
    if isinstance(given, dict) and "name" in given:
        return {"type": given.get("type"), "function": {"name": given["name"]}}
    return given


def _response_format(body: ResponsesRequest) -> dict[str, Any] | None:
    form = body.text.format if body.text else None
    if form is None:
        return None
    if form.type == "json_schema":
        return {"type": "json_schema", "json_schema": {"name": form.name, "schema": form.schema_}}
    return {"type": form.type}
