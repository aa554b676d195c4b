"""Chat encoding over the template shapes of published model families (`tests/assets/templates`).

The oracle is independent of the encoder: ids come from `apply_chat_template`, prompts from its generation prompt, and
the trained text from the table below, written from the formats' public descriptions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from fixtures import TEMPLATES_DIR, make_tokenizer

from swift.config.data import TemplateConfig
from swift.core.errors import TemplateError
from swift.data.encoding.encode import ChatEncoder, Encoded
from swift.data.rows import Row, RowProblem, RowRef


@dataclass(frozen=True)
class Format:
    """What is published about a family: special tokens, what surrounds an answer, what it can't take."""

    name: str
    end: str
    lead: str = ""
    eos: str = "<|im_end|>"
    bos: str | None = None
    system: bool = True
    tools: bool = False
    variables: tuple[tuple[str, bool], ...] = ()  # what the template is told when answers have no thoughts


FORMATS = [
    Format("chatml", "<|im_end|>"),
    Format("chatml_generation", "<|im_end|>"),
    Format("smollm2", "<|im_end|>"),
    Format("qwen2_5", "<|im_end|>", tools=True),
    Format("llama2", " </s>", lead=" ", eos="</s>", bos="<s>"),
    Format("llama3", "<|eot_id|>", eos="<|eot_id|>", bos="<|begin_of_text|>"),
    Format("llama3_1", "<|eot_id|>", eos="<|eot_id|>", bos="<|begin_of_text|>", tools=True),
    Format("mistral_tools", "</s>", lead=" ", eos="</s>", bos="<s>", tools=True),
    Format("gemma", "<end_of_turn>", eos="<eos>", bos="<bos>", system=False),
    Format(
        "deepseek_v3", "<｜end▁of▁sentence｜>", eos="<｜end▁of▁sentence｜>", bos="<｜begin▁of▁sentence｜>", tools=True
    ),
    Format("phi3", "<|end|>", eos="<|endoftext|>"),
    Format("phi4", "<|im_end|>"),
    Format("zephyr", "</s>", eos="</s>"),
    Format("vicuna", "</s>", lead=" ", eos="</s>", bos="<s>"),
    Format("command_r", "<|END_OF_TURN_TOKEN|>", eos="<|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>"),
    Format("olmo2", "<|endoftext|>", eos="<|endoftext|>", bos="<|endoftext|>"),
    Format("smollm3", "<|im_end|>", variables=(("enable_thinking", False),)),
]
BY_NAME = {each.name: each for each in FORMATS}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}

SINGLE = [{"role": "user", "content": "Where is Köln?"}, {"role": "assistant", "content": "In Germany 😀."}]
MULTI = [
    *SINGLE,
    {"role": "user", "content": "  And Paris?\n"},
    {"role": "assistant", "content": "In France.\n\nIt is the capital."},
    {"role": "user", "content": "你好"},
    {"role": "assistant", "content": "你好！"},
]
SYSTEM = [{"role": "system", "content": "Be brief."}, *MULTI]
KINDS = {"single": SINGLE, "multi": MULTI, "system": SYSTEM}


def load(name: str, **special: str | None):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (TEMPLATES_DIR / f"{name}.jinja").read_text(encoding="utf-8")
    for key, value in special.items():
        if value:
            setattr(tokenizer, key, value)
    return tokenizer


def of(fmt: Format):
    return load(fmt.name, eos_token=fmt.eos, bos_token=fmt.bos)


def row(messages, **more) -> Row:
    return Row(RowRef("rows.jsonl", 1), messages, **more)


def oracle_ids(tokenizer, messages, **kwargs) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, **kwargs)["input_ids"])


def runs(example: Encoded) -> list[tuple[int, int]]:
    """The stretches of trained tokens, as [start, end)."""
    on = np.flatnonzero(np.diff(np.concatenate([[0], example.loss_weights > 0, [0]]).astype(int)))
    return list(zip(on[::2].tolist(), on[1::2].tolist(), strict=True))


def trained(tokenizer, example: Encoded) -> list[str]:
    return [tokenizer.decode(example.input_ids[a:b]) for a, b in runs(example)]


def assistant_indexes(messages) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def assert_prompts(tokenizer, example: Encoded, messages, indexes, **kwargs) -> None:
    """Before each trained turn stand exactly the ids of its generation prompt."""
    found = runs(example)
    assert len(found) == len(indexes)
    for (start, _), index in zip(found, indexes, strict=True):
        prompt = oracle_ids(tokenizer, messages[:index], add_generation_prompt=True, **kwargs)
        assert example.input_ids[:start].tolist() == prompt


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_ids_prompts_and_trained_text(fmt: Format, kind: str):
    tokenizer, messages = of(fmt), KINDS[kind]
    encoder = ChatEncoder(tokenizer, TemplateConfig())
    if kind == "system" and not fmt.system:
        with pytest.raises(RowProblem, match="System role not supported") as problem:
            encoder.encode(row(messages))
        assert problem.value.reason == "template_refused" and problem.value.fix
        return
    if kind == "system" and fmt.name == "mistral_tools":
        return  # has its own test
    (example,) = encoder.encode(row(messages))
    assert example.input_ids.tolist() == oracle_ids(tokenizer, messages, **dict(fmt.variables))
    assert_prompts(tokenizer, example, messages, assistant_indexes(messages), **dict(fmt.variables))
    answers = [messages[i]["content"] for i in assistant_indexes(messages)]
    assert trained(tokenizer, example) == [fmt.lead + answer + fmt.end for answer in answers]
    assert encoder.counts["merged_borders"] == 0
    ends = tokenizer(fmt.end.strip(), add_special_tokens=False).input_ids
    assert ends[0] in encoder.stop_token_ids() and tokenizer.eos_token_id in encoder.stop_token_ids()


