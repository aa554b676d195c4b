"""Thinking templates: what is trained is what the model would be asked to generate, thoughts included."""

from __future__ import annotations

import numpy as np
import pytest
from fixtures import TEMPLATES_DIR, make_tokenizer

from swift.config.data import TemplateConfig
from swift.core.errors import TemplateError
from swift.data.encoding.encode import ChatEncoder
from swift.data.rows import Row, RowProblem, RowRef

DEEPSEEK = {"eos_token": "<｜end▁of▁sentence｜>", "bos_token": "<｜begin▁of▁sentence｜>"}
EOS = DEEPSEEK["eos_token"]
END = "<|im_end|>"

ASK, AGAIN = {"role": "user", "content": "Two plus two?"}, {"role": "user", "content": "Sure?"}
PLAIN, PLAIN_2 = {"role": "assistant", "content": "Four."}, {"role": "assistant", "content": "Yes."}
THINK = {"role": "assistant", "content": "Four.", "reasoning_content": "2+2 is 4"}
THINK_2 = {"role": "assistant", "content": "Yes.", "reasoning_content": "I checked"}
INLINE = {"role": "assistant", "content": "<think>\n2+2 is 4\n</think>\n\nFour."}
INLINE_2 = {"role": "assistant", "content": "<think>\nI checked\n</think>\n\nYes."}


def load(name: str, **special):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (TEMPLATES_DIR / f"{name}.jinja").read_text(encoding="utf-8")
    for key, value in special.items():
        setattr(tokenizer, key, value)
    return tokenizer


def row(*messages, **more) -> Row:
    return Row(RowRef("rows.jsonl", 1), list(messages), **more)


def ids_of(tokenizer, messages, **kwargs) -> list[int]:
    return list(tokenizer.apply_chat_template(list(messages), **kwargs)["input_ids"])


def view(tokenizer, example) -> tuple[list[int], str]:
    """Ids before the first trained token, and the decoded trained text."""
    on = np.flatnonzero(example.loss_weights)
    return example.input_ids[: on[0]].tolist(), tokenizer.decode(example.input_ids[on])


def prompt_of(tokenizer, messages, **kwargs) -> list[int]:
    return ids_of(tokenizer, messages, add_generation_prompt=True, **kwargs)


@pytest.mark.parametrize("answer", [THINK, INLINE], ids=["field", "inline"])
def test_qwen3_thoughts_are_trained_in_the_last_turn(answer):
    tokenizer = load("qwen3")
    (example,) = ChatEncoder(tokenizer, TemplateConfig()).encode(row(ASK, answer))
    assert example.input_ids.tolist() == ids_of(tokenizer, [ASK, answer])
    assert view(tokenizer, example) == (prompt_of(tokenizer, [ASK]), f"<think>\n2+2 is 4\n</think>\n\nFour.{END}")


def test_qwen3_answer_without_thoughts_is_trained_behind_the_empty_thought():
    tokenizer = load("qwen3")
    encoder = ChatEncoder(tokenizer, TemplateConfig())
    (example,) = encoder.encode(row(ASK, PLAIN))
    assert encoder.conversation(row(ASK, PLAIN)).kwargs == {"enable_thinking": False}
    assert example.input_ids.tolist() == ids_of(tokenizer, [ASK, PLAIN], enable_thinking=False)
    assert view(tokenizer, example) == (prompt_of(tokenizer, [ASK], enable_thinking=False), f"Four.{END}")
    # asked not to: the template's own thinking prompt, and the empty thought is part of the answer
    (raw,) = ChatEncoder(tokenizer, TemplateConfig(add_non_thinking_prefix=False)).encode(row(ASK, PLAIN))
    assert view(tokenizer, raw) == (prompt_of(tokenizer, [ASK]), f"<think>\n\n</think>\n\nFour.{END}")


