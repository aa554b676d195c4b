"""Units: prefix and part are the tokens of the chat encoder; labels and marks lie where they belong."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from fixtures import make_tokenizer

from swift.config.data import TemplateConfig
from swift.core.errors import DataError, UsageError
from swift.data.encoding.closed_texts import ClosedTexts
from swift.data.encoding.encode import ChatEncoder, Encoded
from swift.data.encoding.units import Judging, UnitEncoder
from swift.data.labels import LabelSpace
from swift.data.rows import Row, RowProblem, RowRef
from swift.data.shapes import RowOptions, normalise_row
from swift.data.units import Kind, Unit

END = "<|im_end|>"
WORDS = ["paris", "rain", "the", "of", "Straße", "你好", "\n", " ", "a,b", "x", "seven", "<b>", "0.5", "é"]
CLASSES = LabelSpace("single_label_classification", 3)


def chat(**settings: Any) -> ChatEncoder:
    return ChatEncoder(make_tokenizer(), TemplateConfig(**{"loss_scale": "last_round", **settings}))


def read(record: dict[str, Any], layout: Any) -> Row:
    return normalise_row(record, RowRef("rows.jsonl", 3), RowOptions(layout=layout))[0]


def encode(record: dict[str, Any], layout: Any, settings: dict | None = None, **more: Any) -> list[Encoded]:
    return UnitEncoder(chat(**(settings or {})), layout, **more).encode(read(record, layout))


def sequences(example: Encoded) -> list[tuple[list[int], list[float]]]:
    """Ids and weights of prefix ++ part, for each part."""
    assert example.notes is not None
    unit = Unit.read(example.notes)
    assert unit.prefix + sum(unit.lengths) == len(example.input_ids) == len(example.loss_weights)
    head = slice(0, unit.prefix)
    return [
        (
            [*example.input_ids[head].tolist(), *example.input_ids[part].tolist()],
            [*example.loss_weights[head].tolist(), *example.loss_weights[part].tolist()],
        )
        for part in unit.parts()
    ]


def unit_of(example: Encoded) -> Unit:
    assert example.notes is not None
    return Unit.read(example.notes)


def refused(record: dict[str, Any], layout: Any, settings: dict | None = None, **more: Any) -> RowProblem:
    with pytest.raises(RowProblem) as caught:
        encode(record, layout, settings, **more)
    return caught.value


def text(rng: random.Random, most: int = 8) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, most))) + rng.choice(["!", "?", " x"])


def upto_the_end(example: Encoded) -> tuple[list[int], list[float]]:
    """Without what the template puts behind the end of the answer."""
    weights = example.loss_weights.tolist()
    while not weights[-1]:
        weights.pop()
    return example.input_ids[: len(weights)].tolist(), weights


def test_a_reward_is_read_where_texts_end() -> None:
    """The last token of an answer in a pair is the one that a finished reward model reads of the same conversation."""
    (example,) = encode({"query": "U", "response": "A", "rejected_response": "B"}, "pairs")
    talk = [{"role": "user", "content": "U"}, answer("A")]
    (closed,) = ClosedTexts(chat()).encode_batch([Row(RowRef("f", 1), talk)])
    assert sequences(example)[0][0] == closed.input_ids.tolist()


@pytest.mark.parametrize("settings", [{}, {"loss_scale": "default"}, {"use_chat_template": False}, {"system": "Be."}])
def test_a_sequence_of_a_pair_is_what_supervised_tuning_trains(settings: dict) -> None:
    rng = random.Random(3)
    reference, encoder = chat(**settings), UnitEncoder(chat(**settings), "pairs")
    shared = 0
    for _ in range(60):
        history = [{"role": role, "content": "rain " + text(rng)} for role in ("user", "assistant") * rng.randint(0, 2)]
        prompt = [*history, {"role": "user", "content": text(rng)}]
        stem = ("so " if "loss_scale" in settings else "") + text(rng)  # an answer may begin with white space
        answers = [[{"role": "assistant", "content": f"{stem} {number} {text(rng)}"}] for number in range(3)]
        record = {"prompt": prompt, "chosen": answers[0], "rejected": answers[1:]}
        units = encoder.encode(read(record, "pairs"))
        assert len(units) == 2
        for number, example in enumerate(units, 1):
            unit = unit_of(example)
            assert unit.kinds == (Kind.CHOSEN, Kind.REJECTED) and unit.values == ()
            found = sequences(example)
            for (ids, weights), answer in zip(found, (answers[0], answers[number]), strict=True):
                (expected,) = reference.encode(Row(RowRef("f", 1), [*prompt, *answer]))
                assert (ids, weights) == upto_the_end(expected)
            assert not example.loss_weights[: unit.prefix].any()
            first = [int(np.argmax(np.array(weights) > 0)) for _, weights in found]
            assert unit.prefix <= min(first)
            if unit.prefix < min(first):  # only where the tokens differ before
                assert found[0][0][unit.prefix] != found[1][0][unit.prefix]
            shared += unit.prefix
    assert shared > 0


def test_the_margin_is_the_units_value() -> None:
    (example,) = encode({"query": "U", "response": "A", "rejected_response": "B", "margin": 0.5}, "pairs")
    assert unit_of(example).values == (0.5,)


@pytest.mark.parametrize("label", [True, False])
def test_a_binary_row_is_one_part_behind_its_prompt(label: bool) -> None:
    (example,) = encode({"prompt": "one?", "completion": "First.", "label": label}, "binary")
    (expected,) = chat().encode(Row(RowRef("f", 1), [{"role": "user", "content": "one?"}, answer("First.")]))
    ((ids, weights),) = sequences(example)
    assert (ids, weights) == upto_the_end(expected)
    unit = unit_of(example)
    assert unit.kinds == (Kind.CHOSEN if label else Kind.REJECTED,)
    assert unit.prefix == int(np.argmax(expected.loss_weights > 0))


def answer(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


# --- length ---

LONG = {"query": "paris " * 30, "response": "rain " * 6, "rejected_response": "seven " * 9}


def test_max_length_limits_each_sequence_and_not_the_unit() -> None:
    (whole,) = encode(LONG, "pairs")
    longest = max(len(ids) for ids, _ in sequences(whole))
    (same,) = encode(LONG, "pairs", {"max_length": longest})
    assert same.input_ids.tolist() == whole.input_ids.tolist() and len(whole.input_ids) > longest
    problem = refused(LONG, "pairs", {"max_length": longest - 1})
    assert (problem.reason, problem.tokens) == ("too_long", longest)
    with pytest.raises(DataError, match="max_length"):
        encode(LONG, "pairs", {"max_length": longest - 1, "truncation_strategy": "raise"})


def test_left_cuts_the_prompt_of_both_alike() -> None:
    (whole,) = encode(LONG, "pairs")
    longest = max(len(ids) for ids, _ in sequences(whole))
    (cut,) = encode(LONG, "pairs", {"max_length": longest - 5, "truncation_strategy": "left"})
    assert cut.truncated == 5 and unit_of(cut).lengths == unit_of(whole).lengths
    assert cut.input_ids.tolist() == whole.input_ids[5:].tolist()
    answers = longest - unit_of(whole).prefix
    assert (
        refused(LONG, "pairs", {"max_length": answers, "truncation_strategy": "left"}).reason == "too_long"
    )  # no token is left that the answers could follow


def test_right_cuts_the_answers() -> None:
    (whole,) = encode(LONG, "pairs")
    limit = unit_of(whole).prefix + 3
    (cut,) = encode(LONG, "pairs", {"max_length": limit, "truncation_strategy": "right"})
    for (ids, weights), (full, full_weights) in zip(sequences(cut), sequences(whole), strict=True):
        assert ids == full[:limit] and weights == full_weights[:limit]
    prompt_only = {"max_length": unit_of(whole).prefix, "truncation_strategy": "right"}
    assert refused(LONG, "pairs", prompt_only).reason == "masked_by_truncation"
    with pytest.raises(UsageError, match="pieces"):
        UnitEncoder(chat(truncation_strategy="split", use_chat_template=False), "pairs")


# --- texts that are read ---


@pytest.mark.parametrize("template", [True, False])
def test_a_labelled_text_ends_with_eos_which_alone_is_read(template: bool) -> None:
    settings = {"use_chat_template": template}
    (example,) = encode({"text": "good film", "label": 2}, "labelled", settings, labels=CLASSES)
    tokenizer = make_tokenizer()
    expected = f"<|im_start|>user\ngood film{END}" if template else f"good film{END}"
    assert tokenizer.decode(example.input_ids) == expected
    assert example.loss_weights.tolist() == [0.0] * (len(example.input_ids) - 1) + [1.0]
    unit = unit_of(example)
    assert (unit.prefix, unit.kinds, unit.values) == (0, (Kind.PLAIN,), (2.0,))


@pytest.mark.parametrize("strategy", ["left", "right"])
def test_a_cut_text_still_ends_with_eos(strategy: str) -> None:
    settings = {"max_length": 9, "truncation_strategy": strategy}
    (whole,) = encode({"text": "paris rain " * 9, "label": 0}, "labelled", labels=CLASSES)
    (cut,) = encode({"text": "paris rain " * 9, "label": 0}, "labelled", settings, labels=CLASSES)
    ids = whole.input_ids.tolist()
    assert cut.input_ids.tolist() == (ids[-9:] if strategy == "left" else [*ids[:8], ids[-1]])
    assert cut.loss_weights[-1] == 1 and cut.truncated == len(ids) - 9


@pytest.mark.parametrize(
    ("space", "label", "values"),
    [
        (LabelSpace("single_label_classification", 2, ("bad", "good")), "good", (1.0,)),
        (LabelSpace("multi_label_classification", 4), [3, 0, 3], (3.0, 0.0)),
        (LabelSpace("multi_label_classification", 4), [], ()),
        (LabelSpace("regression", 1), 0.75, (0.75,)),
        (LabelSpace("regression", 2), [1, -2.5], (1.0, -2.5)),
    ],
)
def test_labels_become_values(space: LabelSpace, label: Any, values: tuple) -> None:
    (example,) = encode({"text": "x", "label": label}, "labelled", labels=space)
    assert unit_of(example).values == values


@pytest.mark.parametrize(
    ("space", "label", "reason"),
    [
        (CLASSES, 3, "label_out_of_range"),
        (CLASSES, -1, "label_out_of_range"),
        (CLASSES, 0.5, "label_unknown"),
        (CLASSES, "good", "label_unknown"),
        (CLASSES, [1], "label_count"),
        (LabelSpace("regression", 1), "much", "label_not_a_number"),
        (LabelSpace("regression", 1), [1, 2], "label_count"),
    ],
)
def test_labels_that_cannot_be(space: LabelSpace, label: Any, reason: str) -> None:
    assert refused({"text": "x", "label": label}, "labelled", labels=space).reason == reason


@pytest.mark.parametrize("template", [True, False])
def test_the_first_token_of_each_word_has_its_label(template: bool) -> None:
    words = ["Paris", "unbelievablest", "你好", "x", "."]
    space = LabelSpace("single_label_classification", 5)
    record = {"tokens": words, "ner_tags": [4, 0, 1, 2, 3]}
    (example,) = encode(record, "tokens", {"use_chat_template": template}, labels=space)
    assert unit_of(example).values == (4, 0, 1, 2, 3)
    tokenizer = make_tokenizer()
    marked = np.flatnonzero(example.loss_weights).tolist()
    text = " ".join(words)
    for number, (token, word) in enumerate(zip(marked, words, strict=True)):
        following = tokenizer.decode(example.input_ids[token:])
        assert following.lstrip().startswith(" ".join(words[number:])), (word, text)


def test_spans_label_every_token_of_the_text() -> None:
    content = "Anna Smith went to Paris."
    record = {"text": content, "spans": [[19, 24, "LOC"], {"start": 0, "end": 10, "label": "PER"}]}
    names = ("O", "B-LOC", "B-PER", "I-LOC", "I-PER")
    (example,) = encode(record, "tokens", labels=LabelSpace("single_label_classification", 5, names))
    tokenizer = make_tokenizer()
    marked = np.flatnonzero(example.loss_weights).tolist()
    assert tokenizer.decode(example.input_ids[marked]) == content
    found = {"PER": "", "LOC": "", "O": ""}
    starts = []
    for token, value in zip(marked, unit_of(example).values, strict=True):
        name = names[int(value)]
        found[name.split("-")[-1]] += tokenizer.decode(example.input_ids[[token]])
        starts += [name] if name.startswith("B-") else []
    assert {name: said.strip() for name, said in found.items()} == {
        "PER": "Anna Smith",
        "LOC": "Paris",
        "O": "went to.",
    }
    assert starts == ["B-PER", "B-LOC"]


def test_white_space_inside_a_span_belongs_to_it() -> None:
    names = ("O", "X")
    space = LabelSpace("single_label_classification", 2, names, bio=False)
    record = {"text": "see a\n\nb there", "spans": [[4, 8, "X"]]}
    (example,) = encode(record, "tokens", labels=space)
    marked = np.flatnonzero(example.loss_weights)
    inside = [token for token, value in zip(marked, unit_of(example).values, strict=True) if value]
    assert make_tokenizer().decode(example.input_ids[inside]).strip() == "a\n\nb"


def test_each_text_of_an_embedding_row_is_a_part_of_its_own() -> None:
    record = {"anchor": "one", "positive": ["two", "three"], "negative": "four"}
    (example,) = encode(record, "embedding")
    unit = unit_of(example)
    assert unit.prefix == 0 and unit.kinds == (Kind.ANCHOR, Kind.POSITIVE, Kind.POSITIVE, Kind.NEGATIVE)
    tokenizer = make_tokenizer()
    shown = [tokenizer.decode(example.input_ids[part]) for part in unit.parts()]
    assert shown == [f"<|im_start|>user\n{said}{END}" for said in ("one", "two", "three", "four")]
    assert all(example.loss_weights[part].tolist()[-1:] == [1.0] for part in unit.parts())
    assert example.loss_weights.sum() == 4
    (pair,) = encode({"sentence1": "one", "sentence2": "two", "score": 0.8}, "embedding")
    assert unit_of(pair).values == (0.8,)


def test_query_and_document_are_one_sequence() -> None:
    (example,) = encode({"query": "which?", "positive": "this", "negative": ["that", "those"]}, "rerank")
    unit = unit_of(example)
    assert unit.kinds == (Kind.POSITIVE, Kind.NEGATIVE, Kind.NEGATIVE)
    tokenizer = make_tokenizer()
    head = f"<|im_start|>user\nwhich?{END}\n<|im_start|>assistant\n"
    assert tokenizer.decode(example.input_ids[: unit.prefix]).startswith(head)
    assert [tokenizer.decode(ids) for ids, _ in sequences(example)] == [
        f"{head}{said}{END}" for said in ("this", "that", "those")
    ]


def test_a_generative_reranker_answers_with_one_token() -> None:
    encoder = UnitEncoder(chat(), "rerank", judging=Judging(form="{query}|{document}"))
    (example,) = encoder.encode(read({"query": "which?", "positive": "this", "negative": "that"}, "rerank"))
    tokenizer = make_tokenizer()
    assert encoder.word_ids is not None
    for (ids, weights), word, document in zip(sequences(example), encoder.word_ids, ("this", "that"), strict=True):
        assert ids[-1] == word and weights == [0.0] * (len(ids) - 1) + [1.0]
        asked = f"<|im_start|>user\nwhich?|{document}{END}\n<|im_start|>assistant\n"
        assert tokenizer.decode(ids[:-1]) == asked
    assert "yes".startswith(tokenizer.decode([encoder.word_ids[0]]))
    with pytest.raises(UsageError, match="same token"):
        UnitEncoder(chat(), "rerank", judging=Judging(yes="no"))
    assert not any(UnitEncoder(chat(), "rerank", judging=Judging()).counts.values())


def test_a_row_without_negatives_is_refused_where_they_are_needed() -> None:
    record = {"query": "which?", "positive": "this"}
    assert len(encode(record, "rerank")) == 1
    assert refused(record, "rerank", need_negatives=True).reason == "no_negatives"


def test_a_prompt_is_kept_without_an_answer() -> None:
    encoder = UnitEncoder(chat(), "prompts")
    (example,) = encoder.encode(read({"query": "U"}, "prompts"))
    ((ids, _),) = sequences(example)
    assert ids == encoder.chat.encode_prompt([{"role": "user", "content": "U"}])
    assert unit_of(example).kinds == (Kind.PLAIN,)
    record = {"query": "U", "response": "A", "teacher_prompt": "U, and the answer is A"}
    (example,) = encoder.encode(read(record, "prompts"))
    assert unit_of(example).kinds == (Kind.CHOSEN, Kind.PLAIN)
    (_, mine), (teacher, theirs) = sequences(example)
    assert "the answer is A" in make_tokenizer().decode(teacher)
    assert sum(mine) == sum(theirs)


def test_a_bad_row_leaves_its_neighbours_alone() -> None:
    encoder = UnitEncoder(chat(max_length=40), "pairs")
    rows = [read({"query": "U", "response": "A", "rejected": f"B{n}"}, "pairs") for n in range(2)]
    rows.insert(1, read(LONG, "pairs"))
    first, problem, last = encoder.encode_batch(rows)
    assert isinstance(problem, RowProblem) and problem.reason == "too_long"
    for outcome, row in ((first, rows[0]), (last, rows[2])):
        assert isinstance(outcome, list)
        assert outcome[0].input_ids.tolist() == encoder.encode(row)[0].input_ids.tolist()


def test_it_stands_in_for_the_chat_encoder() -> None:
    inner = chat()
    encoder = UnitEncoder(inner, "pairs")
    assert (encoder.template, encoder.stop_token_ids()) == (inner.template, inner.stop_token_ids())
    assert encoder.template and encoder.stop_token_ids() and encoder.tokenizer_parts() == inner.tokenizer_parts()


def test_the_fingerprint_changes_with_what_decides_a_unit() -> None:
    same = {UnitEncoder(chat(), "pairs").fingerprint() for _ in range(2)}
    other = [
        UnitEncoder(chat(max_length=100), "pairs"),
        UnitEncoder(chat(), "binary"),
        UnitEncoder(chat(), "labelled", labels=CLASSES),
        UnitEncoder(chat(), "labelled", labels=LabelSpace("regression", 1)),
        UnitEncoder(chat(), "rerank"),
        UnitEncoder(chat(), "rerank", judging=Judging()),
    ]
    assert len(same | {encoder.fingerprint() for encoder in other}) == len(other) + 1
