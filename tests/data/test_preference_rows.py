"""Every shape of preference, labelled and document rows becomes the same normal form, or is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from swift.data.rows import Row, RowProblem, RowRef
from swift.data.shapes import RowOptions, normalise_row

U, A, B = ({"role": role, "content": said} for role, said in (("user", "U"), ("assistant", "A"), ("assistant", "B")))
S = {"role": "system", "content": "S"}
PER = {"start": 0, "end": 2, "label": "PER"}


def read(record: dict[str, Any], layout: Any, **options: Any) -> Row:
    return normalise_row(record, RowRef("rows.jsonl", 7), RowOptions(layout=layout, **options))[0]


def refused(record: dict[str, Any], layout: Any) -> RowProblem:
    with pytest.raises(RowProblem) as caught:
        read(record, layout)
    return caught.value


PAIRS: dict[str, dict[str, Any]] = {
    "ms-swift": {"messages": [U, A], "rejected_response": "B"},
    "ms-swift, messages": {"messages": [U, A], "rejected_messages": [U, B]},
    "ms-swift, messages as JSON": {"messages": json.dumps([U, A]), "rejected_messages": json.dumps([U, B])},
    "query/response": {"query": "U", "response": "A", "rejected_response": "B"},
    "trl, texts": {"prompt": "U", "chosen": "A", "rejected": "B"},
    "trl, messages": {"prompt": [U], "chosen": [A], "rejected": [B]},
    "trl, implicit prompt": {"chosen": [U, A], "rejected": [U, B]},
    "messages as JSON": {"chosen": json.dumps([U, A]), "rejected": json.dumps([U, B])},
    "prompt said twice": {"prompt": "U", "chosen": [U, A], "rejected": [U, B]},
    "chosen_response": {"question": "U", "chosen_response": "A", "rejected_response": "B"},
    "question, response_j, response_k": {"question": "U", "response_j": "A", "response_k": "B"},
    "llama-factory": {"instruction": "U", "input": "", "chosen": "A", "rejected": "B"},
    "llama-factory, sharegpt": {
        "conversations": [{"from": "human", "value": "U"}],
        "chosen": {"from": "gpt", "value": "A"},
        "rejected": {"from": "gpt", "value": "B"},
    },
    "axolotl": {"messages": [U], "chosen": A, "rejected": B},
    "transcripts": {
        "chosen": "\n\nHuman: U\n\nAssistant: A",
        "rejected": "\n\nHuman: U\n\nAssistant: B",
    },
}


@pytest.mark.parametrize("record", PAIRS.values(), ids=PAIRS)
def test_every_shape_of_a_pair_is_one_row(record: dict[str, Any]) -> None:
    row = read(record, "pairs")
    assert (row.messages, row.answer_at, row.rejected) == ([U, A], 1, [[B]])
    assert (row.margins, row.extra) == ([], {})
    with_system = read({**record, "system": "S"}, "pairs")
    assert (with_system.messages, with_system.answer_at, with_system.rejected) == ([S, U, A], 2, [[B]])


def test_system_history_and_margin() -> None:
    record = {"system": "S", "history": [["p", "q"]], "query": "U", "response": "A", "rejected": "B", "margin": "0.5"}
    row = read(record, "pairs")
    assert [message["content"] for message in row.messages] == ["S", "p", "q", "U", "A"]
    assert row.answer_at == 4 and row.margins == [0.5]


@pytest.mark.parametrize("rejected", [["B", "C"], [[U, B], [U, {**A, "content": "C"}]], [[B], [{**A, "content": "C"}]]])
def test_several_rejected_answers(rejected: list) -> None:
    row = read({"query": "U", "response": "A", "rejected": rejected, "margin": [1, 2]}, "pairs")
    assert [answer[0]["content"] for answer in row.rejected] == ["B", "C"]
    assert row.margins == [1.0, 2.0]


def test_conversations_part_where_the_assistant_first_says_something_else() -> None:
    chosen = [U, A, {"role": "user", "content": "V"}, A]
    rejected = [U, B, {"role": "user", "content": "W"}, B]
    row = read({"chosen": chosen, "rejected": rejected}, "pairs")
    assert row.answer_at == 1 and row.messages == chosen and row.rejected == [rejected[1:]]


BINARY: dict[str, dict[str, Any]] = {
    "ms-swift": {"messages": [U, A], "label": True},
    "llama-factory": {"messages": [U, A], "kto_tag": True},
    "llama-factory, alpaca": {"instruction": "U", "input": "", "output": "A", "kto_tag": True},
    "trl": {"prompt": "U", "completion": "A", "label": True},
    "trl, messages": {"prompt": [U], "completion": [A], "label": True},
    "a number": {"query": "U", "response": "A", "label": 1},
    "a text": {"query": "U", "response": "A", "label": "True"},
}


@pytest.mark.parametrize("record", BINARY.values(), ids=BINARY)
def test_every_shape_of_a_binary_row_is_one_row(record: dict[str, Any]) -> None:
    row = read(record, "binary")
    assert row.messages == [U, A] and row.label is True


@pytest.mark.parametrize(
    ("record", "label"),
    [
        ({"text": "U", "label": 2}, 2),
        ({"messages": [U], "label": [0, 3]}, [0, 3]),
        ({"sentence": "U", "label": "good"}, "good"),
        ({"query": "U", "label": 0.7}, 0.7),
        ({"query": "U", "label": True}, 1),
        ({"content": "U", "labels": "[1, 2]"}, [1, 2]),
    ],
)
def test_labelled_texts(record: dict[str, Any], label: Any) -> None:
    row = read(record, "labelled")
    assert row.messages == [U] and row.label == label and row.extra == {}


def test_labelled_words_and_spans() -> None:
    for record in ({"tokens": ["a", "b"], "ner_tags": [1, 0]}, {"words": ["a", "b"], "labels": [1, 0]}):
        row = read(record, "tokens")
        assert (row.words, row.label, row.spans) == (["a", "b"], [1, 0], None)
    for spans in ([PER], [[0, 2, "PER"]], json.dumps([PER])):
        row = read({"text": "Al x", "entities": spans}, "tokens")
        assert row.spans == [(0, 2, "PER")] and row.messages[-1]["content"] == "Al x"


EMBEDDING: dict[str, dict[str, Any]] = {
    "ms-swift": {"messages": [U], "positive_messages": [[U]], "negative_messages": [[U], [U]]},
    "sentence-transformers": {"anchor": "U", "positive": "U", "negative_1": "U", "negative_2": "U"},
    "mteb": {"query": "U", "pos": ["U"], "neg": ["U", "U"]},
    "passages": {"query": "U", "positive_passages": [{"text": "U"}], "negative_passages": [{"text": "U"}] * 2},
    "labelled documents": {"query": "U", "documents": ["U", "U", "U"], "labels": [0, 1, 0]},
}


@pytest.mark.parametrize("layout", ["embedding", "rerank"])
@pytest.mark.parametrize("record", EMBEDDING.values(), ids=EMBEDDING)
def test_every_shape_of_documents_is_one_row(record: dict[str, Any], layout: str) -> None:
    document = {"role": "user" if layout == "embedding" else "assistant", "content": "U"}
    row = read(record, layout)
    assert (row.messages, row.positives, row.negatives) == ([U], [[document]], [[document]] * 2)


def test_a_pair_may_have_a_similarity() -> None:
    for record in (
        {"messages": [U], "positive_messages": [[U]], "label": 0.8},
        {"sentence1": "U", "sentence2": "U", "score": 0.8},
    ):
        row = read(record, "embedding")
        assert row.label == 0.8 and row.positives == [[U]] and not row.negatives


def test_prompts() -> None:
    row = read({"query": "U", "teacher_prompt": "T"}, "prompts")
    assert row.messages == [U] and row.teacher_prompt == [{"role": "user", "content": "T"}]
    assert read({"messages": [U, A], "teacher_prompt": [S, U]}, "prompts").teacher_prompt == [S, U]


REFUSALS: dict[str, tuple[str, dict[str, Any], str]] = {
    "identical texts": ("pairs", {"prompt": "U", "chosen": "A", "rejected": "A"}, "identical"),
    "identical but for white space": ("pairs", {"prompt": "U", "chosen": "A", "rejected": "A \n"}, "identical"),
    "identical conversations": ("pairs", {"chosen": [U, A], "rejected": [U, A]}, "identical"),
    "one of several is the chosen": ("pairs", {"query": "U", "response": "A", "rejected": ["B", "A"]}, "identical"),
    "empty chosen": ("pairs", {"prompt": "U", "chosen": " ", "rejected": "B"}, "empty_chosen"),
    "empty rejected": ("pairs", {"prompt": "U", "chosen": "A", "rejected": ""}, "empty_rejected"),
    "rejected ends early": ("pairs", {"chosen": [U, A, U, A], "rejected": [U, A]}, "empty_rejected"),
    "only a question": ("pairs", {"chosen": [U, A], "rejected": [U]}, "empty_rejected"),
    "other prompts": ("pairs", {"chosen": [U, A], "rejected": [{**U, "content": "V"}, B]}, "prompt_mismatch"),
    "another prompt column": ("pairs", {"prompt": "V", "chosen": [U, A], "rejected": [U, B]}, "prompt_mismatch"),
    "other tools": (
        "pairs",
        {"query": "U", "response": "A", "rejected": "B", "rejected_tools": [{"name": "f"}]},
        "prompt_mismatch",
    ),
    "no prompt": ("pairs", {"chosen": "A", "rejected": "B"}, "no_prompt"),
    "no rejected": ("pairs", {"messages": [U, A]}, "no_rejected"),
    "null rejected": ("pairs", {"messages": [U, A], "rejected_response": None}, "no_rejected"),
    "no chosen": ("pairs", {"prompt": "U", "rejected": "B"}, "no_chosen"),
    "margin a text": ("pairs", {"prompt": "U", "chosen": "A", "rejected": "B", "margin": "much"}, "bad_margin"),
    "margin NaN": ("pairs", {"prompt": "U", "chosen": "A", "rejected": "B", "margin": float("nan")}, "bad_margin"),
    "margin a boolean": ("pairs", {"prompt": "U", "chosen": "A", "rejected": "B", "margin": True}, "bad_margin"),
    "too few margins": ("pairs", {"prompt": "U", "chosen": "A", "rejected": ["B", "C"], "margin": 1}, "bad_margin"),
    "NUL in the rejected": ("pairs", {"prompt": "U", "chosen": "A", "rejected": "B\0"}, "nul_byte"),
    "no known column": ("pairs", {"foo": "U"}, "no_known_columns"),
    "no label": ("binary", {"query": "U", "response": "A"}, "label_missing"),
    "a pair where labels are": ("binary", {"prompt": "U", "chosen": "A", "rejected": "B"}, "label_missing"),
    "label a fraction": ("binary", {"query": "U", "response": "A", "label": 0.5}, "label_not_bool"),
    "label 2": ("binary", {"query": "U", "response": "A", "label": 2}, "label_not_bool"),
    "no answer": ("binary", {"query": "U", "label": True}, "no_assistant"),
    "text without label": ("labelled", {"text": "U"}, "label_missing"),
    "label null": ("labelled", {"text": "U", "label": None}, "label_missing"),
    "label NaN": ("labelled", {"text": "U", "label": float("nan")}, "label_nan"),
    "label an object": ("labelled", {"text": "U", "label": {}}, "label_type"),
    "label without text": ("labelled", {"label": 1}, "no_known_columns"),
    "empty text": ("labelled", {"text": " ", "label": 1}, "empty"),
    "too few labels": ("tokens", {"tokens": ["a", "b"], "labels": [1]}, "label_count"),
    "words without labels": ("tokens", {"tokens": ["a"]}, "label_missing"),
    "span too far": ("tokens", {"text": "ab", "spans": [[0, 3, "X"]]}, "bad_span"),
    "spans overlap": ("tokens", {"text": "abc", "spans": [[0, 2, "X"], [1, 3, "Y"]]}, "bad_span"),
    "no positive": ("embedding", {"query": "U", "neg": ["x"]}, "no_positives"),
    "no document": ("rerank", {"query": "U"}, "no_positives"),
    "an empty document": ("rerank", {"query": "U", "positive": ["a", " "]}, "empty"),
    "documents without labels": ("rerank", {"query": "U", "documents": ["a"]}, "label_missing"),
    "similarity of three": (
        "embedding",
        {"anchor": "U", "positive": "a", "negative": "b", "label": 1},
        "contradiction",
    ),
    "a similarity that is none": ("embedding", {"anchor": "U", "positive": "a", "label": "x"}, "label_type"),
    "an answer alone": ("prompts", {"response": "A"}, "no_prompt"),
}


@pytest.mark.parametrize(("layout", "record", "reason"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(layout: str, record: dict[str, Any], reason: str) -> None:
    assert refused(record, layout).reason == reason


def test_plain_tuning_still_names_the_way_to_use_a_preference_row() -> None:
    problem = refused({"prompt": "U", "chosen": "A", "rejected": "B"}, "chat")
    assert problem.reason == "no_assistant" and "preference row" in str(problem.fix)
