"""Exact deduplication against a dict of normalised texts, for every unit, memory, order and grouping."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from dedup_runs import Runner, documents_of, run_texts

from swift.core.errors import UsageError
from swift.data.dedup.units import cut, digest, without
from swift.data.engine.document import document_from
from swift.data.operators.exact_dedup import ExactDedup


def random_shards(unit: str) -> list[list[str]]:
    rng = random.Random(unit)
    words = ["a", "b", "A", "c.", "d"]
    between = {"document": [" ", "  "], "line": [" ", "\n", "\n"], "paragraph": [" ", "\n", "\n\n", "\n \n\n"]}[unit]

    def text() -> str:
        pieces = [rng.choice(words) + rng.choice(between) for _ in range(rng.randrange(7))]
        return "".join(pieces)[: rng.choice([-1, None])]

    return [[text() for _ in range(size)] for size in (70, 0, 40, 25)]


def by_dict(shards, unit, normalise) -> list[list[str]]:
    """The rule in plain Python."""
    seen = set()
    kept = []
    border = {"document": None, "line": r"(\n)", "paragraph": r"(\n[ ]*(?:\n[ ]*)+)"}[unit]
    for texts in shards:
        left = []
        for text in texts:
            pieces = re.split(border, text) if border else [text]
            out, removed = "", 0
            for number in range(0, len(pieces), 2):
                key = normalise(pieces[number])
                if key and key in seen:
                    removed += 1
                    continue
                seen.add(key)
                out += (pieces[number - 1] if out or number > 2 * removed else "") + pieces[number]
            if removed and (unit == "document" or not out.strip()):
                continue
            left.append(out)
        kept.append(left)
    return kept


NORMALISERS = {
    "as it is": ({"collapse_whitespace": False}, lambda text: text),
    "default": ({}, lambda text: " ".join(text.split())),
    "all": (
        {"lower": True, "strip_punctuation": True},
        lambda text: " ".join(text.lower().replace(".", "").split()),
    ),
}


@pytest.mark.parametrize("memory", [1, 2000, 64 << 20])
@pytest.mark.parametrize("rule", NORMALISERS)
@pytest.mark.parametrize("unit", ["document", "paragraph", "line"])
def test_what_stays_is_what_a_dict_keeps(tmp_path, unit, rule, memory):
    settings, normalise = NORMALISERS[rule]
    shards = random_shards(unit)
    wanted = by_dict(shards, unit, normalise)
    assert sum(map(len, wanted)) < sum(map(len, shards))
    operator = ExactDedup(unit=unit, min_characters=0, **settings)
    found, tally = run_texts(operator, shards, tmp_path, memory=memory, backwards=memory == 2000)
    assert found == wanted
    assert sum(tally.dropped.values()) == sum(map(len, shards)) - sum(map(len, wanted))
    runs = np.load(tmp_path / "hash" / "0" / "runs.npy")
    assert (len(runs) > 1) == (memory < 64 << 20)  # little memory really took the other path


@pytest.mark.parametrize("partitions", [1, 2, 9])
@pytest.mark.parametrize("batch", [1, 100])
def test_result_and_ledger_depend_on_no_way_of_working(tmp_path, partitions, batch):
    shards = random_shards("line")
    found = [
        run_texts(ExactDedup(unit="line", min_characters=0, partitions=n), shards, tmp_path / str(n), **options)
        for n, options in ((3, {}), (partitions, {"batch": batch, "backwards": True}))
    ]
    assert found[0] == found[1]


def test_the_ledger_names_the_twin(tmp_path):
    _, tally = run_texts(ExactDedup(), [["x", "one  text"], ["y", "one text"]], tmp_path)
    assert tally.dropped == {"duplicate": 1}
    assert [(s["id"], s["note"]) for s in tally.samples["duplicate"]] == [("f1:2", "same as f0:2")]
    _, tally = run_texts(
        ExactDedup(unit="line", min_characters=3), [["a long line\nx"], ["x\na long line\nz"]], tmp_path / "b"
    )
    assert tally.changes == {"repeated_line": 1}
    assert tally.samples["repeated_line"][0]["note"] == "same as f0:1; now: x\nz"


def test_short_lines_are_left_alone_by_default(tmp_path):
    code = "def f():\n    return\n}\nthis line is long enough to count\n"
    (first, second), tally = run_texts(ExactDedup(unit="line"), [[code], [code]], tmp_path)
    assert first == [code]
    assert second == ["def f():\n    return\n}\n"]
    assert tally.dropped == {}


def test_conversations_count_by_turns_and_are_never_cut(tmp_path):
    def chat(*turns):
        return {"messages": [{"role": role, "content": text} for role, text in turns]}

    records = [
        chat(("user", "a"), ("assistant", "b")),
        chat(("user", "a "), ("assistant", "b")),  # the same
        chat(("assistant", "a"), ("user", "b")),  # other roles
        chat(("user", "a b")),  # the same words in one turn
        {"text": "a b"},
    ]
    shards = [[document_from(record, f"f:{n}") for n, record in enumerate(records)]]
    kept = Runner(shards, tmp_path / "a").run(ExactDedup())
    assert [document.id for document in kept[0]] == ["f:0", "f:2", "f:3", "f:4"]
    runner = Runner([shards[0] * 2], tmp_path / "b")
    assert len(runner.run(ExactDedup(unit="line", min_characters=0))[0]) == 9  # only the second plain text is gone
    assert runner.tally.labels["exact_dedup"] == {"conversation left alone": 8}


def test_conversations_that_differ_only_beside_their_plain_contents_stay(tmp_path):
    def call(city):
        return {"tool_calls": [{"function": {"name": "weather", "arguments": {"city": city}}}]}

    def chat(question="q", said=None, **keys):
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "yes", **(said or {})}]
        return {"messages": turns, **keys}

    records = [
        chat(said=call("Paris")),
        chat(said=call("Rome")),
        chat(system="a pirate"),
        chat(system="a lawyer"),
        chat([{"type": "text", "text": "cats?"}]),
        chat([{"type": "text", "text": "dogs?"}]),
        {"query": "q", "response": "yes", "history": [["Ann?", "a queen"]]},
        {"query": "q", "response": "yes", "history": [["Bob?", "a baker"]]},
        chat(said=call("Rome"), id=8),  # the only one that is there twice
    ]
    shard = [document_from(record, f"f:{n}") for n, record in enumerate(records)]
    kept = Runner([shard], tmp_path).run(ExactDedup())
    assert [document.id for document in kept[0]] == [f"f:{n}" for n in range(8)]


def test_documents_of_nothing_are_no_duplicates(tmp_path):
    shards = [["", " ", "!", "…"]]
    assert run_texts(ExactDedup(strip_punctuation=True), shards, tmp_path)[0] == shards


def test_the_hash_is_the_same_everywhere():
    assert digest("ä") == (0xCB4D3892D2CB5E6B, 0x1BD63F7E4247A02E)  # b2sum -l 128


def test_cutting_and_joining():
    text = "a\n\nb\n \n\nc"
    assert cut(text, "paragraph") == ["a", "\n\n", "b", "\n \n\n", "c"]
    assert without(cut(text, "paragraph"), set()) == text
    assert without(cut(text, "paragraph"), {0}) == "b\n \n\nc"
    assert without(cut(text, "paragraph"), {1}) == "a\n \n\nc"
    assert without(cut(text, "paragraph"), {2}) == "a\n\nb"


def test_settings_that_cannot_be_meant():
    with pytest.raises(UsageError, match="min_characters is -1"):
        ExactDedup(min_characters=-1).check()
    with pytest.raises(UsageError, match="partitions is 0"):
        ExactDedup(partitions=0).check()


def test_documents_keep_their_place(tmp_path):
    kept = Runner([documents_of(["b", "a", "b", "c"])], tmp_path).run(ExactDedup())
    assert [document.id for document in kept[0]] == ["s:1", "s:2", "s:4"]
