"""Transforms of words and characters: how many change, what never does, and that nothing but the draw decides."""

from __future__ import annotations

import json
from collections import Counter
from difflib import SequenceMatcher

import pytest

from swift.core.errors import DataError, UsageError
from swift.data.augment import build_augmenter
from swift.data.augment.lexical import has_vowel_sound
from swift.data.augment.noise import neighbours
from swift.data.augment.synonyms import shipped_table
from swift.data.augment.text import Words, kept_texts

TEXT = (
    "The quick student bought a big house near the river, and she planted small trees there. "
    "Her children often visit the garden (and the kitchen) when the weather improves. "
    'Please see https://example.org/a?b=1, run `make all`, fill {{NAME}} with 42, and say "thanks" to <|user|>.'
)
WORD_TRANSFORMS = ["synonym_replacement", "random_insertion", "random_swap", "random_deletion"]
ALL = [*WORD_TRANSFORMS, "keyboard_typo", "ocr_noise"]


def augment(name: str, text: str = TEXT, *, row: object = 0, seed: int = 1, **settings) -> str:
    return build_augmenter({"text": {name: settings}}, seed=seed)(text, row_id=row)


def counts_of(name: str, text: str, **settings) -> Counter:
    augmenter = build_augmenter({"text": {name: settings}})
    augmenter(text)
    return augmenter.counts


def word_list(text: str) -> list[str]:
    words = Words.of(text)
    return words.parts[1::2]


def changed_places(before: str, after: str) -> list[tuple[str, str]]:
    old, new = word_list(before), word_list(after)
    assert len(old) == len(new)
    return [pair for pair in zip(old, new) if pair[0] != pair[1]]


@pytest.mark.parametrize("name", ALL)
class TestEveryWordTransform:
    def test_probability(self, name):
        assert all(augment(name, row=row, prob=0.0, n=3) == TEXT for row in range(30))
        assert all(augment(name, row=row, n=3) != TEXT for row in range(30))
        share = sum(augment(name, row=row, prob=0.3, n=3) != TEXT for row in range(300)) / 300
        assert 0.2 < share < 0.4

    def test_zero_words(self, name):
        assert augment(name, n=0) == TEXT

    def test_the_same_row_gives_the_same_text(self, name):
        assert augment(name, row="a:7", n=2) == augment(name, row="a:7", n=2)
        assert len({augment(name, row=row, n=2) for row in range(20)}) > 10
        assert len({augment(name, seed=seed, n=2) for seed in range(20)}) > 10

    def test_protected_spans_stay(self, name):
        kept = kept_texts(TEXT, ("code", "url", "placeholder", "special"))
        for row in range(40):
            after = augment(name, row=row, n=6)
            assert kept_texts(after, ("code", "url", "placeholder", "special")) == kept, after
            assert " 42," in after

    def test_nothing_to_do(self, name):
        for text in ("", " ", "\n\n", "...", "42", "`code only`", "https://a.b/c"):
            assert augment(name, text, n=3) == text

    def test_odd_unicode_survives(self, name):
        for text in ("\x00 a\u0301b \ud800 c", "🙂 🙃 fine words 🙂", "ﬁne ‏العربية‏ words", "a\r\nb\r\n"):
            for row in range(5):
                after = augment(name, text, row=row, n=2)
                assert after == augment(name, text, row=row, n=2)
                assert after.count("\r\n") == text.count("\r\n") and after.count("\0") == text.count("\0")

    def test_a_very_long_text(self, name):
        text = TEXT * 400
        after = augment(name, text, n=5)
        assert after != text and abs(len(after) - len(text)) < 200


def test_synonyms_replace_exactly_n_words_by_synonyms():
    table = shipped_table()
    for row in range(40):
        pairs = changed_places(TEXT, augment("synonym_replacement", row=row, n=3))
        pairs = [pair for pair in pairs if pair[0] not in ("a", "an")]
        assert len(pairs) == 3
        for old, new in pairs:
            assert new in table.of(old)


def test_share_of_the_words():
    text = "They build a big house and buy a quick car. " * 10
    augmenter = build_augmenter({"text": {"synonym_replacement": {"n": 1, "share": 0.2}}})
    assert len([p for p in changed_places(text, augmenter(text)) if p[0] not in ("a", "an")]) == 20  # of 100 words


def test_synonyms_keep_form_and_casing():
    assert {augment("synonym_replacement", "I see the CARS", row=r) for r in range(40)} == {
        "I see the AUTOMOBILES", "I see the MACHINES", "I see the MOTORCARS",  # `autos`: its plural isn't regular
    }  # fmt: skip


