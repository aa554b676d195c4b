"""Decontamination: matches against a plain search in token lists, what is cut, and what the ledger names."""

from __future__ import annotations

import json
import random
import re

import pytest
from dedup_runs import documents_of

from swift.core.errors import DataError, UsageError
from swift.data.dedup import tokens
from swift.data.dedup.ngram_index import NgramIndex
from swift.data.engine.document import document_from
from swift.data.engine.operator import Context
from swift.data.engine.tally import Tally
from swift.data.operators.decontaminate import Decontaminate

QUESTION = "Janet's ducks lay sixteen eggs per day. She eats three for breakfast every morning and bakes muffins."


def opened(tmp_path, rows, **settings) -> Decontaminate:
    path = tmp_path / "test.jsonl"
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    operator = Decontaminate(test_sets=[str(path)], **settings)
    operator.check()
    operator.open(Context())
    return operator


def run(operator, texts) -> tuple[list[str], Tally]:
    tally = Tally()
    return [document.text for document in operator.run(documents_of(texts), tally)], tally


def test_a_document_with_a_test_question_goes_and_the_row_is_named(tmp_path):
    operator = opened(tmp_path, [{"question": "Is this another one, which nobody asks?"}, {"question": QUESTION}])
    texts = [
        "clean text about ducks and eggs",
        "blah blah. JANET'S ducks — lay sixteen eggs per day; she eats three for breakfast!",
        "Janet's ducks lay sixteen eggs per day. She eats two for breakfast",  # 10 words in a row
    ]
    kept, tally = run(operator, texts)
    assert kept == [texts[0], texts[2]]
    assert tally.dropped == {"contaminated": 1}
    sample = tally.samples["contaminated"][0]
    assert (sample["id"], sample["note"]) == ("s:2", f"13 tokens of {tmp_path}/test.jsonl:2")
    assert tally.labels["decontaminate"] == {f"{tmp_path}/test.jsonl": 1}


@pytest.mark.parametrize("numba", [True, False])
def test_matches_are_those_of_a_plain_search(monkeypatch, numba):
    monkeypatch.setattr(tokens, "has_numba", lambda: numba)
    rng = random.Random(0)
    units = ["a", "ç", "中", "文"]
    references = [" ".join(rng.choice(units) for _ in range(rng.randrange(3, 12))) for _ in range(20)]
    texts = ["  ".join(rng.choice(units) for _ in range(60)) + "!" for _ in range(60)]
    index = NgramIndex(6, 8, 4)
    for reference in references:
        index.add(reference)
    index.freeze()
    hits = 0
    for text, found in zip(texts, index.find(texts)):
        words = text.rstrip("!").split()
        covered = [False] * len(words)
        for reference in references:
            parts = reference.split()
            width = min(len(parts), 8 if 2 * sum(p in "中文" for p in parts) > len(parts) else 6)
            grams = {tuple(parts[n : n + width]) for n in range(len(parts) - width + 1)}
            for at in range(len(words) - width + 1 if len(parts) >= 4 else 0):
                if tuple(words[at : at + width]) in grams:
                    covered[at : at + width] = [True] * width
        data = text.encode()
        marked = [False] * len(words)
        spans = [match.span() for match in re.finditer(rb"[^ !]+", data)]
        for match in found:
            for number, (start, end) in enumerate(spans):
                if match.start <= start and end <= match.end:
                    marked[number] = True
        assert marked == covered
        hits += sum(covered)
    assert hits > 50


def test_chinese_needs_more_code_points(tmp_path):
    question = "下列关于光合作用的说法中正确的是哪一个选项请从以下四个答案中选出"
    operator = opened(tmp_path, [{"question": question}])
    texts = [f"前言。{question[:20]}，不同的结尾", f"前言。{question[2:28]}，不同的结尾", "下列说法正确的是"]
    kept, tally = run(operator, texts)
    assert kept == [texts[0], texts[2]]
    assert tally.samples["contaminated"][0]["note"].startswith("26 tokens of")


