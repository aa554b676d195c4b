"""Clauses, sentences and contractions: right where they are certain, untouched where they are not."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from swift.core.errors import UsageError
from swift.data.augment import build_augmenter
from swift.data.augment.text import sentences


def augment(name: str, text: str, *, row: object = 0, seed: int = 1, **settings) -> str:
    return build_augmenter({"text": {name: settings}}, seed=seed)(text, row_id=row)


REORDERED = [
    ("If it rains tomorrow, we will stay at home.", "We will stay at home if it rains tomorrow."),
    ("When you are ready, please send me the file!", "Please send me the file when you are ready!"),
    ("As soon as the job ends, then it writes a report.", "It writes a report as soon as the job ends."),
    ("Unless you object, can we begin?", "Can we begin unless you object?"),
    ("She stayed at home because she was ill.", "Because she was ill, she stayed at home."),
    ("They went out although it rained.", "Although it rained, they went out."),
    ("I stayed because `x == 1` was true.", "Because `x == 1` was true, I stayed."),
]


@pytest.mark.parametrize(("before", "after"), REORDERED)
def test_clauses_are_exchanged(before, after):
    assert augment("clause_reorder", before) == after


@pytest.mark.parametrize(
    "text",
    [
        "If it rains, snows, or hails, we stay.",  # whose comma?
        "I wonder if he comes.",
        "I did not go because I was tired.",  # not … because: two readings
        "They left because of the rain.",
        "He said that he left although it rained, and she stayed.",
        "When in doubt, ask.",
        "If x, y.",
        "Why did he go because it rained?",
        "It works when it is cold because it was built when times were hard.",
        "If `a, b` holds and c, d follows.",
    ],
)
def test_uncertain_clauses_stay(text):
    assert augment("clause_reorder", text) == text


def test_number_of_sentences_to_reorder():
    text = " ".join(before for before, _ in REORDERED)
    changed = Counter(dict(REORDERED))
    full = augment("clause_reorder", text)
    assert full == " ".join(after for _, after in REORDERED)
    for n in (0, 1, 3):
        found = sentences(augment("clause_reorder", text, n=n))[0]
        assert sum(sentence in changed.values() for sentence in found) == n
    assert len({augment("clause_reorder", text, n=1, row=r) for r in range(60)}) == len(REORDERED)


def test_clauses_in_paragraphs_and_code():
    text = "If it rains now, we stay.\n\n```\nIf it rains now, we stay.\n```\n- If it snows now, we go."
    assert augment("clause_reorder", text) == (
        "We stay if it rains now.\n\n```\nIf it rains now, we stay.\n```\n- If it snows now, we go."
    )


def test_sentences_are_shuffled_within_paragraphs():
    text = "One is here. Two is `a. b`. Three at https://x.y/z?q. Four!\n\nFive. Six?\n```\nA. B. C.\n```\nSeven."
    orders = set()
    for row in range(60):
        after = augment("sentence_shuffle", text, row=row)
        first, _, second, *rest = after.split("\n")
        assert sorted(sentences(first)[0]) == sorted(sentences(text.split("\n")[0])[0])
        assert second == "Six? Five."
        assert rest == ["```", "A. B. C.", "```", "Seven."]
        orders.add(first)
    assert text.split("\n")[0] not in orders and len(orders) > 15  # of 23


def test_sentences_that_stay_first_and_last():
    text = "A a. B b. C c. D d."
    assert {augment("sentence_shuffle", text, row=r, keep_first=True, keep_last=True) for r in range(9)} == {
        "A a. C c. B b. D d."
    }
    assert all(augment("sentence_shuffle", text, row=r, keep_first=True).startswith("A a.") for r in range(20))
    assert all(augment("sentence_shuffle", text, row=r, keep_last=True).endswith("D d.") for r in range(20))


@pytest.mark.parametrize(
    "text", ["One sentence only.", "Same. Same.", "", "A list\nof lines\nwithout ends", "One. two without end"]
)
def test_nothing_to_shuffle(text):
    assert augment("sentence_shuffle", text) == text


def test_shuffling_works_in_every_script():
    assert augment("sentence_shuffle", "我喜欢猫。你好吗？") == "你好吗？我喜欢猫。"
    assert augment("sentence_shuffle", "Это дом. Он большой!") == "Он большой! Это дом."
    assert augment("sentence_shuffle", "我喜欢猫。It works.") == "It works. 我喜欢猫。"


PAIRS = [
    ("I do not know.", "I don't know."),
    ("We are not sure, and it does not matter.", "We aren't sure, and it doesn't matter."),
    ("You cannot go there.", "You can't go there."),
    ("They will not stop.", "They won't stop."),
    ("Do not worry.", "Don't worry."),
    ("It is a good day.", "It's a good day."),
    ("I am not here, they are going.", "I'm not here, they're going."),
    ("I have been there and you will see it.", "I've been there and you'll see it."),
    ("There is a way.", "There's a way."),
]


@pytest.mark.parametrize(("long", "short"), PAIRS)
def test_contractions_both_ways(long, short):
    assert augment("contraction", long, direction="contract") == short
    assert augment("contraction", short, direction="expand") == long
    assert augment("contraction", long) == short  # only one way is possible
    assert augment("contraction", short) == long


@pytest.mark.parametrize(
    ("text", "direction"),
    [
        ("That is what it is.", "contract"),
        ("Yes, I am. You know who they are.", "contract"),
        ("It is not only good but cheap.", "contract"),
        ("I do NOT want it.", "contract"),
        ("The quiz is a test.", "contract"),
        ("I can not only sing.", "contract"),
        ("Keep `do not` and {{do not}}, is nothing.", "contract"),
        ("Don't you think so? Isn't it fine?", "expand"),
        ("He'd go, she's been there, it's done, John's here.", "expand"),
        ("I ain't going, y'all; the dog's tail; cats' eyes; let's go.", "expand"),
    ],
)
def test_doubtful_forms_stay(text, direction):
    assert augment("contraction", text, direction=direction) == text


NEGATION = re.compile(r"(?i)\bnot\b|n['’]t\b|\bcannot\b")


def test_a_negation_stays_a_negation():
    verbs = [
        "is",
        "are",
        "was",
        "were",
        "do",
        "does",
        "did",
        "have",
        "has",
        "had",
        "would",
        "could",
        "must",
        "will",
        "can",
    ]
    for verb in verbs:
        text = f"He {verb} not see them, they {verb} not see him; {verb.capitalize()} not."
        for direction in ("contract", "expand"):
            after = augment("contraction", text, direction=direction)
            again = augment("contraction", after, direction="expand" if direction == "contract" else "contract")
            assert len(NEGATION.findall(after)) == len(NEGATION.findall(again)) == 3, (text, after)


def test_apostrophes_are_those_of_the_text():
    assert augment("contraction", "It’s theirs; I do not know", direction="contract") == "It’s theirs; I don’t know"
    assert augment("contraction", "I don’t know", direction="expand") == "I do not know"


def test_number_of_contractions():
    text = "I do not go. We are not sure. They will not stop. It does not end."
    for n in range(5):
        assert len(re.findall("n't", augment("contraction", text, n=n))) == n


@pytest.mark.parametrize("name", ["clause_reorder", "contraction"])
def test_english_only(name):
    augmenter = build_augmenter({"text": {name: {}}})
    text = "Wenn es regnet, bleiben wir nicht und das ist gut."
    assert augmenter(text) == text
    assert augmenter.counts == {f"{name}.unsupported_language": 1}


@pytest.mark.parametrize("name", ["clause_reorder", "sentence_shuffle", "contraction"])
def test_probability_and_reproducibility(name):
    text = "If it rains now, we do not go. It is a good day. We stay. They leave."
    assert all(augment(name, text, row=r, prob=0.0) == text for r in range(20))
    assert all(augment(name, text, row=r) != text for r in range(20))
    assert [augment(name, text, row=r) for r in range(9)] == [augment(name, text, row=r) for r in range(9)]
    long = text * 500
    assert augment(name, long) != long


@pytest.mark.parametrize(
    ("name", "settings"),
    [("clause_reorder", {"n": -1}), ("contraction", {"n": -1}), ("contraction", {"direction": "contrct"})],
)
def test_settings_that_cannot_be_meant(name, settings):
    with pytest.raises(UsageError) as caught:
        build_augmenter({"text": {name: settings}})
    if "direction" in settings:
        assert "did you mean contract?" in caught.value.fix


@pytest.mark.timeout(10)
@pytest.mark.parametrize("text", ["Aa bb" + " because x" * 20_000 + " y", "If it rains, " + "." * 100_000 + "x"])
def test_endless_sentences_take_no_time(text):
    assert augment("clause_reorder", text) == text
