"""/v1/embeddings, /v1/rerank, /v1/score and /classify: what models with a head of their own say of texts."""

from __future__ import annotations

import base64
import time
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from swift.data.rows import Row, RowRef
from swift.serving.errors import ApiError, JsonResponse
from swift.serving.exchange import Exchange, exchange_of
from swift.serving.schema import Body, Int
from swift.serving.services import services_of

_RANKERS = ("reranker", "generative_reranker")
_MOST = 2048
Texts = str | Annotated[list[str], Field(min_length=1, max_length=_MOST)]
Ids = Annotated[list[Int], Field(min_length=1)]


class EmbeddingRequest(Body):
    """Body of /v1/embeddings."""

    model: str | None = None
    input: Texts | Ids | Annotated[list[Ids], Field(min_length=1, max_length=_MOST)]
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Annotated[Int, Field(ge=1)] | None = None
    user: str | None = None


class RerankRequest(Body):
    """Body of /v1/rerank, as Jina and Cohere have it."""

    model: str | None = None
    query: str
    documents: Annotated[list[str | dict[str, Any]], Field(min_length=1, max_length=_MOST)]
    top_n: Annotated[Int, Field(ge=1)] | None = None
    return_documents: bool | None = True


class ScoreRequest(Body):
    """Body of /v1/score, as vLLM has it: pairs of texts."""

    model: str | None = None
    text_1: Texts
    text_2: Texts


class ClassifyRequest(Body):
    """Body of /classify."""

    model: str | None = None
    input: Texts


async def embeddings(http: HttpRequest, body: EmbeddingRequest) -> Response:
    """A vector for each text."""
    model, scorer = services_of(http).models.scorer(body.model, "embedding")
    exchange = exchange_of(http.scope)
    exchange.model = model.name
    given: Any = body.input
    if isinstance(given, str):
        texts = [given]
    elif isinstance(given[0], str):
        texts = given
    else:
        rows = [given] if isinstance(given[0], int) else given
        size = len(scorer.tokenizer)
        if any(not 0 <= token < size for row in rows for token in row):
            raise ApiError(400, f"ids are 0 to {size - 1}", param="input")
        texts = [scorer.tokenizer.decode(row) for row in rows]
    _no_empty(texts, "input")
    results, tokens = await scorer.judge([_said(text, index) for index, text in enumerate(texts)])
    data = []
    for index, result in enumerate(results):
        vector = np.asarray(result["embedding"], dtype=np.float32)
        if body.dimensions is not None:
            if body.dimensions > len(vector):
                raise ApiError(400, f"the vectors have {len(vector)} numbers", param="dimensions")
            vector = vector[: body.dimensions]
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        shown: Any = vector.tolist()
        if body.encoding_format == "base64":
            shown = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": shown})
    return JsonResponse({"object": "list", "data": data, "model": model.name, "usage": _usage(exchange, tokens)})


async def rerank(http: HttpRequest, body: RerankRequest) -> Response:
    """Documents by how well they answer a query, best first."""
    model, scorer = services_of(http).models.scorer(body.model, *_RANKERS)
    exchange = exchange_of(http.scope)
    exchange.model = model.name
    documents = [_document(each, index) for index, each in enumerate(body.documents)]
    results, tokens = await scorer.judge([_pair(body.query, documents, 0)])
    shown = []
    for entry in results[0]["scores"][: body.top_n]:
        result = {"index": entry["index"], "relevance_score": entry["score"]}
        if body.return_documents:
            result["document"] = {"text": documents[entry["index"]]}
        shown.append(result)
    return JsonResponse(
        {"id": f"rerank-{exchange.id}", "model": model.name, "results": shown, "usage": _usage(exchange, tokens)}
    )


async def score(http: HttpRequest, body: ScoreRequest) -> Response:
    """How well two texts fit: by a reranker's score, or the cosine of two vectors."""
    model, scorer = services_of(http).models.scorer(body.model, "embedding", *_RANKERS)
    exchange = exchange_of(http.scope)
    exchange.model = model.name
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise ApiError(400, f"{len(first)} texts can't be paired with {len(second)}", param="text_2")
    _no_empty(first, "text_1")
    _no_empty(second, "text_2")
    if scorer.task == "embedding":
        rows = [_said(text, index) for index, text in enumerate([*first, *second])]
        results, tokens = await scorer.judge(rows)
        vectors = np.array([result["embedding"] for result in results])
        scores = (vectors[: len(first)] * vectors[len(first) :]).sum(axis=1).tolist()
    else:
        rows = [_pair(query, [document], index) for index, (query, document) in enumerate(zip(first, second))]
        results, tokens = await scorer.judge(rows)
        scores = [result["scores"][0]["score"] for result in results]
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
    return JsonResponse(
        {
            "id": f"score-{exchange.id}",
            "object": "list",
            "created": int(time.time()),
            "model": model.name,
            "data": data,
            "usage": _usage(exchange, tokens),
        }
    )


async def classify(http: HttpRequest, body: ClassifyRequest) -> Response:
    """Classes of texts, of their words, or a reward: what the result lines of `swift infer` hold."""
    model, scorer = services_of(http).models.scorer(body.model, "seq_cls", "token_cls", "reward")
    exchange = exchange_of(http.scope)
    exchange.model = model.name
    texts = [body.input] if isinstance(body.input, str) else body.input
    _no_empty(texts, "input")
    results, tokens = await scorer.judge([_said(text, index) for index, text in enumerate(texts)])
    kept = ("label", "labels", "probabilities", "value", "entities", "reward")
    data = [
        {"index": index, **{name: result[name] for name in kept if name in result}}
        for index, result in enumerate(results)
    ]
    return JsonResponse(
        {
            "id": f"classify-{exchange.id}",
            "object": "list",
            "created": int(time.time()),
            "model": model.name,
            "data": data,
            "usage": _usage(exchange, tokens),
        }
    )


def _said(text: str, index: int) -> Row:
    return Row(ref=RowRef("input", index), messages=[{"role": "user", "content": text}])


def _pair(query: str, documents: list[str], index: int) -> Row:
    return Row(
        ref=RowRef("input", index),
        messages=[{"role": "user", "content": query}],
        negatives=[[{"role": "assistant", "content": document}] for document in documents],
    )


def _document(given: str | dict[str, Any], index: int) -> str:
    text = given if isinstance(given, str) else given.get("text")
    if not isinstance(text, str) or not text:
        raise ApiError(400, f"documents[{index}] has to be a text", param=f"documents[{index}]")
    return text


def _no_empty(texts: list[str], param: str) -> None:
    for index, text in enumerate(texts):
        if not text:
            raise ApiError(400, f"{param}[{index}] is empty", param=f"{param}[{index}]")


def _usage(exchange: Exchange, tokens: int) -> dict[str, int]:
    exchange.prompt_tokens = tokens
    return {"prompt_tokens": tokens, "total_tokens": tokens}