def test_names_and_small_words_are_not_replaced():
    text = "We met Bill Gates and Miss Walker at the Bank of England, and they would do so again."
    assert {
        augment("synonym_replacement", text, row=r, n=9).count("Bill Gates and Miss Walker") for r in range(20)
    } == {1}
    assert (
        augment("synonym_replacement", "We could have been there with them.", n=5)
        == "We could have been there with them."
    )


def test_articles_agree():
    results = {augment("synonym_replacement", "It is a car.", row=r) for r in range(40)}
    assert results == {"It is an auto.", "It is an automobile.", "It is a machine.", "It is a motorcar."}
    assert [word for word in ("hour", "apple", "university", "uninteresting", "user", "umbrella", "one", "onerous",
                              "European", "honest", "house") if has_vowel_sound(word)] == [
        "hour", "apple", "uninteresting", "umbrella", "onerous", "honest",
    ]  # fmt: skip


def test_multiword_synonyms_only_when_asked():
    found = {augment("synonym_replacement", "the dog", row=r, n=1, senses=1) for r in range(10)}
    assert found == {"the dog"}
    assert augment("synonym_replacement", "the dog", senses=1, multiword=True) == "the domestic dog"


def test_a_table_of_ones_own(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"chat": ["matou"], "maison": ["demeure"]}), encoding="utf-8")
    text = "Le Chat est dans la maison."
    assert augment("synonym_replacement", "Le chat est dans la maison.", n=2, table=str(path)) == (
        "Le matou est dans la demeure."
    )
    assert augment("synonym_replacement", text, n=2, table=str(path), language="fr").endswith("demeure.")
    assert counts_of("synonym_replacement", text, table=str(path), language="de") == {
        "synonym_replacement.unsupported_language": 1
    }


@pytest.mark.parametrize("content", ["{", "[]", '{"a": "b"}', '{"a": [1]}', '{"a": ["x,y"]}', None])
def test_a_bad_table_is_named(tmp_path, content):
    path = tmp_path / "t.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError) as caught:
        augment("synonym_replacement", table=str(path))
    assert caught.value.where == str(path)


def test_insertion_adds_exactly_n_words_and_takes_none():
    for row in range(40):
        after = augment("random_insertion", row=row, n=3)
        opcodes = SequenceMatcher(None, word_list(TEXT), word_list(after), autojunk=False).get_opcodes()
        assert {tag for tag, *_ in opcodes} <= {"equal", "insert"}
        assert len(word_list(after)) == len(word_list(TEXT)) + 3


@pytest.mark.parametrize("name", ["synonym_replacement", "random_insertion"])
@pytest.mark.parametrize(
    "text", ["Le chat mange la souris dans le jardin.", "我喜欢猫。", "Это мой дом.", "Der Hund ist groß."]
)
def test_english_tables_leave_other_languages_alone(name, text):
    assert augment(name, text, n=5) == text
    assert counts_of(name, text) == {f"{name}.unsupported_language": 1}


def test_swap_keeps_words_and_the_places_of_gaps():
    for row in range(60):
        after = augment("random_swap", row=row)
        assert Counter(w.lower() for w in word_list(after)) == Counter(w.lower() for w in word_list(TEXT))
        assert Words.of(after).parts[0::2] == Words.of(TEXT).parts[0::2]
        assert len(changed_places(TEXT, after)) == 2
        assert after[0].isupper()


def test_two_swaps_never_undo_each_other():
    assert all(augment("random_swap", "one two three", row=row, n=2) != "one two three" for row in range(60))
    assert {augment("random_swap", "one two", row=row, n=4) for row in range(20)} == {"two one"}


def test_swap_passes_the_capital_on():
    results = {augment("random_swap", "The cat sleeps", row=r) for r in range(60)}
    assert results == {"Cat the sleeps", "Sleeps cat the", "The sleeps cat"}
    assert {augment("random_swap", "Le chat dort ici", row=r, distance=1) for r in range(60)} == {
        "Chat Le dort ici", "Le dort chat ici", "Le chat ici dort",
    }  # fmt: skip
    assert {augment("random_swap", "Then I slept", row=r, distance=1) for r in range(30)} == {
        "I then slept",
        "Then slept I",
    }


def test_swap_reaches_every_pair_equally_often():
    words = "one two three four five"
    pairs = Counter(augment("random_swap", words, row=r) for r in range(3000))
    assert len(pairs) == 10
    assert all(230 < count < 370 for count in pairs.values())  # 300 expected, 4 standard deviations


def test_swap_at_a_distance():
    words = [f"w{chr(97 + i)}" for i in range(20)]
    for row in range(50):
        after = augment("random_swap", " ".join(words), row=row, distance=2).split()
        moved = [i for i in range(20) if after[i] != words[i]]
        assert len(moved) == 2 and moved[1] - moved[0] <= 2


