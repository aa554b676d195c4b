"""Conversations over HTTP: by OpenAI's own client, and compared with OpenAI's own schemas."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from live_server import HELLO, MODEL, Live, check_schema


@pytest.fixture(scope="module")
def reference(tiny_model_dir: Path) -> Any:
    """The model by transformers alone, with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval(), AutoTokenizer.from_pretrained(tiny_model_dir)


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": HELLO, "max_tokens": 8, **more})


def test_an_answer_is_that_of_generate(client: openai.OpenAI, reference: Any) -> None:
    model, tokenizer = reference
    prompt = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    answer = ask(client)
    assert answer.choices[0].message.content == tokenizer.decode(made, skip_special_tokens=True)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (prompt["input_ids"].shape[1], 8)
    assert usage.total_tokens == usage.prompt_tokens + 8


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"logprobs": True, "top_logprobs": 3},
        {"n": 3, "temperature": 1.0},
        {"stop": ["x", "y"]},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"5": -100}},
        {"return_token_ids": True, "prompt_logprobs": 1},
    ],
)
def test_bodies_are_as_openai_describes_them(live: Live, more: dict[str, Any]) -> None:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 5, **more}
    whole = live.post("/v1/chat/completions", body)
    assert whole.status_code == 200, whole.text
    check_schema("CreateChatCompletionResponse", whole.json())
    chunks = live.events("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    for chunk in chunks:
        check_schema("CreateChatCompletionStreamResponse", chunk)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 5 * more.get("n", 1)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    check_schema("ListModelsResponse", live.get("/v1/models").json())
    check_schema("Model", live.get(f"/v1/models/{MODEL}").json())


def test_a_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"n": 2, "temperature": 0.8, "seed": 7, "logprobs": True, "top_logprobs": 2}
    whole = ask(client, **settings)
    texts, tokens, reasons = ["", ""], [[], []], [None, None]
    for chunk in ask(client, stream=True, **settings):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            tokens[choice.index] += [each.token for each in choice.logprobs.content] if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert tokens == [[each.token for each in choice.logprobs.content] for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert texts[0] != texts[1]


def test_seeds(client: openai.OpenAI) -> None:
    def text(**more: Any) -> str:
        return ask(client, temperature=1.0, **more).choices[0].message.content

    assert text(seed=1) == text(seed=1)
    assert text(seed=1) != text(seed=2)
    assert text() != text()


def test_logprobs_are_those_of_the_model(client: openai.OpenAI, reference: Any) -> None:
    model, tokenizer = reference
    found = ask(client, logprobs=True, top_logprobs=4, max_tokens=3).choices[0].logprobs.content
    prompt = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=True)["input_ids"]
    for entry in found:
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        chosen = int(expected.argmax())
        assert entry.logprob == pytest.approx(float(expected[chosen]), abs=1e-4)
        assert bytes(entry.bytes).decode() == entry.token == tokenizer.decode([chosen])
        values = [top.logprob for top in entry.top_logprobs]
        assert values == pytest.approx(expected.topk(4).values.tolist(), abs=1e-4)
        prompt = [*prompt, chosen]


def test_stop_texts_and_the_shortest_answer(client: openai.OpenAI, live: Live) -> None:
    text = ask(client, max_tokens=12).choices[0].message.content
    stop = text[len(text) // 2 :][:3]
    cut = ask(client, max_tokens=12, stop=stop)
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    raw = live.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 12, "stop": [stop]}).json()
    assert raw["choices"][0]["stop_reason"] == stop


def test_contents_in_parts_and_developers(live: Live) -> None:
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "who are you?"}]}
    ]
    system = [{"role": "system", "content": "Be kind."}, *HELLO]
    developer = [{"role": "developer", "content": "Be kind."}, *HELLO]

    def tokens(messages: Any) -> Any:
        return live.post("/tokenize", {"messages": messages}).json()["tokens"]

    assert tokens(parts) == tokens(HELLO)
    assert tokens(system) == tokens(developer) != tokens(HELLO)


def test_answers_of_a_form(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 5}, "size": {"enum": [1, 2]}},
        "required": ["city", "size"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "town", "schema": schema, "strict": True}}
    answer = json.loads(ask(client, response_format=form, max_tokens=200).choices[0].message.content)
    assert set(answer) == {"city", "size"} and answer["size"] in (1, 2)
    for extra in ({"guided_choice": ["red", "blue"]}, {"structured_outputs": {"choice": ["red", "blue"]}}):
        said = ask(client, max_tokens=20, extra_body=extra).choices[0]
        assert said.message.content in ("red", "blue") and said.finish_reason == "stop"
    number = ask(client, max_tokens=20, extra_body={"guided_regex": "[0-9]{3}"}).choices[0].message.content
    assert len(number) == 3 and number.isdigit()


def test_the_asynchronous_client_and_fifty_at_once(live: Live) -> None:
    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=120) as client:

            async def one(number: int) -> str:
                messages: Any = [{"role": "user", "content": f"Say {number % 5}"}]
                if number % 2:
                    found = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=6)
                    return found.choices[0].message.content or ""
                stream = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=6, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*[one(number) for number in range(50)])

    texts = asyncio.run(main())
    for number, text in enumerate(texts):
        assert text == texts[number % 5] and text  # alone or among others, streamed or not
    assert live.num_answers == 0


def test_errors_reach_the_client_as_its_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=f"no model 'gpt'.*{MODEL}") as unknown:
        ask(client, model="gpt")
    assert unknown.value.code == "model_not_found" and unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError, match=r"context is 1024 tokens") as long:
        ask(client, messages=[{"role": "user", "content": "word " * 3000}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="is an image"):
        ask(client, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


def test_texts_of_single_tokens_make_the_bytes_of_the_whole(tokenizer: Any) -> None:
    from swift.serving.token_texts import TokenTexts

    texts = TokenTexts(tokenizer)
    for text in ("Hello, world!", "雨が降る 🤖 naïve", "\n\t  x", "<|im_start|>user"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert b"".join(texts.spelling(token) for token in ids) == text.encode()


def test_no_number_in_an_answer_is_infinite(tokenizer: Any) -> None:
    from swift.inference.requests import TokenLogprob
    from swift.serving.token_texts import TokenTexts

    entry = TokenTexts(tokenizer).chat_entry(TokenLogprob(300, -math.inf, ((301, 0.0),)))
    assert entry["logprob"] == -9999.0 and entry["top_logprobs"][0]["token"] == tokenizer.decode([301])