def test_short_rows_match_whole_and_shorter_ones_are_left_out(tmp_path):
    operator = opened(tmp_path, [{"text": "Who wrote the famous play about prince Hamlet?"}, {"text": "Who are you?"}])
    texts = [
        "He asked: who wrote the famous play about Prince Hamlet",
        "who wrote the famous play about prince",
        "Who are you?",
    ]
    kept, _ = run(operator, texts)
    assert kept == texts[1:]
    assert operator._index.too_short == 1


def test_named_columns_each_count_and_lists_are_text(tmp_path):
    row = {"q": QUESTION, "choices": ["one two three four five", "six seven eight nine ten eleven"], "text": "x " * 20}
    operator = opened(tmp_path, [row], columns=["choices"])
    texts = [QUESTION, "one two three four five six seven eight nine ten eleven", "x " * 20]
    kept, tally = run(operator, texts)
    assert kept == [texts[0], texts[2]]
    assert tally.samples["contaminated"][0]["note"].endswith("test.jsonl:1 (choices)")


def test_cutting_takes_the_margin_too(tmp_path):
    operator = opened(tmp_path, [{"text": QUESTION}], action="cut", margin=10, min_left=20)
    before, after = "Ä" * 30 + "0123456789", "9876543210" + "中文字符" * 10
    (kept,), tally = run(operator, [f"{before}{QUESTION[8:]}{after}"])
    # the words of the question touch those beside it, so the match begins and ends one word further in
    assert kept.startswith("Ä" * 20)
    assert kept.endswith("中文字符" * 5)
    assert "breakfast" not in kept
    assert "\n\n" in kept
    assert tally.changes == {"contaminated_part": 1}
    nothing, tally = run(operator, ["short. " + QUESTION])
    assert nothing == []
    assert tally.dropped == {"contaminated_throughout": 1}


def test_a_number_of_matches_can_be_asked_for(tmp_path):
    second = "A robe takes two bolts of blue fiber and half that much white fiber in total"
    operator = opened(tmp_path, [{"text": QUESTION}, {"text": second}], min_matches=2)
    texts = [QUESTION, f"{QUESTION} and then also {second}"]
    assert run(operator, texts)[0] == texts[:1]


def test_turns_are_searched_one_by_one(tmp_path):
    operator = opened(tmp_path, [{"text": QUESTION}])
    half = len(QUESTION.split()) // 2
    split = [" ".join(QUESTION.split()[:half]), " ".join(QUESTION.split()[half:])]

    def chat(*texts):
        return document_from({"messages": [{"role": "user", "content": text} for text in texts]}, "f:1")

    assert len(operator.run([chat(*split)], Tally())) == 1
    assert operator.run([chat("hello", QUESTION)], Tally()) == []


def test_how_documents_are_grouped_changes_nothing(tmp_path):
    operator = opened(tmp_path, [{"text": QUESTION}], action="cut", margin=5, min_left=1)
    texts = ["clean", f"a {QUESTION} b", "", f"{QUESTION}" + " tail" * 30] * 200
    together = run(operator, texts)
    one_by_one = Tally()
    kept = [d.text for document in documents_of(texts) for d in operator.run([document], one_by_one)]
    assert (kept, one_by_one) == together


def test_test_sets_that_cannot_be_used(tmp_path):
    with pytest.raises(UsageError, match="needs test sets"):
        Decontaminate().check()
    with pytest.raises(UsageError, match="ngram is 0"):
        Decontaminate(test_sets=["x"], ngram=0).check()
    with pytest.raises(DataError, match=r"bad row in a test set \(no_column\): there is no column 'answer'") as error:
        opened(tmp_path, [{"question": QUESTION}], columns=["answer"])
    assert str(error.value.where).endswith("test.jsonl:1")
