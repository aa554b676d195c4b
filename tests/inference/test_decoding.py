"""Incremental decoding gives exactly the text of all tokens, in whole characters, and holds back stop words."""

from __future__ import annotations

import random

import pytest

from swift.inference.decoding import IncrementalDecoder, StopScanner, decode, find_stop

TEXTS = [
    "plain words, then more",
    "Größe, naïve, 漢字かな, 안녕하세요 – and 🤖👩‍👩‍👧🇩🇪",
    "  leading and   inner  spaces \n\n\ttabs ",
    "🤖",
    "",
]


def pieces_of(tokenizer, tokens):
    decoder = IncrementalDecoder(tokenizer)
    pieces = [decoder.push(token) for token in tokens]
    return pieces, decoder.flush()


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_to_the_text_and_are_whole_characters(tokenizer, text):
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    pieces, rest = pieces_of(tokenizer, tokens)
    assert "".join(pieces) == text
    assert rest == ""
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_character_spread_over_tokens_comes_out_once_and_whole(tokenizer):
    tokens = tokenizer("🤖", add_special_tokens=False).input_ids
    assert len(tokens) > 1, "the fixture tokenizer must need several tokens for this test to mean anything"
    pieces, _ = pieces_of(tokenizer, tokens)
    assert pieces == [""] * (len(tokens) - 1) + ["🤖"]


def test_any_tokens_at_all_add_up_to_their_text(tokenizer):
    draw = random.Random(0)
    special = tokenizer.all_special_ids
    for _ in range(200):
        tokens = [draw.choice(special) if draw.random() < 0.1 else draw.randrange(len(tokenizer)) for _ in range(30)]
        pieces, rest = pieces_of(tokenizer, tokens)
        assert "".join(pieces) + rest == decode(tokenizer, tokens)


def test_leading_spaces_survive_a_tokenizer_that_strips_them(tmp_path):
    """Decoders of the sentencepiece kind drop the space at the start of whatever they decode."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<unk>": 0, "<s>": 1, "▁one": 2, "▁two": 3, "▁three": 4}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>")
    pieces, rest = pieces_of(tokenizer, [2, 1, 3, 4])  # a special token in between shows no text
    assert pieces == ["one", "", " two", " three"]
    assert rest == ""
    assert decode(tokenizer, [2, 1, 3, 4]) == "one two three"


def test_an_unfinished_character_comes_out_at_the_end(tokenizer):
    tokens = tokenizer("ok🤖", add_special_tokens=False).input_ids[:-1]
    pieces, rest = pieces_of(tokenizer, tokens)
    assert "".join(pieces) == "ok"
    assert "\ufffd" in rest
    assert "".join(pieces) + rest == decode(tokenizer, tokens)


def scan(words, pieces):
    scanner = StopScanner(words)
    shown = "".join(scanner.push(piece) for piece in pieces)
    return shown, shown + scanner.flush(), scanner.stopped


@pytest.mark.parametrize("size", [1, 2, 3, 50])
@pytest.mark.parametrize(
    ("text", "words", "expected", "stopped"),
    [
        ("answer END more", ["END"], "answer ", True),
        ("answer EN and on", ["END"], "answer EN and on", False),
        ("a\n\nUser: b", ["\nUser:", "\n\n"], "a", True),
        ("aab", ["aab"], "", True),
        ("aaab", ["aab"], "a", True),
        ("ends in EN", ["END"], "ends in EN", False),
        ("no words", [], "no words", False),
    ],
)
def test_stop_words_are_cut_however_the_text_is_sliced(text, words, expected, stopped, size):
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    shown, everything, found = scan(words, pieces)
    assert everything == expected
    assert found is stopped
    assert expected.startswith(shown)


def test_a_possible_stop_word_is_held_back():
    scanner = StopScanner(["</tool>"])
    assert scanner.push("x </to") == "x "
    assert scanner.push("p>") == "</top>"


def test_find_stop_takes_the_first():
    assert find_stop("b then a", ["a", "b"]) == 0
    assert find_stop("none", ["x"]) is None
