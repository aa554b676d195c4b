"""Vectors, scores and classes over HTTP: the numbers of `swift infer`, and many requests in one forward pass."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from live_server import Live, check_schema, running

from swift.commands.infer import infer
from swift.config import InferConfig, build_config
from swift.config.serving import ServeConfig
from swift.inference.loading import prepare
from swift.serving.limits import Queue
from swift.serving.scores import ScoringQueue
from swift.serving.served import ServedModel

TEXTS = ["a river", "the sea and the stones", "music"]


def scoring(folder: Path, task: str) -> ScoringQueue:
    prepared = prepare(build_config(InferConfig, {"model": str(folder), "task_type": task, "device": "cpu"}))
    assert prepared.judge is not None
    return ScoringQueue(prepared.load_scorer(), prepared.judge.name, prepared.tokenizer, Queue(8, 100))


@pytest.fixture(scope="module")
def classifier_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    folder = tmp_path_factory.mktemp("classifier")
    labels = {"id2label": {0: "calm", 1: "loud"}, "label2id": {"calm": 0, "loud": 1}}
    config = AutoConfig.from_pretrained(tiny_model_dir, num_labels=2, **labels)
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def judges(tiny_model_dir: Path, classifier_dir: Path) -> Iterator[tuple[Live, dict[str, ScoringQueue]]]:
    folders = {"embedding": tiny_model_dir, "generative_reranker": tiny_model_dir, "seq_cls": classifier_dir}
    queues = {task: scoring(folder, task) for task, folder in folders.items()}
    models = [ServedModel(task, scorer=queue) for task, queue in queues.items()]
    with running(ServeConfig(port=0, access_log=False), models) as server:
        yield Live(server, None), queues


def test_vectors(judges: Any, tiny_model_dir: Path, tmp_path: Path, write_rows: Any) -> None:
    live, _ = judges
    answer = live.post("/v1/embeddings", {"model": "embedding", "input": TEXTS})
    check_schema("CreateEmbeddingResponse", answer.json())
    found = np.array([each["embedding"] for each in answer.json()["data"]])
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": [{"role": "user", "content": text}]} for text in TEXTS])
    lines = infer(
        model=str(tiny_model_dir), task_type="embedding", val_dataset=[str(rows)], device="cpu",
        result_path=str(tmp_path / "r.jsonl"),
    )  # fmt: skip
    assert np.allclose(found, [line["embedding"] for line in lines], atol=1e-6)
    assert answer.json()["usage"]["prompt_tokens"] > 0
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)
    decoded = client.embeddings.create(model="embedding", input=TEXTS)  # the client asks for base64
    assert np.allclose([each.embedding for each in decoded.data], found, atol=1e-6)
    raw = live.post("/v1/embeddings", {"model": "embedding", "input": TEXTS[0], "encoding_format": "base64"}).json()
    assert np.allclose(np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4"), found[0], atol=1e-6)
    short = client.embeddings.create(model="embedding", input=TEXTS[0], dimensions=8).data[0].embedding
    assert len(short) == 8 and np.linalg.norm(short) == pytest.approx(1, abs=1e-5)
    assert np.allclose(short, found[0][:8] / np.linalg.norm(found[0][:8]), atol=1e-6)
    scores = live.post("/v1/score", {"model": "embedding", "text_1": TEXTS[0], "text_2": TEXTS[1:]}).json()["data"]
    assert [each["score"] for each in scores] == pytest.approx((found[0] @ found[1:].T).tolist(), abs=1e-6)


def test_documents_are_ranked_and_scored_alike(judges: Any) -> None:
    live, _ = judges
    ask = {"model": "generative_reranker", "query": "water", "documents": [*TEXTS, {"text": "rain"}]}
    every = live.post("/v1/rerank", ask).json()["results"]
    scores = [each["relevance_score"] for each in every]
    assert scores == sorted(scores, reverse=True) and sorted(each["index"] for each in every) == [0, 1, 2, 3]
    assert all(each["document"]["text"] == [*TEXTS, "rain"][each["index"]] for each in every)
    best = live.post("/rerank", {**ask, "top_n": 1, "return_documents": False}).json()["results"]
    assert best == [{"index": every[0]["index"], "relevance_score": pytest.approx(scores[0], abs=1e-6)}]
    pairs = {"model": "generative_reranker", "text_1": "water", "text_2": TEXTS}
    scored = live.post("/score", pairs).json()["data"]
    by_index = {each["index"]: each["relevance_score"] for each in every}
    assert [each["score"] for each in scored] == pytest.approx([by_index[index] for index in range(3)], abs=1e-6)


def test_classes(judges: Any) -> None:
    live, _ = judges
    data = live.post("/classify", {"model": "seq_cls", "input": TEXTS}).json()["data"]
    for each in data:
        assert set(each["probabilities"]) == {"calm", "loud"}
        assert sum(each["probabilities"].values()) == pytest.approx(1)
        assert each["label"] == max(each["probabilities"], key=each["probabilities"].get)


def test_requests_at_the_same_time_share_forward_passes(judges: Any) -> None:
    live, queues = judges
    alone = live.post("/v1/embeddings", {"model": "embedding", "input": "text 3"}).json()["data"][0]["embedding"]

    def ask(number: int) -> list[float]:
        body = {"model": "embedding", "input": f"text {number % 10}"}
        return live.post("/v1/embeddings", body).json()["data"][0]["embedding"]

    with ThreadPoolExecutor(20) as pool:
        found = list(pool.map(ask, range(40)))
    assert np.allclose(found[3], alone, atol=1e-6) and np.allclose(found[3], found[33], atol=1e-6)
    before = queues["embedding"].num_passes
    many = live.post("/v1/embeddings", {"model": "embedding", "input": [f"text {n}" for n in range(16)]})
    assert many.status_code == 200
    batch = queues["embedding"]._scorer.max_batch_size
    assert queues["embedding"].num_passes - before <= 16 // batch + 1  # the first may be alone


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/embeddings", {"input": ""}, "empty"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": "x", "dimensions": 100_000}, "64 numbers"),
        ("/v1/embeddings", {"input": [99999999]}, "ids are"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/rerank", {"query": "x", "documents": ["y"]}, "reranker"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "paired"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "generates no text"),
        ("/tokenize", {"prompt": "x"}, "generates no text"),
    ],
)
def test_what_cannot_be_is_refused_by_name(judges: Any, path: str, body: dict[str, Any], words: str) -> None:
    answer: httpx2.Response = judges[0].post(path, {"model": "embedding", **body})
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
