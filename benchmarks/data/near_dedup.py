"""Near-duplicate search on a corpus with planted edits of known similarity: speed, recall and false positives.

    python benchmarks/data/near_dedup.py make  DIR [--megabytes 60]       corpus.jsonl and pairs.json
    python benchmarks/data/near_dedup.py ours  DIR [--numpy] [--memory 300]
    python benchmarks/data/near_dedup.py datasketch|rensa|datatrove|data-juicer DIR      each if it is installed

The corpus is made of the text files of the installed packages (so it is the same for the same packages) and of made-up
Chinese. Each planted pair is a document and an edited copy; its true Jaccard similarity is that of the sets of 5-grams
of words (of code points in Chinese), counted in plain Python here. Speeds are megabytes of text for each second of
processor time of the process with its children, reading included; the search is one process in every case.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import shutil
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

NGRAM = 5
SUFFIXES = {".py", ".md", ".rst", ".txt", ".pyi"}
BINS = ((0.9, 1.01), (0.8, 0.9), (0.6, 0.8), (0.5, 0.6), (0.0, 0.5))
WORD = re.compile(r"[^\W_]+")


def units(text: str, chinese: bool) -> list[str]:
    """What n-grams are made of."""
    return [c for c in text if "\u4e00" <= c <= "\u9fff"] if chinese else WORD.findall(text.lower())


def shingles(text: str, chinese: bool = False) -> set[tuple[str, ...]]:
    found = units(text, chinese)
    return {tuple(found[i : i + NGRAM]) for i in range(max(1, len(found) - NGRAM + 1))}


def package_texts(megabytes: int) -> Iterator[str]:
    """Pieces of 1 to 8 kB of the files of the installed packages, in the order of their paths."""
    root = Path(sysconfig.get_paths()["purelib"])
    left = megabytes * 1_000_000
    paths = sorted(p for p in root.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    random.Random(0).shuffle(paths)
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        for start in range(0, len(text), 8000):
            piece = text[start : start + 8000]
            if len(piece) < 1000 or "\0" in piece:
                continue
            left -= len(piece.encode())
            if left < 0:
                return
            yield piece


def chinese_texts(count: int, rng: random.Random) -> list[str]:
    """Made-up sentences over 3000 characters of falling frequency."""
    letters = [chr(0x4E00 + i * 6) for i in range(3000)]
    weights = [1 / (i + 10) for i in range(3000)]
    made = []
    for _ in range(count):
        drawn = rng.choices(letters, weights, k=rng.randrange(300, 1500))
        for at in range(17, len(drawn), 18):
            drawn[at] = rng.choice("，。")
        made.append("".join(drawn))
    return made


def edited(text: str, share: float, rng: random.Random, chinese: bool) -> str:
    """A copy in which about this share of words (or characters) is replaced, deleted or doubled."""
    pieces = list(text) if chinese else re.split(r"(\W+)", text)
    step = 1 if chinese else 2
    for at in range(0, len(pieces), step):
        if rng.random() < share:
            choice = rng.random()
            new = chr(0x4E00 + rng.randrange(18000)) if chinese else f"w{rng.randrange(10**6)}"
            pieces[at] = new if choice < 0.6 else "" if choice < 0.8 else pieces[at] + ("" if chinese else " ") + new
    return "".join(pieces)


def make(folder: Path, megabytes: int) -> None:
    rng = random.Random(1)
    texts = list(dict.fromkeys(package_texts(megabytes)))
    chinese = chinese_texts(len(texts) // 20, rng)
    seen: Counter[int] = Counter()
    for text in texts:
        seen.update({hash(s) for s in shingles(text)})
    rows = [(text, False) for text in texts] + [(text, True) for text in chinese]
    rng.shuffle(rows)
    copies: list[tuple[str, int, float, bool]] = []
    for index, (text, is_chinese) in enumerate(rows):
        if rng.random() > 0.25:
            continue
        own = shingles(text, is_chinese)
        if not is_chinese and sum(seen[hash(s)] == 1 for s in own) < 0.7 * len(own):
            continue  # it has natural near-duplicates, which would be found instead
        copy = edited(text, rng.choice([0.002, 0.005, 0.01, 0.02, 0.04, 0.07, 0.1, 0.15, 0.2, 0.3]), rng, is_chinese)
        other = shingles(copy, is_chinese)
        copies.append((copy, index, len(own & other) / len(own | other), is_chinese))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "corpus.jsonl").open("w", encoding="utf-8") as file:
        for text in [row[0] for row in rows] + [copy[0] for copy in copies]:
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    pairs = [[index, len(rows) + n, j, is_chinese] for n, (_, index, j, is_chinese) in enumerate(copies)]
    (folder / "pairs.json").write_text(json.dumps(pairs))
    size = (folder / "corpus.jsonl").stat().st_size
    print(f"{len(rows) + len(copies)} documents, {size / 1e6:.1f} MB, {len(pairs)} pairs, {len(chinese)} in Chinese")


def read(folder: Path) -> list[str]:
    import orjson

    with (folder / "corpus.jsonl").open("rb") as file:
        return [orjson.loads(line)["text"] for line in file]


# --- the searches: each gives the rows that would be dropped, or the pairs that count as one -------------------------


def ours(folder: Path, options: argparse.Namespace) -> set[int]:
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests/data/operators"))
    from dedup_runs import Runner

    from swift.data.dedup import components, minhash
    from swift.data.engine.document import Document
    from swift.data.operators.near_dedup import NearDedup

    if options.numpy:
        minhash.has_numba = components.has_numba = lambda: False
    minhash.signatures(["warm up"], NGRAM, 112)  # compiling, or loading what was compiled, isn't searching
    started = cpu_s()
    texts = read(folder)
    read_s = cpu_s() - started
    documents = [Document(str(row), {}, [("text",)], [text]) for row, text in enumerate(texts)]
    scratch = folder / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    shards = [documents[n * len(documents) // 4 : (n + 1) * len(documents) // 4] for n in range(4)]
    runner = Runner(shards, scratch, memory=options.memory << 20, batch=1000)
    kept = runner.run(NearDedup(verify=options.verify, threshold=options.threshold))
    report(folder, len(texts), cpu_s() - started)
    print(f"reading took {read_s:.2f} s of it")
    scratch_bytes = sum(path.stat().st_size for path in scratch.rglob("*") if path.is_file())
    print(f"scratch: {scratch_bytes / len(texts):.0f} bytes a document")
    return set(range(len(texts))) - {int(document.id) for shard in kept for document in shard}


def datasketch(folder: Path, options: argparse.Namespace) -> set[int]:
    from datasketch import MinHash, MinHashLSH

    started = cpu_s()
    texts = read(folder)
    lsh = MinHashLSH(num_perm=112, params=(14, 8))
    sets = [[" ".join(s).encode() for s in shingles(text)] for text in texts]
    dropped = set()
    for row, found in enumerate(MinHash.generator(sets, num_perm=112)):
        if lsh.query(found):
            dropped.add(row)
        lsh.insert(row, found)
    report(folder, len(texts), cpu_s() - started)
    return dropped


def rensa(folder: Path, options: argparse.Namespace) -> set[int]:
    from rensa import RMinHash, RMinHashLSH

    started = cpu_s()
    texts = read(folder)
    lsh = RMinHashLSH(threshold=0.7, num_perm=112, num_bands=14)
    dropped = set()
    for row, text in enumerate(texts):
        found = RMinHash(num_perm=112, seed=1)
        found.update([" ".join(s) for s in shingles(text)])
        if lsh.query(found):
            dropped.add(row)
        lsh.insert(row, found)
    report(folder, len(texts), cpu_s() - started)
    return dropped


def datatrove(folder: Path, options: argparse.Namespace) -> set[int]:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import (
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers.jsonl import JsonlWriter

    out = folder / "datatrove"
    shutil.rmtree(out, ignore_errors=True)
    config = MinhashConfig(n_grams=NGRAM, num_buckets=14, hashes_per_bucket=8)
    started = cpu_s()
    reader = JsonlReader(str(folder), glob_pattern="corpus.jsonl")
    stages = [
        [reader, MinhashDedupSignature(str(out / "signatures"), config=config)],
        [MinhashDedupBuckets(str(out / "signatures"), str(out / "buckets"), config=config)],
        [MinhashDedupCluster(str(out / "buckets"), str(out / "remove"), config=config)],
        [
            reader,
            MinhashDedupFilter(str(out / "remove"), exclusion_writer=JsonlWriter(str(out / "gone"), compression=None)),
        ],
    ]
    for number, (stage, tasks) in enumerate(zip(stages, (1, 14, 1, 1))):
        LocalPipelineExecutor(stage, tasks=tasks, workers=1, logging_dir=str(out / f"log{number}")).run()
    texts = read(folder)
    report(folder, len(texts), cpu_s() - started)
    gone = Counter(json.loads(line)["text"] for path in (out / "gone").glob("*") for line in path.open())
    return {row for row, text in enumerate(texts) if text in gone}


def data_juicer(folder: Path, options: argparse.Namespace) -> set[int]:
    from data_juicer.ops.deduplicator.document_minhash_deduplicator import DocumentMinhashDeduplicator
    from datasets import load_dataset

    started = cpu_s()
    rows = load_dataset("json", data_files=str(folder / "corpus.jsonl"), split="train", cache_dir=str(folder / "hf"))
    rows = rows.add_column("row", list(range(len(rows))))
    operator = DocumentMinhashDeduplicator(
        tokenization="space", window_size=NGRAM, num_permutations=112, num_bands=14, num_rows_per_band=8, lowercase=True
    )
    hashed = rows.map(operator.compute_hash, num_proc=1)
    kept, _ = operator.process(hashed)
    left = set(kept["row"])
    report(folder, len(rows), cpu_s() - started)
    return set(range(len(rows))) - left


SEARCHES: dict[str, Callable[[Path, argparse.Namespace], set[int]]] = {
    "ours": ours,
    "datasketch": datasketch,
    "rensa": rensa,
    "datatrove": datatrove,
    "data-juicer": data_juicer,
}


def cpu_s() -> float:
    """Processor time of this process and its finished children, seconds."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def report(folder: Path, documents: int, seconds: float) -> None:
    size = sum(len(text.encode()) for text in read(folder)) / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{documents} documents, {size:.1f} MB: {seconds:.2f} CPU-s, {size / seconds:.1f} MB/CPU-s, peak {peak:.0f} MiB"
    )


def judge(folder: Path, dropped: set[int]) -> None:
    """Share of planted pairs, by true similarity, of which one was dropped."""
    pairs = json.loads((folder / "pairs.json").read_text())
    for name, chinese in (("packages", False), ("Chinese", True)):
        for low, high in BINS:
            inside = [(a, b) for a, b, j, is_chinese in pairs if low <= j < high and is_chinese == chinese]
            hits = sum(a in dropped or b in dropped for a, b in inside)
            if inside:
                share = hits / len(inside)
                print(f"  {name}, J {low:.1f} to {min(high, 1.0):.1f}: {hits} of {len(inside)} found, {share:.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", *SEARCHES])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megabytes", type=int, default=60)
    parser.add_argument("--memory", type=int, default=300, help="MiB for a task")
    parser.add_argument("--verify", type=float)
    parser.add_argument("--threshold", type=float)
    parser.add_argument("--numpy", action="store_true")
    options = parser.parse_args()
    if options.what == "make":
        make(options.folder, options.megabytes)
    else:
        judge(options.folder, SEARCHES[options.what](options.folder, options))


if __name__ == "__main__":
    main()
