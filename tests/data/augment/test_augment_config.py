"""The dictionary of settings, and the promise that results are a function of seed, row and transform."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys

import numpy as np
import pytest

import swift
from swift.core.errors import UsageError
from swift.data.augment import TRANSFORMS, build_augmenter
from swift.data.augment.augmenter import random_stream
from swift.data.augment.language import guess_language

OFFLINE = {
    "synonym_replacement": {"prob": 0.7, "n": 2},
    "random_insertion": {"prob": 0.6},
    "random_swap": {"prob": 0.5},
    "random_deletion": {"prob": 0.5},
    "keyboard_typo": {"prob": 0.5},
    "ocr_noise": {"prob": 0.5},
    "clause_reorder": {"prob": 0.9},
    "sentence_shuffle": {"prob": 0.5},
    "contraction": {"prob": 0.9, "direction": "both"},
}
SENTENCES = "the a big house car quick small child river because it rains, we do not go. He is happy. Do they stay?"
WORDS = SENTENCES.split()


def texts(count: int) -> list[str]:
    draw = random.Random(3)
    return [" ".join(draw.choice(WORDS) for _ in range(draw.randrange(3, 30))).capitalize() + "." for _ in range(count)]


def test_all_eleven_are_there():
    assert set(TRANSFORMS) == {*OFFLINE, "back_translation", "paraphrase_llm"}
    assert all(TRANSFORMS[name].name == name for name in TRANSFORMS)


def test_the_public_name():
    assert swift.build_augmenter is build_augmenter


def test_it_neither_needs_nor_loads_torch():
    code = (
        "import sys, swift; swift.build_augmenter({'text': {'random_swap': {}}})('a b'); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_batches_order_and_processes_change_nothing():
    rows = texts(120)
    ids = [f"file:{i}" for i in range(len(rows))]
    augmenter = build_augmenter({"text": OFFLINE}, seed=9)
    together = [result.text for result in augmenter.run(rows, ids)]
    assert sum(a != b for a, b in zip(rows, together)) > 100
    alone = build_augmenter({"text": OFFLINE}, seed=9)
    assert [alone(row, row_id=name) for row, name in reversed(list(zip(rows, ids)))] == together[::-1]
    copy = pickle.loads(pickle.dumps(build_augmenter({"text": OFFLINE}, seed=9)))
    assert [
        r.text for start in range(0, 120, 7) for r in copy.run(rows[start : start + 7], ids[start : start + 7])
    ] == together
    assert copy.counts == alone.counts == augmenter.counts


def test_another_process_gives_the_same(tmp_path):
    rows = texts(40)
    code = (
        "import json, sys\nfrom swift import build_augmenter\nconfig, rows = json.load(sys.stdin)\n"
        "augmenter = build_augmenter(config, seed=9)\n"
        "print(json.dumps([augmenter(row, row_id=i) for i, row in enumerate(rows)]))"
    )
    import json

    config = {"text": OFFLINE}
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps([config, rows]), capture_output=True, text=True, check=True
    )
    here = build_augmenter(config, seed=9)
    assert json.loads(done.stdout) == [here(row, row_id=i) for i, row in enumerate(rows)]


def test_seed_row_place_and_name_all_count():
    streams = [
        random_stream(*key).random()
        for key in [
            (1, "r", "0:a"),
            (2, "r", "0:a"),
            (1, "s", "0:a"),
            (1, "r", "1:a"),
            (1, "r", "0:b"),
            (11, "r", "0:a"),
        ]
    ]
    assert len(set(streams)) == len(streams)
    assert random_stream(1, "r", "0:a").random() == streams[0]


def test_the_stream_is_philox_with_the_hashed_key():
    """Written out once more: a change of it would change every augmented data set."""
    import hashlib

    digest = hashlib.blake2b(b"42\x000:random_swap\x00x:1", digest_size=16).digest()
    key = [int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")]
    expected = np.random.Generator(np.random.Philox(key=np.array(key, dtype=np.uint64))).random(3)
    assert random_stream(42, "x:1", "0:random_swap").random(3).tolist() == expected.tolist()


def test_later_transforms_see_what_earlier_ones_wrote():
    config = {"text": {"contraction": {"direction": "contract"}, "clause_reorder": {}}}
    assert build_augmenter(config)("If it rains, we do not go.") == "We don't go if it rains."


def test_probability_does_not_shift_other_draws():
    """A transform that isn't drawn leaves the ones behind it as they were."""
    row = texts(1)[0]
    with_none = build_augmenter({"text": {"random_swap": {"prob": 0.0}, "random_deletion": {"n": 2}}})
    without_n = build_augmenter({"text": {"random_swap": {"n": 0}, "random_deletion": {"n": 2}}})
    assert [with_none(row, row_id=i) for i in range(9)] == [without_n(row, row_id=i) for i in range(9)]