@pytest.mark.parametrize(("first", "second"), [(THINK, THINK_2), (INLINE, INLINE_2)], ids=["field", "inline"])
def test_qwen3_dropped_thoughts_of_earlier_turns(first, second):
    """The history drops the first thoughts; the first turn is trained, thoughts and all, as its own example."""
    tokenizer = load("qwen3")
    talk = [ASK, first, AGAIN, second]
    encoder = ChatEncoder(tokenizer, TemplateConfig())
    whole, own = encoder.encode(row(*talk))
    assert whole.input_ids.tolist() == ids_of(tokenizer, talk)
    assert view(tokenizer, whole) == (prompt_of(tokenizer, talk[:3]), f"<think>\nI checked\n</think>\n\nYes.{END}")
    assert "2+2 is 4" not in tokenizer.decode(whole.input_ids)
    assert own.input_ids.tolist() == ids_of(tokenizer, talk[:2])
    assert view(tokenizer, own) == (prompt_of(tokenizer, [ASK]), f"<think>\n2+2 is 4\n</think>\n\nFour.{END}")
    assert encoder.counts["own_examples"] == 1

    (masked,) = ChatEncoder(tokenizer, TemplateConfig(history_turns="mask")).encode(row(*talk))
    assert masked.input_ids.tolist() == whole.input_ids.tolist()
    assert masked.loss_weights.tolist() == whole.loss_weights.tolist()

    (kept,) = ChatEncoder(tokenizer, TemplateConfig(history_turns="keep")).encode(row(*talk))
    assert kept.input_ids.tolist() == whole.input_ids.tolist()
    assert view(tokenizer, kept)[1] == f"Four.{END}<think>\nI checked\n</think>\n\nYes.{END}"


def test_qwen3_multi_turn_without_thoughts():
    tokenizer = load("qwen3")
    talk = [ASK, PLAIN, AGAIN, PLAIN_2]
    whole, own = ChatEncoder(tokenizer, TemplateConfig()).encode(row(*talk))
    assert whole.input_ids.tolist() == ids_of(tokenizer, talk)
    assert view(tokenizer, whole) == (prompt_of(tokenizer, talk[:3], enable_thinking=False), f"Yes.{END}")
    assert view(tokenizer, own) == (prompt_of(tokenizer, [ASK], enable_thinking=False), f"Four.{END}")


def test_qwen3_mixed_turns_use_each_its_own_prompt():
    tokenizer = load("qwen3")
    talk = [ASK, PLAIN, AGAIN, THINK_2]
    whole, own = ChatEncoder(tokenizer, TemplateConfig()).encode(row(*talk))
    assert view(tokenizer, whole)[0] == prompt_of(tokenizer, talk[:3])
    assert view(tokenizer, own) == (prompt_of(tokenizer, [ASK], enable_thinking=False), f"Four.{END}")


def test_qwen3_tool_loop_with_thoughts_is_one_example():
    tokenizer = load("qwen3")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    talk = [
        ASK,
        {"role": "assistant", "content": "", "reasoning_content": "I call", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "Four.", "reasoning_content": "It said 4"},
    ]
    (example,) = ChatEncoder(tokenizer, TemplateConfig()).encode(row(*talk))
    assert example.input_ids.tolist() == ids_of(tokenizer, talk)
    text = view(tokenizer, example)[1]
    assert text == (
        '<think>\nI call\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
        "<think>\nIt said 4\n</think>\n\nFour.<|im_end|>"
    )


def test_thinking_switched_by_config_and_by_row():
    tokenizer = load("qwen3")
    on = ChatEncoder(tokenizer, TemplateConfig(enable_thinking=True))
    assert view(tokenizer, on.encode(row(ASK, PLAIN))[0])[0] == prompt_of(tokenizer, [ASK])
    off = on.encode(row(ASK, PLAIN, template_kwargs={"enable_thinking": False}))[0]
    assert view(tokenizer, off)[0] == prompt_of(tokenizer, [ASK], enable_thinking=False)
    with pytest.raises(RowProblem) as problem:
        on.encode(row(ASK, THINK, template_kwargs={"enable_thinking": False}))
    assert problem.value.reason == "thinking_off"
    assert on.encode_prompt([ASK]) == prompt_of(tokenizer, [ASK])
    assert on.encode_prompt([ASK], template_kwargs={"enable_thinking": False}) == prompt_of(
        tokenizer, [ASK], enable_thinking=False
    )


