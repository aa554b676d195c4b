"""Near-duplicate removal: recall and false positives at known similarities, and nothing that depends on the way."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
from dedup_runs import Runner, run_texts

from swift.core.errors import UsageError
from swift.data.dedup import components, minhash
from swift.data.dedup.minhash import EMPTY, set_apart, signatures
from swift.data.engine.document import Document, document_from
from swift.data.operators.near_dedup import NearDedup

WORDS = [f"{a}{b}" for a in "bdfgklmnprst" for b in ("an", "el", "in", "or", "usk", "at", "ive", "ous", "ing", "er")]
HAN = [chr(0x4E00 + 7 * n) for n in range(2000)]


def english(rng: random.Random, words: int) -> list[str]:
    return [rng.choice(WORDS) for _ in range(words)]


def chinese(rng: random.Random, characters: int) -> list[str]:
    return [rng.choice(HAN) for _ in range(characters)]


def edited(pieces: list[str], share: float, rng: random.Random, new) -> list[str]:
    return [new() if rng.random() < share else piece for piece in pieces]


def jaccard(left: str, right: str) -> float:
    """True similarity of the sets of 5-grams, in plain Python."""
    sets = []
    for text in (left, right):
        units = re.findall(r"[\u4e00-\u9fff]|[a-z]+", text.lower())
        sets.append({tuple(units[n : n + 5]) for n in range(max(1, len(units) - 4))})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def planted(count: int, language: str) -> tuple[list[str], list[str], list[float]]:
    """Texts, a copy of each with edits, and their similarities."""
    rng = random.Random(f"{language}{count}")
    make, glue = {"english": (english, " "), "chinese": (chinese, "")}[language]
    texts, copies, truths = [], [], []
    for _ in range(count):
        pieces = make(rng, rng.randrange(80, 400))
        share = rng.choice([0.0, 0.002, 0.005, 0.01, 0.1, 0.15, 0.2, 0.3])
        changed = edited(pieces, share, rng, lambda: make(rng, 1)[0])
        texts.append(glue.join(pieces))
        copies.append(glue.join(changed).replace(" ", ", ", 3).title())
        truths.append(jaccard(texts[-1], copies[-1]))
    return texts, copies, truths


@pytest.mark.parametrize("language", ["english", "chinese"])
def test_recall_and_false_positives(tmp_path, language):
    texts, copies, truths = planted(900, language)
    (kept, left), tally = run_texts(NearDedup(), [texts, copies], tmp_path, batch=300)
    assert kept == texts  # nothing is like a text but its copy
    gone = np.array([copy not in set(left) for copy in copies])
    truth = np.array(truths)
    assert (truth >= 0.9).sum() > 250
    assert (truth < 0.5).sum() > 250
    assert gone[truth >= 0.9].mean() >= 0.995
    assert gone[truth < 0.5].mean() < 0.02
    assert tally.dropped == {"near_duplicate": int(gone.sum())}


def test_the_ledger_names_the_twin(tmp_path):
    rng = random.Random(0)
    texts = [" ".join(english(rng, 100)) for _ in range(3)]
    _, tally = run_texts(NearDedup(), [[*texts], ["other words entirely", texts[1] + " more"]], tmp_path)
    assert [(s["id"], s["note"]) for s in tally.samples["near_duplicate"]] == [("f1:2", "like f0:2")]


def chained() -> list[list[str]]:
    """Clusters of several sizes, over shards of several sizes, one of them empty."""
    rng = random.Random(4)
    texts = []
    for number in range(60):
        pieces = english(rng, 150)
        for copy in range(number % 6):
            texts.append(" ".join(edited(pieces, 0.004 * copy, rng, lambda: rng.choice(WORDS))))
        texts.append(" ".join(english(rng, 50)))
    texts += ["", "…", "same short", "same short"]
    rng.shuffle(texts)
    return [texts[:40], [], texts[40:130], texts[130:]]


@pytest.mark.parametrize("keep", ["first", "longest"])
@pytest.mark.parametrize("verify", [0, None])
def test_little_memory_gives_the_same(tmp_path, keep, verify):
    shards = chained()
    operator = NearDedup(keep=keep, verify=verify)
    found = [run_texts(operator, shards, tmp_path / str(m), memory=m) for m in (64 << 20, 20_000)]
    assert found[0] == found[1]
    assert 0 < found[0][1].dropped["near_duplicate"] < 150
    large, small = (
        json.loads((tmp_path / str(m) / "clusters/0/clusters.json").read_text()) for m in (64 << 20, 20_000)
    )
    assert large["passes"] == 0
    assert small["passes"] > 0  # the clusters really were found on disk
    assert large["dropped"] == small["dropped"] == found[0][1].dropped["near_duplicate"]
    assert len(np.load(tmp_path / "20000/signatures/0/bands/runs.npy")) > 1


@pytest.mark.parametrize("partitions", [1, 7])
def test_result_and_ledger_depend_on_no_way_of_working(tmp_path, partitions, monkeypatch):
    shards = chained()
    wanted = run_texts(NearDedup(), shards, tmp_path / "a")
    found = run_texts(NearDedup(partitions=partitions), shards, tmp_path / "b", batch=1000, backwards=True)
    assert found == wanted
    for module in (minhash, components):
        monkeypatch.setattr(module, "has_numba", lambda: False)
    assert run_texts(NearDedup(partitions=partitions), shards, tmp_path / "c", batch=3) == wanted


def test_one_giant_group_in_parts(tmp_path):
    """Eighty copies share every band: a group that doesn't fit is compared part by part, with the same result."""
    rng = random.Random(1)
    base = english(rng, 60)
    texts = [" ".join([*base, *english(rng, n % 3)]) for n in range(80)]
    found = [run_texts(NearDedup(), [texts[:50], texts[50:]], tmp_path / str(m), memory=m) for m in (64 << 20, 8000)]
    assert found[0] == found[1]
    assert [len(shard) for shard in found[0][0]] == [1, 0]


