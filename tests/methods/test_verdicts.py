"""Marks of a judge at an endpoint, and marks of single steps."""

from __future__ import annotations

import math

import pytest

from swift.core.chat_client import NoAnswer
from swift.methods.verdicts import JUDGE_PROMPT, ask_marks, judge_question, mark_of, steps_of, together


@pytest.mark.parametrize(
    ("text", "mark"),
    [
        ('Fine. {"score": 7}', 0.7),
        ('```json\n{"score": 10}\n```', 1.0),
        ('{"score": 2} and then {"score": 4.5}', 0.45),
        ('{"score": 0}', 0.0),
        ('{"score": 11}', None),
        ('{"score": -1}', None),
        ('{"score": 5} I think', None),
        ('{"score": "5"}', None),
        ("5", None),
        ("", None),
    ],
)
def test_only_a_mark_at_the_end_counts(text, mark):
    assert mark_of(text) == mark


def test_a_judge_sees_conversation_reference_and_answer():
    asked = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q {x}"}]
    question = judge_question(JUDGE_PROMPT, asked, "R", "A {y}")
    assert "system: S\nuser: Q {x}" in question and "\nR\n" in question and question.endswith("A {y}")
    assert '{"score": NUMBER}' in question


class Client:
    """Answers by a table, each time the next one."""

    def __init__(self, table):
        self.table = {key: list(texts) for key, texts in table.items()}
        self.bodies = []

    def text(self, body):
        self.bodies.append(body)
        found = self.table[body["messages"][0]["content"]].pop(0)
        if found is None:
            raise NoAnswer("gone")
        return found


def test_nonsense_is_asked_again_and_never_zero():
    client = Client({"a": ['{"score": 5}'], "b": ["hm", "hm", '{"score": 9}'], "c": ["hm"] * 3, "d": [None]})
    assert list(ask_marks(client, "m", ["a", "b", "c", "d"], concurrency=2)) == [0.5, 0.9, None, None]
    again = [body for body in client.bodies if body["messages"][0]["content"] == "b"]
    assert [body.get("seed") for body in again] == [None, 1, 2] and again[0]["temperature"] == 0


def test_steps_grow():
    assert steps_of("one\n\ntwo\n \nthree", r"\n\s*\n") == ["one", "one\n\ntwo", "one\n\ntwo\n \nthree"]
    assert steps_of("one\n\n", r"\n\s*\n") == ["one"]
    assert steps_of("\n\none", r"\n\s*\n") == ["\n\none"]
    assert steps_of("", r"\n\s*\n") == [""]


def test_steps_together():
    marks = [0.5, 1.0, 0.25]
    assert together(marks, "min") == 0.25 and together(marks, "last") == 0.25
    assert together(marks, "product") == 0.125 and together(marks, "mean") == pytest.approx(1.75 / 3)
    assert math.isnan(together([0.5, math.nan], "min"))
