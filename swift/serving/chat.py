"""/v1/chat/completions: conversations in, answers out: content, thoughts and tool calls, whole or as they come."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from swift.core.errors import SwiftError
from swift.inference.answers.parts import Piece
from swift.inference.answers.reader import AnswerForm, AnswerReader
from swift.inference.requests import SamplingParams, Structure, TokenLogprob, Update
from swift.serving.errors import ApiError, JsonResponse, from_swift
from swift.serving.exchange import exchange_of
from swift.serving.generation import Generation, Wanted
from swift.serving.params import check_context, check_logprobs, sampling_params, seeds, structure_of
from swift.serving.prompts import encode_chat, plain_messages, plain_tools
from swift.serving.said import delta_of
from swift.serving.schema import ChatRequest, NamedTool, refuse
from swift.serving.served import ServedModel, Talker
from swift.serving.services import Services, services_of
from swift.serving.sse import EventStream, event

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "store": (False,), "service_tier": ("auto", "default"), "verbosity": ("medium",), "modalities": (["text"],),
    "audio": (), "prediction": (), "web_search_options": (), "functions": ([],), "function_call": ("none",),
    "add_generation_prompt": (True,), "continue_final_message": (False,),
}  # fmt: skip
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "tokenize", "chat_template"})


@dataclass(frozen=True)
class Talk:
    """What a conversation asks for, ready for the engine.

    Attributes:
        prompt: token ids.
        form: what may be in the answers.
    """

    model: ServedModel
    talker: Talker
    prompt: list[int]
    params: list[SamplingParams]
    form: AnswerForm

    def wanted(self) -> list[Wanted]:
        return [Wanted(self.prompt, each) for each in self.params]

    def reader(self) -> AnswerReader:
        return AnswerReader(self.form)


@dataclass
class Answer:
    """One answer as far as it is there.

    Attributes:
        reader: takes its text apart.
    """

    reader: AnswerReader
    content: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, update: Update) -> list[Piece]:
        """Take what is new; gives the pieces that it adds to the answer."""
        self.tokens += update.tokens
        self.logprobs += update.logprobs or []
        if update.prompt_logprobs is not None:
            self.prompt_logprobs = update.prompt_logprobs
        pieces = self.reader.feed(update.text)
        if update.finish_reason is not None:
            pieces += self.reader.end()
        for piece in pieces:
            self._keep(piece)
        if update.finish_reason is not None:
            called = self.calls and update.finish_reason == "stop"
            self.finish_reason = "tool_calls" if called else update.finish_reason
            self.stop_reason = update.stop_reason
        return pieces

    def _keep(self, piece: Piece) -> None:
        if piece.content:
            self.content.append(piece.content)
        if piece.thought:
            self.thoughts.append(piece.thought)
        if piece.call is not None:
            while len(self.calls) <= piece.call.index:
                self.calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
            call = self.calls[piece.call.index]
            call["id"] = piece.call.id or call["id"]
            call["function"]["name"] += piece.call.name or ""
            call["function"]["arguments"] += piece.call.arguments

    def message(self) -> dict[str, Any]:
        """The whole answer as a message."""
        content = "".join(self.content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, "annotations": []}
        if self.calls:
            message["content"] = content or None
            message["tool_calls"] = self.calls
        if self.thoughts:
            message["reasoning_content"] = "".join(self.thoughts)
        return message


async def prepare_talk(http: HttpRequest, body: ChatRequest) -> Talk:
    """Check a conversation and encode it.

    Raises:
        ApiError: it can't be answered as asked.
    """
    services = services_of(http)
    model, talker = services.models.talker(body.model)
    exchange_of(http.scope).model = model.name
    refuse(body, _UNSUPPORTED)
    check_logprobs(body.top_logprobs, services.config.max_logprobs, "top_logprobs")
    check_logprobs(body.prompt_logprobs, services.config.max_logprobs, "prompt_logprobs")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs need logprobs: true", param="top_logprobs")
    messages, tools = plain_messages(body.messages), plain_tools(body.tools)
    if body.tool_choice == "none":
        tools = None
    prompt = await encode_chat(services, talker, messages, tools, _template_kwargs(body, talker))
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    check_context(len(prompt), limit, talker.backend.info.context_length, "messages")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    try:
        form = talker.forms.form(prompt, tools)
        structure = _structure(body, talker, form)
        if structure is not None and structure.kind != "tag":
            form = AnswerForm()  # all of the answer has the form that was asked for
        params = sampling_params(body, talker, structure=structure, max_tokens=limit, logprobs=logprobs)
        if not talker.forms.skips_special_tokens(tools):
            params = replace(params, skip_special_tokens=False)  # calls or thoughts are marked by them
    except SwiftError as error:
        raise from_swift(error, param="tools") from error
    return Talk(model, talker, prompt, seeds(params, body.seed, body.n or 1), form)


async def chat_completions(http: HttpRequest, body: ChatRequest) -> Response:
    """Answer a conversation."""
    services = services_of(http)
    talk = await prepare_talk(http, body)
    exchange = exchange_of(http.scope)
    head = {
        "id": f"chatcmpl-{exchange.id}",
        "object": "chat.completion.chunk" if body.stream else "chat.completion",
        "created": int(time.time()),
        "model": talk.model.name,
        "system_fingerprint": talk.model.fingerprint,
    }
    answers = [Answer(talk.reader()) for _ in talk.params]
    generation = Generation(services, talk.model, talk.talker, talk.wanted(), http, body.priority or 0)
    try:
        await generation.begin()
        if body.stream:
            return EventStream(_events(generation, answers, body, head), generation)
        async for items in generation.updates():
            for index, update in items:
                answers[index].add(update)
    except BaseException:
        generation.close()
        raise
    generation.close()
    _log_contents(services, http, body, answers)
    choices = [_choice(index, answer, body, talk) for index, answer in enumerate(answers)]
    whole: dict[str, Any] = {**head, "choices": choices, "usage": generation.usage.body()}
    if body.prompt_logprobs is not None:
        whole["prompt_logprobs"] = [talk.talker.texts.prompt_entry(each) for each in answers[0].prompt_logprobs or []]
    if body.return_token_ids:
        whole["prompt_token_ids"] = talk.prompt
    return JsonResponse(whole)


def _choice(index: int, answer: Answer, body: ChatRequest, talk: Talk) -> dict[str, Any]:
    entries = [talk.talker.texts.chat_entry(each) for each in answer.logprobs]
    choice: dict[str, Any] = {
        "index": index,
        "message": answer.message(),
        "logprobs": {"content": entries, "refusal": None} if body.logprobs else None,
        "finish_reason": answer.finish_reason,
    }
    if answer.stop_reason is not None:
        choice["stop_reason"] = answer.stop_reason
    if body.return_token_ids:
        choice["token_ids"] = answer.tokens
    return choice


async def _events(
    generation: Generation, answers: list[Answer], body: ChatRequest, head: dict[str, Any]
) -> AsyncIterator[bytes]:
    with_usage = bool(body.stream_options and body.stream_options.include_usage)
    texts = generation.talker.texts
    every = {**head, "usage": None} if with_usage else head
    begun: set[int] = set()

    def chunk(index: int, delta: dict[str, Any], **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return event({**every, "choices": [choice]})

    async for items in generation.updates():
        chunks: list[bytes] = []
        for index, update in items:
            answer = answers[index]
            pieces = answer.add(update)
            if index not in begun:
                begun.add(index)
                first: dict[str, Any] = {}
                if body.return_token_ids:
                    first = {"prompt_token_ids": generation.wanted[index].prompt}
                chunks.append(chunk(index, {"role": "assistant", "content": ""}, **first))
            more: dict[str, Any] = {}
            if body.logprobs and update.logprobs:
                more["logprobs"] = {"content": [texts.chat_entry(e) for e in update.logprobs], "refusal": None}
            if body.return_token_ids and update.tokens:
                more["token_ids"] = list(update.tokens)
            for delta in [delta_of(piece) for piece in pieces] or ([{}] if more else []):
                chunks.append(chunk(index, delta, **more))
                more = {}  # once
            if answer.finish_reason is not None:
                stop = {} if answer.stop_reason is None else {"stop_reason": answer.stop_reason}
                chunks.append(chunk(index, {}, finish_reason=answer.finish_reason, **stop))
        if chunks:
            yield b"".join(chunks)
    if with_usage:
        yield event({**head, "choices": [], "usage": generation.usage.body()})
    _log_contents(generation.services, generation.http, body, answers)


def _structure(body: ChatRequest, talker: Talker, form: AnswerForm) -> Structure | None:
    """The form of the answer: asked for, or following from a tool that has to be called."""
    structure = structure_of(body, body.response_format)
    choice = body.tool_choice
    if choice is None or choice in ("none", "auto"):
        if choice == "auto" and not body.tools:
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        return structure
    if not body.tools:
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")
    if structure is not None:
        raise ApiError(400, "a tool that has to be called leaves no room for another form", param="tool_choice")
    tools = plain_tools(body.tools) or []
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool["function"]["name"] == choice.function.name]
        if not tools:
            raise ApiError(400, f"there is no tool {choice.function.name!r:.200}", param="tool_choice")
    try:
        parallel = body.parallel_tool_calls is not False
        return talker.forms.forced(tools, parallel=parallel, begins_in_thought=form.begins_in_thought)
    except SwiftError as error:
        raise from_swift(error, param="tool_choice") from error


def _template_kwargs(body: ChatRequest, talker: Talker) -> dict[str, Any]:
    kwargs = dict(body.chat_template_kwargs or {})
    for name in kwargs:
        if name in _RESERVED:
            raise ApiError(400, f"chat_template_kwargs can't set {name}", param="chat_template_kwargs")
    if body.reasoning_effort is not None:
        template = talker.encoder.template or ""
        if "reasoning_effort" in template:
            kwargs.setdefault("reasoning_effort", body.reasoning_effort)
        elif "enable_thinking" in template:
            kwargs.setdefault("enable_thinking", body.reasoning_effort != "none")
        elif body.reasoning_effort != "none":  # a model that doesn't think does what "none" asks
            raise ApiError(400, "the model has no reasoning effort", param="reasoning_effort")
    return kwargs


def _log_contents(services: Services, http: HttpRequest, body: ChatRequest, answers: list[Answer]) -> None:
    if services.config.log_contents:
        exchange_of(http.scope).contents = {
            "messages": [message.model_dump(exclude_none=True) for message in body.messages],
            "answers": [answer.message() for answer in answers],
        }
