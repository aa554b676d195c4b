"""How predictable a document is to a small causal language model: gibberish is too little, boilerplate too much.

The one operator of this package that runs a model. Torch and transformers are imported when it is opened.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swift.config.fields import setting
from swift.config.model import ModelConfig
from swift.core.errors import NumericsError, UsageError
from swift.data.engine.document import Document
from swift.data.engine.operator import OPERATORS, Context, MapOperator
from swift.data.engine.tally import Tally
from swift.data.operators.rules import check_range, wrong

if TYPE_CHECKING:
    import torch


@OPERATORS.register("perplexity")
@dataclass
class Perplexity(MapOperator):
    """Measure each document's perplexity under a small language model, and drop what is outside the bounds.

    Perplexity is exp of the mean negative log-likelihood per token, over the tokens behind the first (or behind the
    model's begin-of-text token, where its tokenizer has one), as in Wenzek et al. 2020, "CCNet"; there with a 5-gram
    model. Written to `meta.perplexity`. Of a conversation the joined texts count. A text of less than two tokens has
    none and stays.
    """

    model: str = setting("smollm2", help="local folder, hub id, or smollm2 (the packaged model of 135 M parameters)")
    min: float | None = setting(None, help="least perplexity that stays")
    max: float | None = setting(
        None, help="largest perplexity that stays; depends on the model: look at a report first"
    )
    max_tokens: int = setting(512, help="only this many tokens of a document's beginning are read")
    batch_size: int = setting(
        1, help="documents at a time; above 1 (for GPUs), padding may change the sixth digit of a perplexity"
    )
    device: str = setting("auto", help="auto (a GPU if there is one), cpu, cuda, cuda:1, ...")

    def check(self) -> None:
        for name in ("min", "max"):
            value = getattr(self, name)
            if value is not None and not value >= (1 if name == "max" else 0):
                raise wrong(name, value, "a perplexity is 1 or more; null for no bound")
        check_range(self, "min", "max")
        if self.max_tokens < 2:
            raise wrong("max_tokens", self.max_tokens, "at least 2")
        if self.batch_size < 1:
            raise wrong("batch_size", self.batch_size, "at least 1")
        if not self.model:
            raise UsageError("perplexity has no model", fix="model: smollm2, a folder or a hub id")

    def open(self, context: Context) -> None:
        super().open(context)
        import torch
        from transformers import AutoModelForCausalLM

        from swift.models.loading import load_tokenizer, resolve_model
        from swift.models.quiet import quiet_transformers

        config = ModelConfig(model=self.model, offline=context.offline)
        folder = resolve_model(config)
        device = self.device if self.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self._tokenizer: Any = load_tokenizer(folder, config)
        with quiet_transformers():
            loaded: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, local_files_only=True)
        self._model: Any = loaded.to(device).eval()

    def run(self, batch: list[Document], tally: Tally) -> list[Document]:
        values = self._perplexities([document.text for document in batch])
        kept = []
        for document, value in zip(batch, values):
            if value is None:
                tally.count("perplexity", "less than two tokens")
                kept.append(document)
                continue
            document.meta["perplexity"] = value
            if math.isfinite(value):
                tally.observe("perplexity", value)
            if self.min is not None and value < self.min:
                tally.drop(document, "too_predictable", f"perplexity {value:g}, allowed: from {self.min:g}")
            elif self.max is not None and not value <= self.max:
                tally.drop(document, "too_surprising", f"perplexity {value:g}, allowed: up to {self.max:g}")
            else:
                kept.append(document)
        return kept

    def _perplexities(self, texts: list[str]) -> list[float | None]:
        """Of each text, to six digits; None where it has less than two tokens."""
        begin = [] if self._tokenizer.bos_token_id is None else [self._tokenizer.bos_token_id]
        rows: list[list[int]] = []
        for text in texts:
            # a token has a character or more, and more text than this makes encoding slow for nothing
            ids = self._tokenizer.encode(text[: 40 * self.max_tokens], add_special_tokens=False)
            rows.append((begin + ids)[: self.max_tokens])
        results: list[float | None] = [None] * len(texts)
        places = [place for place, row in enumerate(rows) if len(row) > 1]
        for first in range(0, len(places), self.batch_size):
            chosen = places[first : first + self.batch_size]
            for place, loss in zip(chosen, self._losses([rows[place] for place in chosen])):
                if math.isnan(loss):
                    raise NumericsError(
                        f"{self.model} gives NaN for a text that begins {texts[place][:60]!r}",
                        fix="its weights are damaged, or too large for its number format: try device: cpu",
                    )
                results[place] = float(f"{math.exp(min(loss, 700.0)):.6g}")
        return results

    def _losses(self, rows: list[list[int]]) -> list[float]:
        """Mean negative log-likelihood of each row's tokens behind its first, in nats."""
        import torch

        width = max(map(len, rows))
        lengths = torch.tensor([len(row) for row in rows])
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        mask = (torch.arange(width)[None, :] < lengths[:, None]).long()  # [batch, width]; padding is on the right
        device = self._model.device
        with torch.inference_mode():
            logits = self._model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False).logits
        return [
            self._loss(logits[row, : length - 1], ids[row, 1:length]) for row, length in enumerate(lengths.tolist())
        ]

    def _loss(self, logits: torch.Tensor, targets: torch.Tensor) -> float:
        """`logits` [tokens, vocabulary] against `targets` [tokens]."""
        import torch

        loss = torch.nn.functional.cross_entropy(logits.float(), targets.to(logits.device), reduction="none")
        return float(loss.double().mean())
