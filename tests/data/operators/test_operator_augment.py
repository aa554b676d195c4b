"""The operator `augment`: copies, ids, places, counts, and the same result however a run is cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swift.core.errors import NetworkError, UsageError
from swift.data.augment import build_augmenter
from swift.data.engine.document import Document, document_from
from swift.data.engine.operator import Context
from swift.data.engine.run import RunOptions, run_recipe
from swift.data.engine.tally import Tally
from swift.data.operators.augment import Augment

SWAP = {"random_swap": {"n": 1}}
TEXT = "alpha beta gamma delta epsilon zeta"


def plain(number: int = 1, text: str = TEXT) -> Document:
    return document_from({"text": text, "n": number}, f"f.jsonl:{number}")


def chat() -> Document:
    messages = [
        {"role": "system", "content": "one two three four"},
        {"role": "user", "content": "five six seven eight"},
        {"role": "assistant", "content": "nine ten eleven twelve"},
        {"role": "user", "content": "red green blue white"},
    ]
    return document_from({"messages": messages, "id": "x"}, "c.jsonl:1")


def run(documents: list[Document], label: str = "augment", seed: int = 42, **settings) -> tuple[list[Document], Tally]:
    operator = Augment(**settings)
    operator.check()
    operator.open(Context(seed=seed, label=label))
    tally = Tally()
    return operator.run(documents, tally), tally


def test_copies_are_added_with_their_own_ids():
    kept, tally = run([plain(1), plain(2)], text=SWAP, copies=2)
    assert [d.id for d in kept] == [f"f.jsonl:{n}{end}" for n in (1, 2) for end in ("", "#aug1", "#aug2")]
    original, first, second = kept[:3]
    assert original.texts == [TEXT] and original.meta == {}
    assert len({TEXT, first.text, second.text}) == 3
    assert first.meta == {"augmented": {"from": "f.jsonl:1", "copy": 1, "by": ["random_swap"]}}
    assert first.to_record() == {"text": first.text, "n": 1, "meta": first.meta}
    assert tally.changes == {"random_swap": 4}
    assert tally.labels["augment"] == {"random_swap.changed": 4}
    assert tally.samples["random_swap"]


def test_a_text_is_what_the_python_call_gives():
    kept, _ = run([plain(7)], text=SWAP, seed=5, label="augment-2")
    by_hand = build_augmenter({"text": SWAP})(TEXT, seed=5, row_id="augment-2:f.jsonl:7#aug1/0")
    assert kept[1].text == by_hand


def test_seed_label_and_row_decide():
    texts = {
        run([plain(number)], text=SWAP, seed=seed, label=label)[0][1].text
        for number, seed, label in [(1, 1, "augment"), (2, 1, "augment"), (1, 2, "augment"), (1, 1, "augment-2")]
    }
    assert len(texts) > 1
    assert run([plain()], text=SWAP)[0][1].text == run([plain()], text=SWAP)[0][1].text


def test_in_place():
    kept, _ = run([plain(1), plain(2)], text=SWAP, keep_original=False)
    assert [d.id for d in kept] == ["f.jsonl:1", "f.jsonl:2"]
    assert all(d.text != TEXT and d.meta["augmented"]["copy"] == 1 for d in kept)
    more, _ = run([plain(1)], text=SWAP, keep_original=False, copies=2)
    assert [d.id for d in more] == ["f.jsonl:1", "f.jsonl:1#aug2"]
    assert more[0].text == kept[0].text != more[1].text != TEXT


def test_copies_like_the_original_are_not_added():
    kept, tally = run([plain()], text={"random_swap": {"prob": 0.0}}, copies=3)
    assert [d.id for d in kept] == ["f.jsonl:1"]
    assert tally.labels["augment"] == {"random_swap.not_drawn": 3, "same_copies_left_out": 3}
    kept, tally = run([plain(text="a b")], text=SWAP, copies=3)  # only one other order
    assert [d.text for d in kept] == ["a b", "b a"]
    assert tally.labels["augment"]["same_copies_left_out"] == 2
    kept, tally = run([plain()], text={"random_swap": {"prob": 0.0}}, keep_original=False)
    assert [(d.id, d.text, d.meta) for d in kept] == [("f.jsonl:1", TEXT, {})]
    assert tally.labels["augment"]["same_in_place"] == 1


def test_only_the_roles_asked_for():
    kept, _ = run([chat()], text=SWAP)
    before, after = chat(), kept[1]
    assert [a != b for a, b in zip(before.texts, after.texts)] == [False, True, False, True]
    assert kept[0].to_record() == before.to_record()
    record = after.to_record()
    assert [m["role"] for m in record["messages"]] == ["system", "user", "assistant", "user"]
    assert record["messages"][1]["content"] == after.texts[1] and record["id"] == "x"
    kept, _ = run([chat()], text=SWAP, roles=["system", "assistant"])
    assert [a != b for a, b in zip(before.texts, kept[1].texts)] == [True, False, True, False]


def test_the_language_found_by_another_operator_is_used():
    document = plain(text="I do not go.")
    document.meta["language"] = "fr"
    kept, tally = run([document], text={"contraction": {}})
    assert len(kept) == 1 and tally.labels["augment"]["contraction.unsupported_language"] == 1
    assert run([plain(text="I do not go.")], text={"contraction": {}})[0][1].text == "I don't go."


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"text": SWAP, "copies": 0}, "at least 1"),
        ({"text": SWAP, "roles": ["usr"]}, "no role 'usr'"),
        ({"text": SWAP, "roles": []}, "roles is empty"),
        ({}, "needs a mapping of transforms"),
        ({"text": {"random_swp": {}}}, "random_swp"),
    ],
)
def test_settings_that_cannot_be_meant(settings, says):
    with pytest.raises(UsageError, match=says):
        Augment(**settings).check()


def test_offline_reaches_the_transforms():
    operator = Augment(text={"paraphrase_llm": {"base_url": "http://127.0.0.1:9/v1", "model": "m"}})
    with pytest.raises(NetworkError):
        operator.open(Context(offline=True))


RECIPE = """\
input: [{rows}/*.jsonl]
output: {{path: {out}, format: jsonl}}
executor: {{num_proc: {num_proc}}}
shard_size: {shard}
seed: 3
steps:
  - augment:
      text:
        synonym_replacement: {{prob: 0.3, n: 2}}
        random_swap: {{prob: 1e-1}}
        keyboard_typo: {{prob: 0.5, kinds_of_error: [omission, doubling]}}
        contraction:
      copies: 2
      roles: [user]
"""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    folder = tmp_path / "rows"
    folder.mkdir()
    for file in range(3):
        lines = [
            {
                "messages": [
                    {"role": "user", "content": f"Do not show me the {size} house number {n} near the old river."},
                    {"role": "assistant", "content": f"I do not know the house {n}."},
                ]
            }
            for n, size in enumerate(["big", "small", "quick", "good", "important"] * 8)
        ]
        (folder / f"f{file}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def written(tmp_path: Path, rows: Path, name: str, num_proc: int, shard: str) -> list[dict]:
    recipe = tmp_path / f"{name}.yaml"
    recipe.write_text(RECIPE.format(rows=rows, out=tmp_path / name, num_proc=num_proc, shard=shard))
    run_recipe(recipe, options=RunOptions(quiet=True))
    return [
        json.loads(line) for path in sorted((tmp_path / name).glob("part-*")) for line in path.read_text().splitlines()
    ]


def test_a_recipe_gives_the_same_rows_however_it_is_run(tmp_path, rows):
    one = written(tmp_path, rows, "one", 1, "256MB")
    assert one == written(tmp_path, rows, "two", 2, "256MB") == written(tmp_path, rows, "cut", 1, "2KB")
    originals = [row for row in one if "meta" not in row]
    copies = [row for row in one if "meta" in row]
    assert len(originals) == 120 and 150 < len(copies) <= 240
    assert {row["messages"][1]["content"] for row in copies} <= {row["messages"][1]["content"] for row in originals}
    used = {name for row in copies for name in row["meta"]["augmented"]["by"]}
    assert used == {"synonym_replacement", "random_swap", "keyboard_typo", "contraction"}
