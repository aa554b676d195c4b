"""Tools and thoughts over HTTP, by a template that knows both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from live_server import HELLO, MODEL, Live, check_schema, running

from swift.config.data import PromptConfig
from swift.config.serving import ServeConfig
from swift.data.encoding.encode import ChatEncoder
from swift.inference.requests import SamplingParams, Update
from swift.serving.limits import Queue
from swift.serving.served import ServedModel, Talker

TEMPLATES = Path(__file__).parents[1] / "assets/templates"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "How it is outside.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "additionalProperties": False}},
}
SAID = (
    "<think>\nThe user wants\nthe weather.\n</think>\n\nLet me look.\n<tool_call>\n"
    '{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)


class _Saying:
    """The engine, but asked for 777 tokens it says `SAID`: a tiny model never says such things."""

    def __init__(self, backend: Any, tokenizer: Any) -> None:
        self._backend, self._tokenizer = backend, tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def close(self) -> None:
        pass

    def submit(self, request: Any, sink: Any) -> None:
        if request.params.max_new_tokens != 777:
            self._backend.submit(request, sink)
            return
        tokens = self._tokenizer(SAID, add_special_tokens=False)["input_ids"]
        texts, before = [], ""
        for count in range(1, len(tokens) + 1):
            text = self._tokenizer.decode(tokens[:count])
            texts.append(text[len(before) :])
            before = text
        for place, (token, text) in enumerate(zip(tokens, texts)):
            reason = "stop" if place == len(tokens) - 1 else None
            sink(Update(request.id, tokens=[token], text=text, finish_reason=reason, num_prompt_tokens=5))


@pytest.fixture(scope="module")
def talking(serving_backend: Any, tiny_model_dir: Path) -> Iterator[Live]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    encoder = ChatEncoder(tokenizer, PromptConfig(template=str(TEMPLATES / "qwen3.jinja")))
    backend: Any = _Saying(serving_backend, tokenizer)
    talker = Talker(backend, tokenizer, encoder, SamplingParams(), Queue(8, 100))
    config = ServeConfig(port=0, access_log=False, drain_s=5)
    with running(config, [ServedModel(MODEL, talker)]) as server:
        yield Live(server, backend)


@pytest.fixture
def tool_client(talking: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{talking.url}/v1", api_key="none", max_retries=0, timeout=60)


def test_thoughts_content_and_calls_are_told_apart(talking: Live, tool_client: openai.OpenAI) -> None:
    body = {"model": MODEL, "messages": HELLO, "tools": [WEATHER, CLOCK], "max_tokens": 777}
    raw = talking.post("/v1/chat/completions", body)
    assert raw.status_code == 200, raw.text
    check_schema("CreateChatCompletionResponse", raw.json())
    choice = raw.json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["reasoning_content"] == "The user wants\nthe weather."
    assert message["content"] == "Let me look."
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
    assert calls == [("weather", {"city": "Rome"}), ("clock", {})]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    # streamed: the same in pieces
    thoughts, content, streamed = "", "", {}
    chunks = talking.events("/v1/chat/completions", body)
    for chunk in chunks:
        check_schema("CreateChatCompletionStreamResponse", chunk)
        delta = chunk["choices"][0]["delta"]
        thoughts += delta.get("reasoning_content") or ""
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            entry = streamed.setdefault(call["index"], ["", ""])
            entry[0] += call["function"].get("name", "")
            entry[1] += call["function"]["arguments"]
    assert thoughts == message["reasoning_content"] and content == message["content"]
    assert [(name, json.loads(arguments)) for name, arguments in streamed.values()] == calls
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_calls_as_items_of_a_response(talking: Live) -> None:
    tools = [{"type": "function", **tool["function"]} for tool in (WEATHER, CLOCK)]
    found = talking.post("/v1/responses", {"input": "Weather?", "tools": tools, "max_output_tokens": 777}).json()
    check_schema("Response", found)
    assert [item["type"] for item in found["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert [item["name"] for item in found["output"][2:]] == ["weather", "clock"]
    assert json.loads(found["output"][2]["arguments"]) == {"city": "Rome"}
    assert found["output"][1]["content"][0]["text"] == "Let me look."


@pytest.mark.parametrize("temperature", [0, 1])  # greedy, a tiny model writes as much white space as it may
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_model_can_be_made_to_call(tool_client: openai.OpenAI, choice: Any, temperature: float) -> None:
    tools: Any = [WEATHER, CLOCK]
    answer = tool_client.chat.completions.create(
        model=MODEL, messages=HELLO, tools=tools, tool_choice=choice, parallel_tool_calls=False, max_tokens=800,
        temperature=temperature, seed=5,
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls or []
    assert answer.choices[0].finish_reason == "tool_calls"
    assert call.type == "function" and call.function.name in ("weather", "clock")
    if call.function.name == "weather":
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    if choice != "required":
        assert call.function.name == "weather"
    # the way back: results are shown to the model
    messages: Any = [
        *HELLO,
        answer.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    again = tool_client.chat.completions.create(model=MODEL, messages=messages, tools=tools, max_tokens=3)
    assert again.usage and answer.usage and again.usage.prompt_tokens > answer.usage.prompt_tokens


def test_tools_that_may_not_be_used_are_not_shown(talking: Live) -> None:
    def prompt(**more: Any) -> int:
        body = {"messages": HELLO, "max_tokens": 1, **more}
        return talking.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens"]

    assert prompt(tools=[WEATHER], tool_choice="none") == prompt() < prompt(tools=[WEATHER])


def test_thinking_is_switched_by_the_request(talking: Live) -> None:
    def tokens(**more: Any) -> Any:
        body = {"messages": HELLO, "max_tokens": 1, "return_token_ids": True, **more}
        answer = talking.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        return answer.json()["prompt_token_ids"]

    off = tokens(chat_template_kwargs={"enable_thinking": False})
    assert tokens(reasoning_effort="none") == off != tokens(reasoning_effort="high") == tokens()


def test_an_answer_of_a_given_form_is_no_thought(tiny_model_dir: Path, serving_backend: Any) -> None:
    """Even where the prompt has opened one: no text but that form can come."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    encoder = ChatEncoder(tokenizer, PromptConfig(template=str(TEMPLATES / "qwen3_thinking.jinja")))
    backend: Any = _Saying(serving_backend, tokenizer)
    models = [ServedModel(MODEL, Talker(backend, tokenizer, encoder, SamplingParams(), Queue(8, 100)))]
    with running(ServeConfig(port=0, access_log=False), models) as server:
        live = Live(server, backend)
        body = {"messages": HELLO, "max_tokens": 50, "tools": [WEATHER], "guided_choice": ["yes", "no"]}
        message = live.post("/v1/chat/completions", body).json()["choices"][0]["message"]
        assert message["content"] in ("yes", "no") and "reasoning_content" not in message
        thinking = live.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 5}).json()
        assert "reasoning_content" in thinking["choices"][0]["message"]  # the prompt opens a thought
        forced = live.post(
            "/v1/chat/completions",
            {"messages": HELLO, "max_tokens": 5, "tools": [WEATHER], "tool_choice": "required"},
        ).json()
        assert "reasoning_content" in forced["choices"][0]["message"]


