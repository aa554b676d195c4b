"""Running requests on a backend, and collecting what comes."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from architectures import build

from swift.config.engine import EngineConfig
from swift.inference.backends.swift import SwiftBackend
from swift.inference.requests import Request, SamplingParams, TokenLogprob, Update


@dataclass
class Answer:
    """All updates of a request, put together."""

    updates: list[Update] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def take(self, update: Update) -> None:
        assert not self.ended.is_set(), "an update after the last one"
        self.updates.append(update)
        if update.finish_reason is not None:
            self.ended.set()

    @property
    def last(self) -> Update:
        return self.updates[-1]

    @property
    def tokens(self) -> list[int]:
        return [token for update in self.updates for token in update.tokens]

    @property
    def text(self) -> str:
        return "".join(update.text for update in self.updates)

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [entry for update in self.updates for entry in update.logprobs or []]

    def wait(self) -> Answer:
        assert self.ended.wait(60), "no answer within a minute"
        return self


def submit(backend: Any, *requests: Request) -> list[Answer]:
    """Hand requests in; don't wait."""
    answers = [Answer() for _ in requests]
    for request, answer in zip(requests, answers, strict=True):
        backend.submit(request, answer.take)
    return answers


def ask(backend: Any, *requests: Request) -> list[Answer]:
    """Hand requests in together and wait for all."""
    return [answer.wait() for answer in submit(backend, *requests)]


def backend_of(model: Any, tokenizer: Any, *, stop: tuple[int, ...] = (2,), draft: Any = None, **settings: Any):
    """A running engine; blocks are small and few unless `settings` say otherwise."""
    config = EngineConfig(**{"kv_cache_gib": 0.01, "block_size": 4, "max_batch_tokens": 24, **settings})
    backend = SwiftBackend(model, tokenizer, config, stop_token_ids=stop, draft_model=draft)
    backend.start()
    return backend


def engine(name: str, tokenizer: Any, **settings: Any):
    """An engine on a tiny random model."""
    return backend_of(build(name), tokenizer, **settings)


def prompts(count: int, *, vocab: int = 97, longest: int = 40, seed: int = 0) -> list[list[int]]:
    """Random prompts of very different lengths."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=draw).tolist()
    return [torch.randint(3, vocab, (n,), generator=draw).tolist() for n in lengths]


def requests_for(texts: list[list[int]], params: SamplingParams, *, name: str = "r") -> list[Request]:
    """One request for each prompt."""
    return [Request(f"{name}{k}", text, params) for k, text in enumerate(texts)]


def generated(model: Any, prompt: list[int], new: int, **settings: Any) -> list[int]:
    """What transformers' own `generate` answers, greedily unless told otherwise."""
    with torch.no_grad():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            **settings,
        )
    return output[0, len(prompt) :].tolist()