def test_the_longest_stays_and_of_equals_the_first(tmp_path):
    rng = random.Random(2)
    base = " ".join(english(rng, 200))
    shards = [[base, base + " and", "x y z"], [base + " end", base]]
    assert run_texts(NearDedup(keep="longest"), shards, tmp_path)[0] == [[base + " and", "x y z"], []]


def test_verifying_cuts_pairs_that_only_share_a_band(tmp_path):
    texts, copies, truths = planted(900, "english")
    operator = {"verify": 0.0, "bands": 60, "rows": 2}
    (_, left), _ = run_texts(NearDedup(**operator), [texts, copies], tmp_path / "a", batch=300)
    (_, checked), _ = run_texts(NearDedup(**{**operator, "verify": 0.7}), [texts, copies], tmp_path / "b", batch=300)
    low = [copy for copy, truth in zip(copies, truths) if truth < 0.5]
    assert len(set(low) - set(left)) > 0.5 * len(low)
    assert len(set(low) - set(checked)) < 0.01 * len(low)
    high = [copy for copy, truth in zip(copies, truths) if truth >= 0.9]
    assert not set(high) & set(checked)


def test_a_threshold_chooses_bands():
    assert NearDedup().shape() == (14, 8)
    assert NearDedup(threshold=0.5).shape() == minhash.choose_bands(0.5)
    assert NearDedup(threshold=0.5).least_similarity() == pytest.approx(0.4, abs=0.03)
    assert NearDedup(verify=0.9).least_similarity() == 0.9
    assert NearDedup().least_similarity() == pytest.approx(0.8 * (1 / 14) ** (1 / 8))


@pytest.mark.parametrize(
    "settings, told",
    [
        ({"ngram": 0}, "ngram is 0"),
        ({"bands": 100}, "100 bands of 8 rows are 800 hashes"),
        ({"threshold": 1.0}, "threshold is 1.0"),
        ({"verify": 1.5}, "verify is 1.5"),
        ({"partitions": -1}, "partitions is -1"),
    ],
)
def test_settings_that_cannot_be_meant(settings, told):
    with pytest.raises(UsageError, match=told):
        NearDedup(**settings).check()


def conversation(number: int, **last: object) -> Document:
    said = "what will the weather be like in the large city by the river tomorrow at noon, and the day after that?"
    messages = [{"role": "user", "content": said}, {"role": "assistant", "content": "", **last}]
    return document_from({"messages": messages}, f"s:{number}")


@pytest.mark.parametrize(
    "different",
    [
        lambda n: {"tool_calls": [{"function": {"name": "weather", "arguments": {"days": n}}}]},
        lambda n: {"content": [{"type": "text", "text": "see"}, {"type": "image", "image": f"{n}.png"}]},
    ],
)
def test_conversations_with_other_calls_or_pictures_are_not_near_duplicates(tmp_path, different):
    documents = [conversation(number, **different(number // 2)) for number in range(6)]
    kept = Runner([documents[:3], documents[3:]], tmp_path).run(NearDedup())
    assert [document.id for shard in kept for document in shard] == ["s:0", "s:2", "s:4"]


def test_setting_apart_keeps_agreement_and_nothing_stays_nothing():
    found = signatures(["one two three four five six", "one two three four five seven", ""], 2, 64)
    apart = [set_apart(row, 7) for row in found]
    assert ((apart[0] == apart[1]) == (found[0] == found[1])).all()
    assert not (set_apart(found[0], 8) == apart[0]).any()
    assert (apart[2] == EMPTY).all()