def test_counts():
    augmenter = build_augmenter({"text": {"contraction": {}, "random_swap": {"prob": 0.0}}})
    for text in ("I do not go.", "Je ne sais pas où il est.", "", "The house is old."):
        augmenter(text)
    assert augmenter.counts == {
        "contraction.changed": 1,
        "contraction.unsupported_language": 1,
        "contraction.empty": 1,
        "contraction.nothing_to_change": 1,
        "random_swap.not_drawn": 4,
    }


def test_the_callers_language_wins():
    augmenter = build_augmenter({"text": {"contraction": {}}})
    assert augmenter("I do not go.", language="fr") == "I do not go."
    assert augmenter("Do not!", language="en") == "Don't!"


def test_defaults_may_be_written_as_null_or_true():
    for value in (None, True, {}):
        assert build_augmenter({"text": {"contraction": value}})("I do not go.") == "I don't go."


@pytest.mark.parametrize(
    ("config", "message", "fix"),
    [
        ({"text": {"synonym_replacment": {}}}, "called 'synonym_replacment'", "did you mean synonym_replacement?"),
        ({"txt": {}}, "no kind of data", "did you mean text?"),
        ({"image": {"flip": {}}}, "no kind of data", "for example"),
        ({"random_swap": {"n": 1}}, "no kind of data", 'under "text"'),
        ({}, "needs a mapping", "for example"),
        ([], "needs a mapping", "for example"),
        ({"text": {}}, "needs a mapping of transforms", "for example"),
        ({"text": ["random_swap"]}, "needs a mapping of transforms", "for example"),
        ({"text": {"random_swap": 3}}, "must be a mapping", "prob"),
        ({"text": {"random_swap": {"probb": 1}}}, "no setting 'probb'", "did you mean prob?"),
        ({"text": {"random_swap": {"prob": 1.5}}}, "between 0 and 1", "change"),
        ({"text": {"random_swap": {"prob": float("nan")}}}, "between 0 and 1", "change"),
        ({"text": {"random_swap": {"prob": "high"}}}, "'high' is not a number", "number"),
        ({"text": {"random_swap": {"prob": True}}}, "True is not a number", "number"),
        ({"text": {"random_swap": {"n": 1.5}}}, "1.5 is not a whole number", "whole"),
        ({"text": {"random_swap": {"n": None}}}, "None is not a whole number", "whole"),
        ({"text": {"random_swap": {"protect": ["codes"]}}}, "'codes' is no kind", "did you mean code?"),
        ({"text": {"random_swap": {"protect": "code"}}}, "is not a list of texts", "list"),
        ({"text": {"back_translation": {}}}, "needs target_lang", "target_lang"),
        ({"text": {"paraphrase_llm": {"model": "m"}}}, "needs base_url", "base_url"),
    ],
)  # fmt: skip
def test_faults_are_named_with_the_nearest_right_name(config, message, fix):
    with pytest.raises(UsageError) as caught:
        build_augmenter(config)
    assert message in str(caught.value)
    assert fix in (caught.value.fix or "")


def test_protection_can_be_switched_off():
    text = "alpha beta {{gamma}} delta"
    assert all("{{gamma}}" in build_augmenter({"text": {"random_swap": {"n": 3}}})(text, row_id=r) for r in range(9))
    open_text = build_augmenter({"text": {"random_swap": {"n": 3, "protect": []}}})
    assert any("{{gamma}}" not in open_text(text, row_id=r) for r in range(9))


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("The house is old and it stands near the river.", "en"),
        ("How do I open this file?", "en"),
        ("It's a good day.", "en"),
        ("Don't panic!", "en"),
        ("La maison est vieille et elle se trouve près de la rivière.", "fr"),
        ("Das Haus ist alt und steht nicht weit von dem Fluss.", "de"),
        ("La casa es vieja y está cerca del río.", "es"),
        ("La casa è vecchia e si trova vicino al fiume.", "it"),
        ("A casa é velha e não está perto do rio.", "pt"),
        ("Het huis is oud en staat niet ver van de rivier.", "nl"),
        ("Это старый дом.", "und"),
        ("这是一座老房子。", "und"),
        ("12345 !!!", "und"),
        ("", "und"),
        ("Configuring worked quickly", "en"),
        ("zażółć gęślą jaźń", "und"),
    ],
)
def test_the_guess_of_the_language(text, language):
    assert guess_language(text) == language