@pytest.mark.parametrize("answer", [THINK, INLINE, PLAIN], ids=["field", "inline", "none"])
def test_qwen3_thinking_only_continues_the_opened_thought(answer):
    tokenizer = load("qwen3_thinking")
    (example,) = ChatEncoder(tokenizer, TemplateConfig()).encode(row(ASK, answer))
    thought = "" if answer is PLAIN else "2+2 is 4"
    if thought:
        assert example.input_ids.tolist() == ids_of(tokenizer, [ASK, answer])
    else:  # as one text, the prompt's newline and the answer's would be one token that no prompt ends with
        assert tokenizer.decode(example.input_ids) + "\n" == tokenizer.apply_chat_template(
            [ASK, answer], tokenize=False
        )
    assert view(tokenizer, example) == (prompt_of(tokenizer, [ASK]), f"{thought}\n</think>\n\nFour.{END}")


@pytest.mark.parametrize("answer", [THINK, INLINE], ids=["field", "inline"])
@pytest.mark.parametrize("name", ["deepseek_r1", "qwq"])
def test_templates_that_drop_every_thought_train_prompt_plus_completion(name, answer):
    """The prompt opens a thought and answers are rendered without any: what is served is prompt + completion."""
    tokenizer = load(name, **(DEEPSEEK if name == "deepseek_r1" else {}))
    end = EOS if name == "deepseek_r1" else END
    encoder = ChatEncoder(tokenizer, TemplateConfig())
    (example,) = encoder.encode(row(ASK, answer))
    assert view(tokenizer, example) == (prompt_of(tokenizer, [ASK]), f"2+2 is 4\n</think>\n\nFour.{end}")
    assert encoder.counts["continued_prompts"] == 1
    (plain,) = encoder.encode(row(ASK, PLAIN))
    assert view(tokenizer, plain) == (prompt_of(tokenizer, [ASK]), f"\n</think>\n\nFour.{end}")
    with pytest.raises(RowProblem) as problem:
        ChatEncoder(tokenizer, TemplateConfig(add_non_thinking_prefix=False)).encode(row(ASK, PLAIN))
    assert problem.value.reason == "no_thoughts"


def test_r1_multi_turn_has_one_example_for_each_answer():
    tokenizer = load("deepseek_r1", **DEEPSEEK)
    talk = [ASK, INLINE, AGAIN, INLINE_2]
    last, first = ChatEncoder(tokenizer, TemplateConfig()).encode(row(*talk))
    assert view(tokenizer, last) == (prompt_of(tokenizer, talk[:3]), f"I checked\n</think>\n\nYes.{EOS}")
    assert view(tokenizer, first) == (prompt_of(tokenizer, [ASK]), f"2+2 is 4\n</think>\n\nFour.{EOS}")
    (kept,) = ChatEncoder(tokenizer, TemplateConfig(history_turns="keep")).encode(row(*talk))
    assert kept.input_ids.tolist() == last.input_ids.tolist()
    # R1 keeps the blank lines that stood behind a dropped thought
    assert view(tokenizer, kept)[1] == f"\n\nFour.{EOS}I checked\n</think>\n\nYes.{EOS}"


def test_deepseek_v3_1_switches_with_its_own_variable():
    tokenizer = load("deepseek_v3_1", **DEEPSEEK)
    encoder = ChatEncoder(tokenizer, TemplateConfig())
    (plain,) = encoder.encode(row(ASK, PLAIN))
    assert plain.input_ids.tolist() == ids_of(tokenizer, [ASK, PLAIN])
    assert view(tokenizer, plain) == (prompt_of(tokenizer, [ASK]), f"Four.{EOS}")
    (thinks,) = encoder.encode(row(ASK, THINK))
    assert view(tokenizer, thinks) == (prompt_of(tokenizer, [ASK], thinking=True), f"2+2 is 4</think>Four.{EOS}")
    asked = ChatEncoder(tokenizer, TemplateConfig(enable_thinking=True))
    assert asked.encode_prompt([ASK]) == prompt_of(tokenizer, [ASK], thinking=True)


