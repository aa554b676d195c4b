"""Texts to be continued: every kind of prompt, echoes with log-probabilities, the best of several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from live_server import MODEL, Live, check_schema

TEXT = "The river runs to the sea"


def complete(live: Live, **body: Any) -> dict[str, Any]:
    answer = live.post("/v1/completions", {"model": MODEL, "max_tokens": 4, **body})
    assert answer.status_code == 200, answer.text
    if not body.get("echo"):  # whose first token has no log-probability, which the schema forgets
        check_schema("CreateCompletionResponse", answer.json())
    return answer.json()


def tokens_of(live: Live, text: str) -> list[int]:
    return live.post("/tokenize", {"prompt": text}).json()["tokens"]


def test_prompts_of_all_kinds_get_one_answer(live: Live) -> None:
    ids = tokens_of(live, TEXT)
    one = complete(live, prompt=TEXT)["choices"][0]["text"]
    assert one
    assert complete(live, prompt=ids)["choices"][0]["text"] == one
    many = complete(live, prompt=[TEXT, "Another"], n=2)
    assert [choice["index"] for choice in many["choices"]] == [0, 1, 2, 3]
    assert many["choices"][0]["text"] == many["choices"][1]["text"] == one
    listed = complete(live, prompt=[ids, tokens_of(live, "Another")])
    assert [choice["text"] for choice in listed["choices"]] == [many["choices"][0]["text"], many["choices"][2]["text"]]
    assert many["usage"]["prompt_tokens"] == listed["usage"]["prompt_tokens"]  # choices share a prompt


def test_detokenize_undoes_tokenize(live: Live) -> None:
    for text in (TEXT, "雨 🤖", " <|im_end|>"):
        found = live.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
        assert live.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": text}
        assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
        assert found["max_model_len"] == 1024


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_an_echo_tells_how_likely_the_prompt_was(live: Live, tiny_model_dir: Path, max_tokens: int) -> None:
    from transformers import AutoModelForCausalLM

    ids = tokens_of(live, TEXT)
    choice = complete(live, prompt=ids, echo=True, logprobs=2, max_tokens=max_tokens)["choices"][0]
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    found = choice["logprobs"]
    assert len(found["tokens"]) == len(ids) + max_tokens
    assert {len(found[name]) for name in found} == {len(ids) + max_tokens}
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    for place, token in enumerate(ids[1:], 1):
        row = expected[place - 1]
        assert found["token_logprobs"][place] == pytest.approx(float(row[token]), abs=1e-4)
        assert max(found["top_logprobs"][place].values()) == pytest.approx(float(row.max()), abs=1e-4)
        assert found["tokens"][place] in found["top_logprobs"][place]
    assert choice["text"].startswith(TEXT)
    for text, offset in zip(found["tokens"], found["text_offset"]):
        assert choice["text"][offset : offset + len(text)] == text


def test_the_best_of_several_comes_first(live: Live) -> None:
    body = {"prompt": TEXT, "temperature": 1.0, "seed": 3, "logprobs": 0, "max_tokens": 5}
    every = complete(live, **body, n=6)["choices"]
    means = sorted((sum(each["logprobs"]["token_logprobs"]) for each in every), reverse=True)
    best = complete(live, **body, n=2, best_of=6)["choices"]
    assert [sum(each["logprobs"]["token_logprobs"]) for each in best] == pytest.approx(means[:2], abs=1e-6)
    assert [each["index"] for each in best] == [0, 1]


def test_a_stream_is_the_whole_answer(live: Live) -> None:
    body = {"model": MODEL, "prompt": [TEXT, "Another"], "max_tokens": 6, "logprobs": 1, "echo": True}
    whole = complete(live, **body)
    chunks = live.events("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    for index in (0, 1):
        parts = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        expected = whole["choices"][index]
        assert "".join(part["text"] for part in parts) == expected["text"]
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert [each for part in parts for each in part["logprobs"][name]] == expected["logprobs"][name]
        assert parts[-1]["finish_reason"] == expected["finish_reason"]
    assert chunks[-1]["usage"] == whole["usage"]


def test_ids_and_prompt_logprobs_as_vllm_has_them(live: Live) -> None:
    ids = tokens_of(live, TEXT)
    choice = complete(live, prompt=ids, return_token_ids=True, prompt_logprobs=1)["choices"][0]
    assert choice["prompt_token_ids"] == ids and len(choice["token_ids"]) == 4
    found = choice["prompt_logprobs"]
    assert found[0] is None and len(found) == len(ids)
    for token, entry in zip(ids[1:], found[1:]):
        assert entry[str(token)]["logprob"] <= max(each["logprob"] for each in entry.values())
        assert any(each["rank"] == 1 for each in entry.values())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": TEXT, "suffix": "."}, "suffix"),
        ({"prompt": TEXT, "best_of": 1, "n": 2}, "best_of"),
        ({"prompt": TEXT, "best_of": 3, "stream": True}, "best_of"),
        ({"prompt": TEXT, "max_tokens": 0}, "echo"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "no tokens"),
        ({"prompt": [99999999]}, "no token 99999999"),
        ({"prompt": [-1]}, "no token -1"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": TEXT, "max_tokens": 2000}, "context is 1024"),
        ({"prompt": TEXT, "logprobs": 21}, "20 at most"),
        ({"prompt": TEXT, "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": TEXT, "guided_regex": "a", "guided_choice": ["b"]}, "one form"),
        ({"prompt": TEXT, "min_tokens": 9}, "min_tokens"),
        ({"prompt": TEXT, "stream_options": {"include_usage": True}}, "stream"),
    ],
)
def test_what_cannot_be_is_refused_by_name(client: openai.OpenAI, live: Live, body: dict[str, Any], words: str) -> None:
    answer = live.post("/v1/completions", {"model": MODEL, "max_tokens": 4, **body})
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
    check_schema("ErrorResponse", answer.json())