def test_a_template_without_tools_says_so(tiny_model_dir: Path, serving_backend: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    encoder = ChatEncoder(tokenizer, PromptConfig(template=str(TEMPLATES / "zephyr.jinja")))
    backend: Any = _Saying(serving_backend, tokenizer)
    models = [ServedModel(MODEL, Talker(backend, tokenizer, encoder, SamplingParams(), Queue(8, 100)))]
    with running(ServeConfig(port=0, access_log=False), models) as server:
        answer = Live(server, backend).post("/v1/chat/completions", {"messages": HELLO, "tools": [WEATHER]})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools", answer.text
        assert "a call comes out as" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "more",
    [
        {"structured_outputs": {"tag": "{}"}},
        {"structured_outputs": {"structural_tag": "{}"}},
        {"response_format": {"type": "tag", "value": "{}"}},
        {"response_format": {"type": "structural_tag", "structures": []}},
    ],
)
def test_requests_give_no_structural_tags(talking: Live, more: dict[str, Any]) -> None:
    """The grammar of forced calls is the program's own; a request can't smuggle one in, past the vetting."""
    answer = talking.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 3, **more})
    if "response_format" in more:
        assert answer.status_code == 400, answer.text
    else:  # unknown fields are ignored, as everywhere
        assert answer.status_code == 200, answer.text


def test_rules_that_cant_be_kept_to_are_refused_in_forced_calls(talking: Live) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {"required": ["a"]}}}}
    body = {"messages": HELLO, "tools": [tool], "tool_choice": "required", "max_tokens": 3}
    answer = talking.post("/v1/chat/completions", body)
    assert answer.status_code == 400 and "not" in answer.json()["error"]["message"], answer.text