def test_glm_4_5_hybrid():
    tokenizer = load("glm4_5", eos_token="<|endoftext|>")
    encoder = ChatEncoder(tokenizer, TemplateConfig())
    (plain,) = encoder.encode(row(ASK, PLAIN))
    assert plain.input_ids[:-1].tolist() == ids_of(tokenizer, [ASK, PLAIN], enable_thinking=False)
    assert view(tokenizer, plain) == (
        prompt_of(tokenizer, [ASK], enable_thinking=False),
        "\nFour.<|endoftext|>",
    )
    (thinks,) = encoder.encode(row(ASK, THINK))
    assert view(tokenizer, thinks) == (prompt_of(tokenizer, [ASK]), "\n<think>2+2 is 4</think>\nFour.<|endoftext|>")


def test_thoughts_that_a_template_does_not_show_are_refused_not_lost():
    encoder = ChatEncoder(load("chatml"), TemplateConfig())
    with pytest.raises(RowProblem, match="would be lost") as problem:
        encoder.encode(row(ASK, THINK))
    assert problem.value.reason == "thoughts_dropped" and "<think>" in problem.value.fix
    (example,) = encoder.encode(row(ASK, INLINE))  # written into the content, they are ordinary text
    assert view(encoder.tokenizer, example)[1] == INLINE["content"] + END


def test_last_round_needs_no_own_examples():
    tokenizer = load("qwen3")
    (example,) = ChatEncoder(tokenizer, TemplateConfig(loss_scale="last_round")).encode(row(ASK, THINK, AGAIN, THINK_2))
    assert view(tokenizer, example)[1] == f"<think>\nI checked\n</think>\n\nYes.{END}"


def test_turn_that_can_not_be_proven_names_template_file_and_message(tmp_path):
    """The second answer's header differs from its prompt in a way that a bare question shows as well."""
    path = tmp_path / "odd.jinja"
    path.write_text(
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ('!' if 'odd' in m['content'] else '') + '\\n' + "
        "m['content'] + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
        "{% endif %}"
    )
    encoder = ChatEncoder(make_tokenizer(), TemplateConfig(template=str(path)))
    assert encoder.encode(row(ASK, PLAIN))
    with pytest.raises(TemplateError, match="message 4") as error:
        encoder.encode(row(ASK, PLAIN, AGAIN, {"role": "assistant", "content": "odd"}))
    assert "odd.jinja" in error.value.message and error.value.where == "rows.jsonl:1"


@pytest.mark.parametrize(
    ("settings", "answers", "kwargs", "counts"),
    [
        ({}, [THINK], {}, {"asked_thinking": 1}),
        ({}, [PLAIN], {}, {"asked_not_thinking": 1}),
        ({}, [THINK, PLAIN], {}, {"asked_thinking": 1, "asked_not_thinking": 1}),
        ({"add_non_thinking_prefix": False}, [PLAIN], {}, {}),  # asked in the template's own way: with thinking on
        ({"add_non_thinking_prefix": False}, [THINK, PLAIN], {}, {"asked_thinking": 1}),
        ({"enable_thinking": False}, [PLAIN], {}, {"asked_not_thinking": 1}),
        ({}, [PLAIN], {"enable_thinking": False}, {"asked_not_thinking": 1}),
    ],
)
def test_switches_are_counted_when_they_are_passed(settings, answers, kwargs, counts):
    encoder = ChatEncoder(load("qwen3"), TemplateConfig(**settings))
    for answer in answers:
        asked = row(ASK, answer)
        asked.template_kwargs = dict(kwargs)
        encoder.encode(asked)
    assert {name: count for name, count in encoder.counts.items() if name.startswith("asked")} == counts


def test_passing_the_default_changes_nothing():
    tokenizer = load("qwen3")
    (example,) = ChatEncoder(tokenizer, TemplateConfig()).encode(row(ASK, THINK))
    assert example.input_ids.tolist() == ids_of(tokenizer, [ASK, THINK])
