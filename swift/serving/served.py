"""The models that a server offers, by the names that requests use; adapters come and go while it runs.

Knows nothing of HTTP but the errors it raises.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from swift.core.errors import SwiftError
from swift.inference.answers.choose import AnswerForms
from swift.inference.backends.base import Backend, EngineStats
from swift.inference.requests import SamplingParams
from swift.serving.errors import ApiError, from_swift
from swift.serving.limits import Queue
from swift.serving.token_texts import TokenTexts

if TYPE_CHECKING:
    from swift.data.encoding.encode import ChatEncoder
    from swift.serving.scores import ScoringQueue

State = Literal["loading", "ready", "failed"]
Use = Literal["generate", "embedding", "rerank", "classify", "reward"]


@dataclass(frozen=True)
class Talker:
    """What answers are generated with.

    Attributes:
        backend: runs the model.
        tokenizer, encoder: make prompts.
        defaults: how answers are generated where a request says nothing.
        queue: of all that the backend answers.
        texts: of its tokens.
        forms: what may be in its answers.
    """

    backend: Backend
    tokenizer: Any
    encoder: ChatEncoder
    defaults: SamplingParams
    queue: Queue
    texts: TokenTexts = field(init=False)
    forms: AnswerForms = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "texts", TokenTexts(self.tokenizer))
        object.__setattr__(self, "forms", AnswerForms(self.encoder))


@dataclass(frozen=True)
class ServedModel:
    """One name that requests may use.

    Attributes:
        name: in the field `model`.
        talker: of a model that generates. scorer: of one that judges; one of the two is there.
        adapter: which of the backend's adapters is used.
        parent: name of the model that the adapter belongs to.
        root: where it comes from, as shown in the list: never a path.
        fingerprint: changes with what answers depend on.
    """

    name: str
    talker: Talker | None = None
    scorer: ScoringQueue | None = None
    adapter: str | None = None
    parent: str | None = None
    root: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def fingerprint(self) -> str:
        return "fp_" + hashlib.sha256(f"{self.root}/{self.name}/{self.created}".encode()).hexdigest()[:12]


class Models:
    """All served models.

    Attributes:
        state: `loading` until `serve` was called; `failed` when they can't be loaded.
        failed_at: when something went wrong last (`time.monotonic`).
    """

    def __init__(self) -> None:
        self.state: State = "loading"
        self._served: dict[str, ServedModel] = {}
        self._aliases: dict[str, str] = {}
        self._changing = asyncio.Lock()
        self._broken: str | None = None
        self.failed_at = 0.0

    def serve(self, models: list[ServedModel]) -> None:
        """Offer these from now on. The first one is meant where a request names none."""
        self._served = {model.name: model for model in models}
        self.state = "ready"

    def fail(self) -> None:
        self.state = "failed"

    # --- health ---

    @property
    def trouble(self) -> str | None:
        """What went wrong last in an engine; None since an answer succeeded."""
        return self._broken

    def went_wrong(self, message: str) -> None:
        self._broken, self.failed_at = message, time.monotonic()

    def went_well(self) -> None:
        self._broken = None

    # --- looking up ---

    def names(self) -> list[str]:
        return list(self._served)

    def all(self) -> list[ServedModel]:
        return list(self._served.values())

    def find(self, name: str | None) -> ServedModel:
        """The model of that name; the first one without a name.

        Raises:
            ApiError: 503 while loading, 404 with the names that there are.
        """
        if self.state != "ready":
            raise ApiError(503, "the model is being loaded", code="loading", retry_after_s=5)
        if name is None:
            return next(iter(self._served.values()))
        model = self._served.get(name)
        if model is None:
            raise ApiError(
                404,
                f"there is no model {name!r:.200}; there are: {', '.join(self._served)}",
                param="model",
                code="model_not_found",
            )
        return model

    def talker(self, name: str | None) -> tuple[ServedModel, Talker]:
        """A model that generates; 400 for one that doesn't."""
        model = self.find(name)
        if model.talker is None:
            assert model.scorer is not None
            raise ApiError(
                400, f"the model {model.name} generates no text: it is one for {model.scorer.task}", param="model"
            )
        return model, model.talker

    def scorer(self, name: str | None, *tasks: str) -> tuple[ServedModel, ScoringQueue]:
        """A model with a head for one of `tasks`; 400 for another one."""
        model = self.find(name)
        if model.scorer is None or model.scorer.task not in tasks:
            kind = "generating text" if model.scorer is None else model.scorer.task
            raise ApiError(
                400, f"the model {model.name} is one for {kind}; this needs one for {' or '.join(tasks)}", param="model"
            )
        return model, model.scorer

    def stats(self) -> dict[str, EngineStats]:
        """How each backend is doing, by the name of the model it runs."""
        return {
            model.name: model.talker.backend.stats()
            for model in self._served.values()
            if model.talker is not None and model.parent is None
        }

    # --- adapters ---

    async def load_adapter(self, name: str, folder: Path, base: str | None = None) -> ServedModel:
        """Offer an adapter under its own name.

        Raises:
            ApiError: the name is taken, or the adapter can't be used.
        """
        async with self._changing:
            parent, talker = self.talker(base)
            if name in self._served:
                raise ApiError(400, f"the name {name!r} is taken", param="lora_name")
            if "adapters" not in talker.backend.info.features:
                raise ApiError(400, f"the backend {talker.backend.name} runs no adapters by name")
            try:
                await asyncio.to_thread(talker.backend.load_adapter, name, folder)
            except SwiftError as error:  # a folder that doesn't fit is the caller's fault
                raise ApiError(400, error.message, param="lora_path") from error
            model = replace(
                parent, name=name, adapter=name, parent=parent.name, root=parent.root, created=int(time.time())
            )
            self._served[name] = model
            return model

    async def unload_adapter(self, name: str) -> None:
        """Stop offering an adapter; its running answers end first.

        Raises:
            ApiError: 404, there is none of that name.
        """
        async with self._changing:
            model = self._served.get(name)
            if model is None or model.adapter is None or model.parent is None:
                raise ApiError(404, f"there is no adapter {name!r:.200}", param="lora_name", code="model_not_found")
            assert model.talker is not None
            del self._served[name]  # no new requests
            try:
                await asyncio.to_thread(model.talker.backend.unload_adapter, model.adapter)
            except SwiftError as error:
                raise from_swift(error) from error