def call(name: str, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


TOOL_TALK = [
    {"role": "user", "content": "Weather in Paris?"},
    {"role": "assistant", "content": "", "tool_calls": [call("get_weather", city='Paris "quoted" é')]},
    {"role": "tool", "name": "get_weather", "content": '{"sky": "clear"}'},
    {"role": "assistant", "content": "It is clear."},
]
PARALLEL_TALK = [
    TOOL_TALK[0],
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [call("get_weather", city="Paris"), call("get_weather", city="Rome")],
    },
    {"role": "tool", "name": "get_weather", "content": "clear"},
    {"role": "tool", "name": "get_weather", "content": "rain"},
    {"role": "assistant", "content": "Clear in Paris, rain in Rome."},
]
CALL_TEXT = {
    "qwen2_5": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n<tool_call>\n'
    '{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>',
    "mistral_tools": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "000000000"}, '
    '{"name": "get_weather", "arguments": {"city": "Rome"}, "id": "000000001"}]</s>',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n'
    '{"city": "Rome"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
}


@pytest.mark.parametrize("fmt", [each for each in FORMATS if each.tools], ids=lambda fmt: fmt.name)
def test_tool_calls_in_the_form_that_the_template_wants(fmt: Format):
    tokenizer = of(fmt)
    encoder = ChatEncoder(tokenizer, TemplateConfig())
    example = encoder.encode(row(TOOL_TALK, tools=[WEATHER]))[0]
    talk = encoder.conversation(row(TOOL_TALK, tools=[WEATHER]))
    assert example.input_ids.tolist() == oracle_ids(tokenizer, talk.messages, tools=[WEATHER])
    assert_prompts(tokenizer, example, talk.messages, [1, 3], tools=[WEATHER])
    first, second = trained(tokenizer, example)
    assert '{"city": "Paris \\"quoted\\" é"}' in first
    assert first.endswith(fmt.end) and second == fmt.lead.join(["", "It is clear."]) + fmt.end


@pytest.mark.parametrize("name", ["qwen2_5", "mistral_tools", "deepseek_v3"])
def test_parallel_calls_are_trained_whole(name: str):
    tokenizer = of(BY_NAME[name])
    encoder = ChatEncoder(tokenizer, TemplateConfig())
    example = encoder.encode(row(PARALLEL_TALK, tools=[WEATHER]))[0]
    assert trained(tokenizer, example)[0] == CALL_TEXT[name]


def test_ids_that_the_template_refuses_are_renamed_with_their_results():
    """Mistral takes ids of nine characters; results keep pointing at their calls, in whatever order they came."""
    first, second = (
        {**call("get_weather", city=c), "id": i} for c, i in (("Paris", "call_abcdefghij"), ("Rome", "b" * 9))
    )
    talk = [
        TOOL_TALK[0],
        {"role": "assistant", "content": "", "tool_calls": [first, second]},
        {"role": "tool", "content": "rain", "tool_call_id": "b" * 9},
        {"role": "tool", "content": "clear", "tool_call_id": "call_abcdefghij"},
        TOOL_TALK[3],
    ]
    encoder = ChatEncoder(of(BY_NAME["mistral_tools"]), TemplateConfig())
    messages = encoder.conversation(row(talk, tools=[WEATHER])).messages
    assert [c["id"] for c in messages[1]["tool_calls"]] == ["000000000", "b" * 9]
    assert [message["tool_call_id"] for message in messages[2:4]] == ["b" * 9, "000000000"]
    assert encoder.encode(row(talk, tools=[WEATHER]))
    assert talk[1]["tool_calls"][0]["id"] == "call_abcdefghij"  # the row itself is left alone


def test_parallel_calls_that_the_template_refuses_are_refused_by_name():
    encoder = ChatEncoder(of(BY_NAME["llama3_1"]), TemplateConfig())
    with pytest.raises(RowProblem, match="only supports single tool-calls"):
        encoder.encode(row(PARALLEL_TALK, tools=[WEATHER]))