def test_swap_of_characters_where_there_are_no_spaces():
    text = "我喜欢吃苹果，你呢？"
    for row in range(20):
        after = augment("random_swap", text, row=row)
        assert sorted(after) == sorted(text) and after != text
        assert after[6] == "，" and after[-1] == "？"


def test_deletion_takes_exactly_n_words():
    for row in range(60):
        after = augment("random_deletion", row=row, n=4)
        old = Counter(w.lower() for w in word_list(TEXT))
        new = Counter(w.lower() for w in word_list(after))
        assert not new - old
        assert sum((old - new).values()) == 4
        for bad in ("  ", " ,", " .", "()", ",,", '""', "( ", " )"):
            assert bad not in after, after
        assert after[0].isupper()


def test_deletion_passes_the_capital_on_and_never_empties():
    assert {augment("random_deletion", "the cat", row=r, n=9) for r in range(9)} <= {"the", "cat"}
    assert {augment("random_deletion", "Yes, it works. Go. See\nit", row=r) for r in range(60)} == {
        "Yes, works. Go. See\nit", "Yes, it. Go. See\nit",
    }  # fmt: skip
    assert {augment("random_deletion", "one two three", row=r, n=2) for r in range(40)} == {"one", "two", "three"}
    assert {augment("random_deletion", "The old cat sleeps.", row=r) for r in range(40)} == {
        "Old cat sleeps.", "The cat sleeps.", "The old sleeps.", "The old cat.",
    }  # fmt: skip
    assert augment("random_deletion", "word", n=3) == "word"
    assert counts_of("random_deletion", "word") == {"random_deletion.too_short": 1}


def test_deletion_of_characters_where_there_are_no_spaces():
    text = "我喜欢吃苹果，你呢？"
    for row in range(20):
        after = augment("random_deletion", text, row=row, n=2)
        assert len(after) == len(text) - 2 and after[-1] == "？" and after.count("，") == 1


@pytest.mark.parametrize("layout", ["qwerty", "qwertz", "azerty"])
def test_neighbouring_keys_are_neighbours(layout):
    near = neighbours(layout)
    assert len(near) == 26
    assert all(c in near[d] for c in near for d in near[c])
    assert set(neighbours("qwerty")["g"]) == set("ftyhvb")
    assert set(neighbours("qwertz")["h"]) == set("gzujbn")


@pytest.mark.parametrize("error", ["neighbour", "omission", "doubling", "transposition"])
def test_typing_errors(error):
    for row in range(40):
        pairs = changed_places(TEXT, augment("keyboard_typo", row=row, n=2, kinds_of_error=[error]))
        assert len(pairs) == 2
        for old, new in pairs:
            assert len(old) >= 4 and new[0] == old[0]
            if error == "neighbour":
                ((a, b),) = [(a, b) for a, b in zip(old, new, strict=True) if a != b]
                assert b in neighbours("qwerty")[a.lower()]
            elif error == "transposition":
                assert sorted(old) == sorted(new)
            else:
                longer, shorter = (old, new) if error == "omission" else (new, old)
                assert any(longer[:i] + longer[i + 1 :] == shorter for i in range(1, len(longer)))


def test_misread_words():
    for row in range(40):
        pairs = changed_places(TEXT, augment("ocr_noise", row=row, n=3))
        assert len(pairs) == 3
        assert all(abs(len(old) - len(new)) <= 1 for old, new in pairs)


@pytest.mark.parametrize("name", ["keyboard_typo", "ocr_noise"])
def test_noise_is_for_latin_letters(name):
    assert augment(name, "Les maisons étaient grandes", n=1) != "Les maisons étaient grandes"
    assert counts_of(name, "Это большой дом") == {f"{name}.unsupported_language": 1}


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("synonym_replacement", {"n": -1}, "at least 0"),
        ("synonym_replacement", {"share": 2}, "between 0 and 1"),
        ("synonym_replacement", {"senses": 0}, "at least 1"),
        ("synonym_replacement", {"language": "de"}, "table of your own"),
        ("random_swap", {"distance": -1}, "at least 0"),
        ("keyboard_typo", {"layout": "dvorak"}, "not allowed"),
        ("keyboard_typo", {"kinds_of_error": ["slip"]}, "must list some of"),
        ("keyboard_typo", {"kinds_of_error": []}, "must list some of"),
        ("keyboard_typo", {"min_length": 1}, "at least 2"),
    ],
)
def test_settings_that_cannot_be_meant(name, settings, says):
    with pytest.raises(UsageError, match=says):
        build_augmenter({"text": {name: settings}})
