"""Judging drawn answers and choosing among them."""

from __future__ import annotations

import itertools

import pytest

from swift.config.sample import SampleRunConfig
from swift.core.errors import UsageError
from swift.methods.rejection import Drawn, Summary, pass_at, powers, rows_of
from swift.methods.rewards import make_reward

ASKED = [{"role": "user", "content": "What is 6 times 7?"}]


def row(reference=None, **extra):
    return {"reference": reference, "extra": extra, "messages": ASKED}


@pytest.mark.parametrize(
    ("spec", "answer", "reference", "worth"),
    [
        ("match", " Forty  two. ", "forty two", 1),
        ("match", "forty three", "forty two", 0),
        ("match", "anything", None, 0),
        ("number", "6 times 7 is 42.", "so: 42.0", 1),
        ("number", "It is 1,042", "1042", 1),
        ("number", "42 or 43", "42", 0),
        ("number", "none", "42", 0),
        ("number", "-3", "3", 0),
        ("number", "10-3", "3", 1),
        ("number", "1,2", "12", 0),
        ("number", "x = -3.5", "-3.50", 1),
        ("json", "NaN", None, 0),
        ("json", '{"a": [1]}', None, 1),
        ("json", '{"a": 1', None, 0),
        ("regex:^4\\d$", "42", None, 1),
        ("regex:a:b", "xa:by", None, 1),
        ("regex:^4\\d$", "142", None, 0),
        ("length:2-3", "abc", None, 1),
        ("length:2-3", "abcd", None, 0),
        ("0.25*length:1-9", "abc", None, 0.25),
    ],
)
def test_verifiers(spec, answer, reference, worth):
    assert make_reward([spec])(answer, row(reference)) == worth


def test_rewards_are_added_and_ones_own_see_the_row(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def worth(answer, row):\n    return row['extra']['bonus'] * len(answer)\n")
    reward = make_reward(["match", f"0.5*{file}:worth"])
    assert reward("ab", row("ab", bonus=3)) == 4.0


@pytest.mark.parametrize(
    "spec", ["mach", "match:x", "regex:(", "length:3", "length:5-2", "missing.py:f", "json:schema"]
)
def test_what_is_no_reward(spec):
    with pytest.raises(UsageError):
        make_reward([spec])


def test_a_reward_that_is_no_number_is_refused(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def worth(answer, row):\n    return float('nan')\n")
    with pytest.raises(UsageError, match="finite"):
        make_reward([f"{file}:worth"])("a", row())
    file.write_text("def worth(answer, row):\n    return row['nothing']\n")
    with pytest.raises(UsageError, match="a reward failed: KeyError"):
        make_reward([f"{file}:worth"])("a", row())
    with pytest.raises(UsageError, match="no function 'other'"):
        make_reward([f"{file}:other"])


def drawn(*pairs: tuple[str, float]) -> Drawn:
    return Drawn(ASKED, [text for text, _ in pairs], [worth for _, worth in pairs])


def contents(rows: list[dict]) -> list[str]:
    return [each["messages"][-1]["content"] for each in rows]


def test_sft_keeps_the_best_right_answers_each_text_once():
    found = drawn(("a", 0.6), ("b", 0.9), ("c", 0.1), ("b", 0.9), (" ", 1.0), ("d", 0.6))
    assert contents(rows_of(found, "sft", SampleRunConfig(n_best_to_keep=3))[0]) == ["b", "a", "d"]
    assert contents(rows_of(found, "sft", SampleRunConfig())[0]) == ["b"]
    assert rows_of(drawn(("a", 0.4)), "sft", SampleRunConfig()) == ([], "none right")


def test_pairs_need_a_difference():
    (pair,), why = rows_of(drawn(("a", 0.2), ("b", 0.9), ("c", 0.1)), "dpo", SampleRunConfig())
    assert contents([pair]) == ["b"] and pair["rejected_response"] == "c" and why is None
    assert rows_of(drawn(("a", 1), ("b", 1)), "dpo", SampleRunConfig()) == ([], "all alike")
    assert rows_of(drawn(("a", 1), ("a", 0)), "dpo", SampleRunConfig()) == ([], "all alike")


def test_kto_labels_every_answer():
    rows, _ = rows_of(drawn(("a", 0.5), ("b", 0.4)), "kto", SampleRunConfig())
    assert [each["label"] for each in rows] == [True, False]


def test_easy_prompts_are_dropped_in_every_format():
    config = SampleRunConfig(easy_query_threshold=0.5)
    easy, fair = drawn(("a", 1), ("b", 1), ("c", 0)), drawn(("a", 1), ("c", 0))
    assert {rows_of(easy, kind, config)[1] for kind in ("sft", "dpo", "kto")} == {"too easy"}
    assert {rows_of(fair, kind, config)[1] for kind in ("sft", "dpo", "kto")} == {None}


@pytest.mark.parametrize(("count", "right"), [(5, 0), (5, 1), (5, 3), (6, 6), (7, 2)])
def test_pass_at_k_is_the_share_of_choices_with_a_right_answer(count, right):
    answers = [True] * right + [False] * (count - right)
    for k in range(1, count + 1):
        choices = list(itertools.combinations(answers, k))
        assert pass_at(k, count, right) == pytest.approx(sum(map(any, choices)) / len(choices))
    with pytest.raises(ValueError):
        pass_at(count + 1, count, right)


def test_the_report_counts_prompts_not_answers():
    summary = Summary()
    summary.add(drawn(("a", 1), ("b", 0)), 0.5)
    summary.add(drawn(("a", 0), ("b", 0)), 0.5)
    numbers = summary.numbers()
    assert numbers["mean_reward"] == 0.25 and numbers["pass@1"] == 0.25 and numbers["pass@2"] == 0.5
    assert list(powers(8)) == [1, 2, 4, 8] and list(powers(6)) == [1, 2, 4, 6] and list(powers(1)) == [1]


def test_a_schema_is_kept_or_not(tmp_path):
    file = tmp_path / "schema.json"
    file.write_text('{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}')
    reward = make_reward([f"schema:{file}"])
    assert [reward(text, row()) for text in ('{"a": 1}', '{"a": "1"}', "[]", "no", '{"a": NaN}')] == [1, 0, 0, 0, 0]
    file.write_text('{"type": "objekt"}')
    for spec in (f"schema:{file}", "schema:", "schema:nowhere.json"):
        with pytest.raises(UsageError):
            make_reward([spec])


def test_what_is_refused_is_never_right():
    drawn = Drawn(ASKED, ["a", "b"], [1.0, 0.75], frozenset({0}))
    assert [each["label"] for each in rows_of(drawn, "kto", SampleRunConfig())[0]] == [False, True]
    assert rows_of(drawn, "sft", SampleRunConfig())[0][0]["messages"][-1]["content"] == "b"
    assert drawn.right(0.5) == 1


def test_all_keeps_everything_best_first():
    rows, why = rows_of(Drawn(ASKED, ["a", "b"], [0.0, 1.0]), "all", SampleRunConfig())
    assert why is None and rows == [
        {"messages": ASKED, "answers": [{"response": "b", "reward": 1.0}, {"response": "a", "reward": 0.0}]}
    ]