def test_tools_that_move_with_the_last_question_give_earlier_answers_their_own_example():
    """Mistral shows the tools before the last question only, so the first answer saw another prompt."""
    tokenizer = of(BY_NAME["mistral_tools"])
    messages = [*SINGLE, {"role": "user", "content": "Thanks?"}, {"role": "assistant", "content": "Sure."}]
    whole, own = ChatEncoder(tokenizer, TemplateConfig()).encode(row(messages, tools=[WEATHER]))
    assert whole.input_ids.tolist() == oracle_ids(tokenizer, messages, tools=[WEATHER])
    assert own.input_ids.tolist() == oracle_ids(tokenizer, SINGLE, tools=[WEATHER])
    assert_prompts(tokenizer, whole, messages, [3], tools=[WEATHER])
    assert_prompts(tokenizer, own, SINGLE, [1], tools=[WEATHER])
    assert trained(tokenizer, whole) == [" Sure.</s>"] and trained(tokenizer, own) == [" In Germany 😀.</s>"]
    masked = ChatEncoder(tokenizer, TemplateConfig(history_turns="mask")).encode(row(messages, tools=[WEATHER]))
    assert [trained(tokenizer, each) for each in masked] == [[" Sure.</s>"]]
    kept = ChatEncoder(tokenizer, TemplateConfig(history_turns="keep")).encode(row(messages, tools=[WEATHER]))
    assert [trained(tokenizer, each) for each in kept] == [[" In Germany 😀.</s>", " Sure.</s>"]]


def test_a_system_message_shown_only_before_the_answer_stays_in_the_prompt():
    """Mistral drops the system message once the question is answered: examples are prompt + answer, one per answer."""
    tokenizer = of(BY_NAME["mistral_tools"])
    encoder = ChatEncoder(tokenizer, TemplateConfig())
    examples = encoder.encode(row(SYSTEM))
    for example, index in zip(examples, [6, 2, 4], strict=True):
        assert_prompts(tokenizer, example, SYSTEM, [index])
        assert trained(tokenizer, example) == [f" {SYSTEM[index]['content']}</s>"]
        assert "Be brief." in tokenizer.decode(example.input_ids)
    assert encoder.counts["continued_prompts"] == 3


def test_generation_marks_agree_with_transformers():
    for name in ("chatml_generation", "smollm3"):
        tokenizer = of(BY_NAME[name])
        variables = dict(BY_NAME[name].variables)
        out = tokenizer.apply_chat_template(MULTI, return_assistant_tokens_mask=True, return_dict=True, **variables)
        (example,) = ChatEncoder(tokenizer, TemplateConfig()).encode(row(MULTI))
        marked = np.array(out["assistant_masks"])
        if name == "chatml_generation":
            assert ((example.loss_weights > 0) == marked).all()
        else:
            header = tokenizer("<|im_start|>assistant\n<think>\n\n</think>\n\n").input_ids
            # its marks take in the header, which the prompt holds, and the newline after the turn
            assert (marked[example.loss_weights > 0] == 1).all()
            assert marked.sum() - (example.loss_weights > 0).sum() == 3 * (len(header) + 1)


def test_glm_turns_end_with_the_token_that_opens_the_next():
    tokenizer = load("glm4", eos_token="<|endoftext|>")
    encoder = ChatEncoder(tokenizer, TemplateConfig())
    (example,) = encoder.encode(row(SYSTEM))
    assert example.input_ids[:-1].tolist() == oracle_ids(tokenizer, SYSTEM)
    assert_prompts(tokenizer, example, SYSTEM, [2, 4, 6])
    assert trained(tokenizer, example) == [
        "\nIn Germany 😀.<|user|>",
        "\nIn France.\n\nIt is the capital.<|user|>",
        "\n你好！<|endoftext|>",
    ]
    (tools,) = encoder.encode(row(TOOL_TALK, tools=[WEATHER]))
    assert trained(tokenizer, tools) == [
        'get_weather\n{"city": "Paris \\"quoted\\" é"}<|observation|>',
        "\nIt is clear.<|endoftext|>",
    ]
    ids = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|user|>", "<|observation|>"])
    assert encoder.stop_token_ids() == ids
    assert any("opening the next" in notice for notice in encoder.notices)


REFUSED = {
    "refused_no_prompt": "has no generation prompt",
    "refused_no_end": "could not learn to stop",
    "refused_unproven": "doesn't begin with its generation prompt",
}


@pytest.mark.parametrize("name", REFUSED)
def test_templates_that_can_not_be_trained_on_are_refused_by_name(name: str):
    tokenizer = make_tokenizer()
    path = TEMPLATES_DIR / f"{name}.jinja"
    with pytest.raises(TemplateError, match=REFUSED[name]) as error:
        ChatEncoder(tokenizer, TemplateConfig(template=str(path)))
    assert name in error.value.message and error.value.fix


def test_every_template_file_is_tested():
    thinking = {"qwen3", "qwen3_thinking", "qwq", "deepseek_r1", "deepseek_v3_1", "glm4_5"}  # test_encode_thinking.py
    known = set(BY_NAME) | set(REFUSED) | thinking | {"glm4"}
    assert {Path(p).stem for p in TEMPLATES_DIR.iterdir()} == known
