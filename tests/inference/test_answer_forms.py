"""The forms of families: what their templates write is read back and written again, or refused by name."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from answer_templates import CALLS, REFUSED, THOUGHTS, encoder_of

from swift.core.errors import UsageError
from swift.inference.answers.choose import AnswerForms
from swift.inference.answers.forms import PROBES, Call, as_message, find_form, probe_calls, written
from swift.inference.answers.parts import Said
from swift.inference.answers.reader import AnswerForm, AnswerReader
from swift.inference.answers.thoughts import find_thoughts

QUESTION = [{"role": "user", "content": "How is it?"}]
FIRST, SECOND = (probe["function"]["name"] for probe in PROBES)
HARD: list[list[Call]] = [
    [(FIRST, {"zq_alpha": 'a "quote", a \\ and {[}', "zq_beta": "Grüße,\nмир 😀\n\n  indented"})],
    [(FIRST, {"zq_gamma": {"a": [1, {"b": [[]]}], "c": {}, "d": "x\ny"}, "zq_beta": "z"}), (SECOND, {"zq_beta": "1"})],
    [(FIRST, {"zq_beta": "</tool_call> and </parameter>, </arg_value> ]```"}), (SECOND, {"zq_beta": "b"})],
    [(FIRST, {"zq_alpha": "", "zq_beta": "true"})],
]


def read(form: AnswerForm, *pieces: str) -> Said:
    said, reader = Said(), AnswerReader(form)
    for piece in pieces:
        for part in reader.feed(piece):
            said.add(part)
    for part in reader.end():
        said.add(part)
    return said


def ways(text: str, seed: int = 0) -> list[list[str]]:
    """The text as a whole, by characters, and in random pieces."""
    draw, found = random.Random(seed), [[text], list(text)]
    for _ in range(15):
        places = sorted(draw.sample(range(len(text) + 1), min(len(text), draw.randrange(1, 12))))
        found.append([text[a:b] for a, b in zip([0, *places], [*places, len(text)])])
    return found


def called(said: Said) -> list[Call]:
    return [(name, json.loads(arguments)) for name, arguments in said.calls]


@pytest.mark.parametrize("family", sorted(CALLS))
def test_calls_of_a_family_are_read_and_written_again(family: str) -> None:
    encoder = encoder_of(CALLS[family])
    forms = AnswerForms(encoder)
    form = forms.form([5], PROBES)
    prompt = encoder.render_prompt(QUESTION, PROBES)
    ids = (
        ["functions.zq_first_tool:0", "functions.zq_second_tool:1"]
        if family == "kimi k2"
        else ["abcdefgh0", "x12345678"]
    )
    for calls in [probe_calls(1), probe_calls(2), *HARD]:
        text = encoder.render_prompt([*QUESTION, as_message(calls, ids)], PROBES)
        text = text[len(prompt) : text.rindex("<|im_end|>")]
        for pieces in ways(text):
            said = read(form, *pieces)
            assert (called(said), said.content.strip()) == (calls, ""), text
        if form.calls.id_key or form.calls.id_mark or form.calls.name_in_id:
            assert said.ids == ids[: len(calls)]  # the client gets what the model wrote
        # the conversation goes on with the tokens that the model has seen
        message = as_message(called(said), said.ids)
        results = [{"role": "tool", "tool_call_id": each, "content": "sunny"} for each in said.ids]
        assert encoder.render_prompt([*QUESTION, message, *results], PROBES).startswith(prompt + text)


@pytest.mark.parametrize("family", sorted(CALLS))
def test_a_call_that_is_cut_off_is_content_as_it_was_written(family: str) -> None:
    encoder = encoder_of(CALLS[family])
    form = AnswerForms(encoder).form([5], PROBES)
    text = written(encoder, probe_calls(1))
    assert text is not None
    text = text[: text.index("Vqtwo") + 2]
    for pieces in ways(text):
        said = read(form, *pieces)
        assert (said.content, said.calls) == (text, [])


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_what_cant_be_read_back_is_refused_with_what_was_rendered(family: str) -> None:
    with pytest.raises(UsageError, match="zq_first_tool"):
        AnswerForms(encoder_of(REFUSED[family])).form([5], PROBES)


def test_a_template_that_refuses_calls_is_quoted() -> None:
    template = "{{ raise_exception('no tools here') }}"
    with pytest.raises(UsageError, match="no tools here"):
        AnswerForms(encoder_of(template)).form([5], PROBES)


@pytest.mark.parametrize("lead", ["", "<|python_tag|>", "\n"])
def test_llama_calls_with_and_without_their_token(lead: str) -> None:
    encoder = encoder_of("{{ {'name': c.name, 'parameters': c.arguments} | tojson }}{# <|python_tag|> #}")
    encoder.tokenizer.add_special_tokens({"additional_special_tokens": ["<|python_tag|>"]})
    form = AnswerForms(encoder).form([5], PROBES)
    text = lead + json.dumps({"name": FIRST, "parameters": {"zq_beta": "1"}})
    for pieces in ways(f"{text}; {json.dumps({'name': SECOND, 'parameters': {}})}"):
        said = read(form, *pieces)
        assert (called(said), said.content) == ([(FIRST, {"zq_beta": "1"}), (SECOND, {})], "")
    # JSON that names no tool was the answer
    other = lead + '{"name": "Ada", "parameters": {}}'
    for pieces in ways(other):
        said = read(form, *pieces)
        assert (said.content, said.calls) == (other, [])


def test_a_marked_call_of_an_unknown_tool_is_a_call() -> None:
    form = AnswerForms(encoder_of(CALLS["hermes"])).form([5], PROBES)
    said = read(form, '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>')
    assert called(said) == [("other", {})] and said.content == ""


def test_a_value_may_contain_what_ends_values_and_calls() -> None:
    form = AnswerForms(encoder_of(CALLS["qwen3 coder"])).form([5], PROBES)
    value = "a\n</parameter>\nb </tool_call> </function>\nc"
    text = (
        f"<tool_call>\n<function={FIRST}>\n<parameter=zq_beta>\n{value}\n</parameter>\n</function>\n</tool_call>\nSo."
    )
    for pieces in ways(text):
        said = read(form, *pieces)
        assert (called(said), said.content) == ([(FIRST, {"zq_beta": value})], "So.")


@pytest.mark.parametrize("family", ["hermes", "qwen3 coder", "kimi k2", "granite"])
@pytest.mark.parametrize("unit", ['wo"rd} ', "{[", "\\\n", "</parameter> "])
def test_long_arguments_are_looked_at_once(family: str, unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work grows with the text, not with its square: counted in characters that JSON is parsed from."""
    from swift.inference.answers import incoming

    parsed = []
    real = incoming.read_json
    monkeypatch.setattr(incoming, "read_json", lambda text, start=0: parsed.append(len(text)) or real(text, start))
    encoder = encoder_of(CALLS[family])
    form, calls = (
        AnswerForms(encoder).form([5], PROBES),
        [(FIRST, {"zq_alpha": unit * (40_000 // len(unit)), "zq_beta": "b"})],
    )
    ids = ["functions.zq_first_tool:0"]
    prompt = encoder.render_prompt(QUESTION, PROBES)
    text = encoder.render_prompt([*QUESTION, as_message(calls, ids)], PROBES)
    text = text[len(prompt) : text.rindex("<|im_end|>")]
    parsed.clear()
    said = read(form, *(text[at : at + 4] for at in range(0, len(text), 4)))
    assert called(said) == calls
    assert sum(parsed) < 4 * len(text)


@pytest.mark.parametrize("family", sorted(THOUGHTS))
def test_thoughts_of_a_family(family: str) -> None:
    answer, (opening, closing, heading) = THOUGHTS[family]
    encoder = encoder_of(answer=answer)
    forms = AnswerForms(encoder)
    assert forms.thoughts is not None
    assert forms.thoughts.marks == (opening, closing, heading)
    form = forms.form(encoder.encode_prompt(QUESTION), None)
    for pieces in ways(f"{opening}\nHm.\n\nSo.\n{closing}{heading}Yes."):
        said = read(form, *pieces)
        assert (said.thoughts, said.content) == ("Hm.\n\nSo.", "Yes.")
    for pieces in ways(f"{heading}Yes."):
        said = read(form, *pieces)
        assert (said.thoughts, said.content) == ("", "Yes.")


def test_a_prompt_opens_a_thought_with_the_marks_of_its_template() -> None:
    answer = "{{ '<seed:think>' + (m.reasoning_content or '') + '</seed:think>\n' + m.content }}"
    encoder = encoder_of(answer=answer, opened="<seed:think>")
    forms = AnswerForms(encoder)
    form = forms.form(encoder.encode_prompt(QUESTION), None)
    assert form.begins_in_thought
    said = read(form, "Hm.</seed:think>\nYes.")
    assert (said.thoughts, said.content) == ("Hm.", "Yes.")


def test_no_thoughts_where_the_template_shows_none() -> None:
    assert find_thoughts(encoder_of()) is None


def test_thought_marks_that_are_special_tokens_have_to_show() -> None:
    encoder = encoder_of(answer=THOUGHTS["magistral"][0])
    assert AnswerForms(encoder).skips_special_tokens(None)
    encoder.tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    assert not AnswerForms(encoder).skips_special_tokens(None)


def test_keys_and_names_end_where_their_marks_do() -> None:
    form = find_form(encoder_of(CALLS["qwen3 coder"]))
    assert form is not None and form.tags == ("\n<parameter=", ">\n", "\n</parameter>")


@pytest.mark.parametrize("family", ["hermes", "qwen3 coder", "minimax m2", "kimi k2"])
def test_a_call_is_told_as_soon_as_it_is_complete(family: str) -> None:
    encoder = encoder_of(CALLS[family])
    calls = [(FIRST, {"zq_alpha": 'a \\" } b', "zq_beta": "b" * 200})]
    prompt = encoder.render_prompt(QUESTION, PROBES)
    text = encoder.render_prompt([*QUESTION, as_message(calls, ["functions.zq_first_tool:0"])], PROBES)
    text = text[len(prompt) : text.rindex("<|im_end|>")]
    reader = AnswerReader(AnswerForms(encoder).form([5], PROBES))
    assert [piece for character in text for piece in reader.feed(character)], "only the end tells it"
    assert reader.end() == []


def test_values_that_python_spelt_and_numbers_that_json_lacks() -> None:
    form = AnswerForms(encoder_of(CALLS["qwen3 coder"])).form([5], [])
    form = replace(form, calls=find_form(encoder_of(CALLS["qwen3 coder"])))
    form = replace(form, schemas={"f": {"properties": {"on": {"type": "boolean"}, "n": {"type": "number"}}}})
    text = (
        "<tool_call>\n<function=f>\n<parameter=on>\nTrue\n</parameter>\n<parameter=n>\nNaN\n</parameter>\n</function>\n"
    )
    assert called(read(form, text + "</tool_call>")) == [("f", {"on": True, "n": "NaN"})]
