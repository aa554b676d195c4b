"""Reading answers: calls as each template writes them, thoughts, and text that only looks like them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from answer_templates import CALLS
from fixtures import make_tokenizer

from swift.config.data import PromptConfig
from swift.core.errors import UsageError
from swift.data.encoding.encode import ChatEncoder
from swift.inference.answers.choose import AnswerForms
from swift.inference.answers.forms import CallForm, find_form, probe_calls, written
from swift.inference.answers.parts import Said
from swift.inference.answers.reader import AnswerForm, AnswerReader
from swift.inference.answers.thoughts import ThoughtForm
from swift.inference.choosing.structured import Structures

TEMPLATES = Path(__file__).parent.parent / "assets" / "templates"

# how families write a call; the rest of a template is alike here
WRITTEN = {
    "keys by tags": (
        "{{ '\n<tool_call>\n<function=' + c.name + '>\n' }}{% for k, v in c.arguments.items() %}"
        "{{ '<parameter=' + k + '>\n' + v + '\n</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>' }}"
    ),
    "keys and values": (
        "{{ '\n<tool_call>' + c.name + '\n' }}{% for k, v in c.arguments.items() %}"
        "{{ '<arg_key>' + k + '</arg_key>\n<arg_value>' + v + '</arg_value>\n' }}{% endfor %}{{ '</tool_call>' }}"
    ),
    "name, then JSON": "{{ '[TOOL_CALLS]' + c.name + '[ARGS]' + c.arguments | tojson }}",
    "sections": (
        "{% if loop.first %}{{ '<|calls_begin|>' }}{% endif %}{{ '<|call_begin|>' + c.name + '<|sep|>' }}"
        "{{ c.arguments | tojson + '<|call_end|>' }}{% if loop.last %}{{ '<|calls_end|>' }}{% endif %}"
    ),
    "a list": (
        "{% if loop.first %}{{ '<|tool_call|>[' }}{% else %}{{ ', ' }}{% endif %}"
        "{{ {'name': c.name, 'arguments': c.arguments} | tojson }}{% if loop.last %}{{ ']' }}{% endif %}"
    ),
    "objects": "{{ '<tool_call>' + {'name': c.name, 'arguments': c.arguments} | tojson + '</tool_call>' }}",
}


def encoder_of(template: str, *, think: bool = False) -> ChatEncoder:
    """An encoder whose template writes calls as `template` says."""
    head = "{{ '<|im_start|>' + m.role + '\n' }}"
    text = (
        "{% for m in messages %}" + head + "{{ m.content or '' }}"
        "{% for t in m.tool_calls or [] %}{% set c = t.function %}" + template + "{% endfor %}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        + ("{{ '<think>\n' }}{# </think> #}" if think else "")
        + "{% endif %}"
    )
    tokenizer = make_tokenizer()
    tokenizer.chat_template = text
    return ChatEncoder(tokenizer, PromptConfig())


def read(form: AnswerForm, *pieces: str) -> Said:
    said, reader = Said(), AnswerReader(form)
    for piece in pieces:
        for part in reader.feed(piece):
            said.add(part)
    for part in reader.end():
        said.add(part)
    return said


def cuts(text: str, draw: random.Random) -> list[str]:
    """The text in random pieces."""
    places = sorted(draw.sample(range(len(text) + 1), min(len(text), draw.randrange(0, 12))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def names_and_values(said: Said) -> list[tuple[str, object]]:
    return [(name, json.loads(arguments)) for name, arguments in said.calls]


ENCODERS = {name: lambda text=text: encoder_of(text) for name, text in WRITTEN.items()} | {
    name: lambda name=name: ChatEncoder(make_tokenizer(), PromptConfig(template=str(TEMPLATES / f"{name}.jinja")))
    for name in ("deepseek_v3", "llama3_1", "mistral_tools", "qwen2_5", "qwen3", "qwen3_thinking")
}


@pytest.mark.parametrize("name", sorted(ENCODERS))
def test_what_a_template_writes_is_read_back(name):
    """One call and two, cut in every way: by characters and at random."""
    encoder = ENCODERS[name]()
    calls = find_form(encoder)
    assert calls is not None
    form, draw = AnswerForm(calls=calls), random.Random(0)
    for count in (1, 2) if name != "llama3_1" else (1,):
        wanted = probe_calls(count)
        text = written(encoder, wanted)
        before = "" if not calls.begins else "I look it up.\n"
        for pieces in ([text], list(text), *(cuts(text, draw) for _ in range(30))):
            said = read(form, before, *pieces)
            assert names_and_values(said) == wanted
            assert said.content == before.strip()


@pytest.mark.parametrize("name", ["chatml", "smollm2", "zephyr"])
def test_a_template_that_writes_no_calls_has_no_form(name):
    encoder = ChatEncoder(make_tokenizer(), PromptConfig(template=str(TEMPLATES / f"{name}.jinja")))
    assert find_form(encoder) is None
    with pytest.raises(UsageError, match="calls tools"):
        AnswerForms(encoder).form([5], [{"type": "function", "function": {"name": "f"}}])


QWEN = CallForm("object", opening="<tool_call>\n", closing="\n</tool_call>")
LLAMA = CallForm("object", keys=("name", "parameters"))
MANY = {
    "plain": "Just a text.\n",
    "nothing": "",
    "a call": (
        'Let me see.\n<tool_call>\n{"name": "f", "arguments": '
        '{"x": "a {\\"b\\"} \\u00e9 </tool_call> c"}}\n</tool_call>'
    ),
    "without spaces": '<tool_call>{"name":"f","arguments":{}}</tool_call>',
    "line breaks in strings": '<tool_call>\n{"name": "f", "arguments": {"code": "a\nb"}}\n</tool_call>',
    "arguments as text": '<tool_call>\n{"name": "f", "arguments": "{\\"x\\": 1}"}\n</tool_call>',
    "text after": '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\nDone.',
    "broken JSON": 'a <tool_call>\n{"name": "f", "arguments": {oops}}\n</tool_call> b',
    "not a call": '<tool_call>\n{"title": "f"}\n</tool_call>',
    "cut off": '<tool_call>\n{"name": "f", "arguments": {"x": "unfin',
    "end mark missing": '<tool_call>\n{"name": "f", "arguments": {"x": 1.5e3, "y": [true, null, -2]}}',
    "a mark that never comes": "1 <tool 2 <tool_cal 3",
    "two": (
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    ),
    "one good, one broken": '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n{]\n</tool_call>',
    "deep": '<tool_call>\n{"name": "f", "arguments": ' + '{"a":' * 3000 + "1" + "}" * 3000 + "}\n</tool_call>",
}
WANTED = {
    "plain": ("Just a text.\n", []),
    "nothing": ("", []),
    "a call": ("Let me see.", [("f", {"x": 'a {"b"} é </tool_call> c'})]),
    "without spaces": ("", [("f", {})]),
    "line breaks in strings": ("", [("f", {"code": "a\nb"})]),
    "arguments as text": ("", [("f", {"x": 1})]),
    "text after": ("Done.", [("f", {})]),
    "broken JSON": (MANY["broken JSON"], []),
    "not a call": (MANY["not a call"], []),
    "cut off": (MANY["cut off"], []),
    "end mark missing": ("", [("f", {"x": 1500.0, "y": [True, None, -2]})]),
    "a mark that never comes": (MANY["a mark that never comes"], []),
    "two": ("", [("f", {}), ("g", {})]),
    "one good, one broken": ("<tool_call>\n{]\n</tool_call>", [("f", {})]),
    "deep": (MANY["deep"], []),
}


@pytest.mark.parametrize("case", sorted(MANY))
def test_answers_of_a_model_however_they_are_cut(case):
    text, draw = MANY[case], random.Random(1)
    content, calls = WANTED[case]
    ways = [[text], *(cuts(text, draw) for _ in range(40))]
    for pieces in ways if case == "deep" else [list(text), *ways]:
        said = read(AnswerForm(calls=QWEN), *pieces)
        assert names_and_values(said) == calls
        assert said.content.strip() == content.strip()


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "f", "parameters": {"x": 1}}', "", [("f", {"x": 1})]),
        ('{"name": "f", "parameters": {"x": 1}}\n{"name": "g", "parameters": {}}', "", [("f", {"x": 1}), ("g", {})]),
        ('{"answer": 42}', '{"answer": 42}', []),
        ('The call {"name": "f", "parameters": {}} is it', 'The call {"name": "f", "parameters": {}} is it', []),
    ],
)
def test_calls_without_marks(text, content, calls):
    for pieces in ([text], list(text)):
        said = read(AnswerForm(calls=LLAMA), *pieces)
        assert (said.content, names_and_values(said)) == (content, calls)


@pytest.mark.parametrize(
    ("text", "begun", "thoughts", "content"),
    [
        ("<think>\nHm.\n\nSo.\n</think>\n\nYes.", False, "Hm.\n\nSo.", "Yes."),
        ("Hm.\n</think>\n\nYes.", True, "Hm.", "Yes."),
        ("\n\n</think>\nYes.", True, "", "Yes."),
        ("never ends", True, "never ends", ""),
        ("<think>never ends", False, "never ends", ""),
        ("Yes <think> no", False, "", "Yes <think> no"),
        ("\n  <think>a</think>b</think>c", False, "a", "b</think>c"),
        ("<thin", False, "", "<thin"),
    ],
)
def test_thoughts(text, begun, thoughts, content):
    form = AnswerForm(thoughts=ThoughtForm(), begins_in_thought=begun)
    draw = random.Random(2)
    for pieces in ([text], list(text), *(cuts(text, draw) for _ in range(20))):
        said = read(form, *pieces)
        assert (said.thoughts, said.content) == (thoughts, content)


def test_calls_in_thoughts_are_thoughts():
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    said = read(AnswerForm(calls=QWEN, thoughts=ThoughtForm()), f"<think>maybe {call}</think>\n{call}")
    assert said.thoughts == f"maybe {call}" and len(said.calls) == 1 and said.content == ""


def test_types_of_tagged_values_are_those_of_the_schema():
    form = find_form(encoder_of(WRITTEN["keys by tags"]))
    schemas = {"f": {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}}
    text = (
        "<tool_call>\n<function=f>\n<parameter=n>\n12\n</parameter>\n<parameter=s>\n12\n</parameter>\n"
        '<parameter=o>\n{"a": [1]}\n</parameter>\n<parameter=t>\nline\n  two\n</parameter>\n</function>\n</tool_call>'
    )
    for pieces in ([text], list(text)):
        said = read(AnswerForm(calls=form, schemas=schemas), *pieces)
        assert names_and_values(said) == [("f", {"n": 12, "s": "12", "o": {"a": [1]}, "t": "line\n  two"})]


def test_the_prompt_tells_whether_a_thought_is_open():
    encoder = encoder_of(WRITTEN["objects"], think=True)
    forms = AnswerForms(encoder)
    prompt = encoder.encode_prompt([{"role": "user", "content": "hi"}])
    assert forms.form(prompt, None).begins_in_thought
    assert not forms.form(prompt[:-4], None).begins_in_thought
    assert AnswerForms(encoder_of(WRITTEN["objects"])).form(prompt, None).thoughts is None


def tool(name: str, **properties: dict) -> dict:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


FORCED = {name: WRITTEN[name] for name in ("objects", "sections", "a list", "name, then JSON")} | {
    name: CALLS[name] for name in ("kimi k2", "mistral v3", "mistral v11", "command r7b", "xlam")
}


@pytest.mark.parametrize("name", sorted(FORCED))
@pytest.mark.parametrize("parallel", [True, False])
def test_a_forced_answer_is_a_call(name, parallel):
    """Random walks through the structure always end in calls of the tools, as the form reads them."""
    encoder = encoder_of(FORCED[name])
    tools = [tool("look_up", place={"type": "string", "enum": ["Rome", "Oslo"]}), tool("count", n={"type": "boolean"})]
    forms = AnswerForms(encoder)
    structure = forms.forced(tools, parallel=parallel)
    tokenizer = encoder.tokenizer
    structures = Structures(tokenizer, len(tokenizer))
    seen = set()
    for seed in range(12):
        text = random_answer(structures, structure, tokenizer, random.Random(seed))
        said = read(forms.form([5], tools), text)
        assert said.calls and not said.content
        assert parallel or len(said.calls) == 1
        for called, arguments in said.calls:
            seen.add(called)
            assert json.loads(arguments) in ({"place": "Rome"}, {"place": "Oslo"}, {"n": True}, {"n": False})
    assert seen == {"look_up", "count"}


def allows(structure, tokenizer, text: str) -> bool:
    """Whether an answer may begin with a text."""
    matcher = Structures(tokenizer, len(tokenizer)).begin(structure, frozenset({tokenizer.eos_token_id}))
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
        if not bits[token]:
            return False
        matcher.take(token)
    return True


def test_forced_calls_keep_to_what_plain_structures_keep_to():
    encoder = encoder_of(WRITTEN["objects"])
    structure = AnswerForms(encoder).forced([tool("f", x={"type": "string"})], parallel=False)
    begun = '<tool_call>{"name": "f", "arguments": {'
    assert allows(structure, encoder.tokenizer, begun + " " * 64 + '"x": "é"}}</tool_call>')
    assert not allows(structure, encoder.tokenizer, begun + " " * 65)
    assert not allows(structure, encoder.tokenizer, begun + '"x": "a\tb')
    with pytest.raises(UsageError, match="uniqueItems"):
        AnswerForms(encoder).forced([tool("f", x={"type": "array", "uniqueItems": True})], parallel=False)


def test_a_thought_that_the_prompt_opened_ends_before_a_forced_call():
    encoder, tools = encoder_of(WRITTEN["objects"], think=True), [tool("f", n={"type": "boolean"})]
    forms = AnswerForms(encoder)
    form = forms.form(encoder.encode_prompt([{"role": "user", "content": "hi"}]), tools)
    assert form.begins_in_thought
    structure = forms.forced(tools, parallel=False, begins_in_thought=True)
    for thought in ("Hm, <b>\nso", ""):
        for gap in ("", "\n\n"):
            text = f'{thought}</think>{gap}<tool_call>{{"name": "f", "arguments": {{"n": true}}}}</tool_call>'
            assert allows(structure, encoder.tokenizer, text)
            said = read(form, text)
            assert (said.thoughts, said.content, said.calls) == (thought, "", [("f", '{"n": true}')])
    assert not allows(structure, encoder.tokenizer, "Hm.</think> so")


def test_how_an_answer_is_cut_never_matters():
    """Whole or by characters, over texts made of all that readers look for."""
    draw = random.Random(0)
    words = [
        "\n",
        " ",
        '{"name": "f", "arguments": ',
        *'{}[]"\\:,',
        "\\u12",
        "\\ud83d",
        "x",
        "é😀",
        "NaN",
        "-Infinity",
        "1.",
        "e",
    ]
    words += ["tru", "null", "<think>", "</think>", "functions.f:1", "<tool", "<function=f>", "</function>"]
    words += ["<parameter=k>", "</parameter>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"]
    for family in ("hermes", "qwen3 coder", "kimi k2", "mistral v13", "xlam"):
        calls = AnswerForms(encoder_of(CALLS[family])).calls
        for _ in range(400):
            text = "".join(draw.choice([*words, *calls.marks]) for _ in range(draw.randrange(1, 25)))
            form = AnswerForm(calls=calls, thoughts=draw.choice([None, ThoughtForm()]))
            whole, cut = read(form, text), read(form, *text)
            assert (whole.content, whole.thoughts, whole.calls) == (cut.content, cut.thoughts, cut.calls), text


def random_answer(structures: Structures, structure, tokenizer, draw: random.Random) -> str:
    """A text that the structure allows, token by token; it ends as soon as it may."""
    end = tokenizer.eos_token_id
    matcher = structures.begin(structure, frozenset({end}))
    tokens: list[int] = []
    for _ in range(400):
        bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        allowed = [token for token in allowed if tokenizer.decode([token]).strip()] or allowed
        token = end if end in allowed else draw.choice(allowed)
        if token == end:
            return tokenizer.decode(tokens)
        tokens.append(token)
        matcher.take(token)
    raise AssertionError(f"no end: {tokenizer.decode(tokens)}")


def test_forms_that_cant_be_forced_are_refused():
    with pytest.raises(UsageError, match="key by key"):
        AnswerForms(encoder_of(WRITTEN["keys by tags"])).forced([tool("f")], parallel=False)


def test_marks_that_are_special_tokens_have_to_show():
    encoder = encoder_of(WRITTEN["objects"])
    tools = [tool("f")]
    assert AnswerForms(encoder).skips_special_tokens(tools)
    encoder.tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>"]})
    assert not AnswerForms(encoder).skips_special_tokens(tools)
    assert AnswerForms(encoder).skips_special_tokens(None)
