"""What a run of the preference benchmark is measured by. It runs in every tool's environment."""

from __future__ import annotations

import functools
import json
import resource
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Meter:
    """CPU seconds of this process, and what goes through the model, after the uncounted steps.

    Attributes:
        pairs: of a step.
        uncounted: first steps, in which memory is allocated and kernels are chosen.
        slots, tokens: positions the model worked on in all forward passes, and those of them that aren't padding.
        before: CPU seconds before step 1 that belong to all the steps' pairs (a reference that is asked beforehand).
        losses: of the steps.
    """

    pairs: int
    uncounted: int
    steps: int = 0
    slots: int = 0
    tokens: int = 0
    before: float = 0.0
    losses: list[float] = field(default_factory=list)
    _started: float = 0.0
    _ended: float = 0.0

    def watch_decoder(self) -> None:
        """Count what every Llama of this process works on."""
        from transformers import LlamaModel

        plain = LlamaModel.forward

        @functools.wraps(plain)
        def forward(model: Any, *arguments: Any, **named: Any) -> Any:
            if self.steps >= self.uncounted:
                ids, mask = named["input_ids"], named.get("attention_mask")
                self.slots += ids.numel()
                self.tokens += ids.numel() if mask is None or mask.shape != ids.shape else int(mask.sum())
            return plain(model, *arguments, **named)

        LlamaModel.forward = forward  # type: ignore[method-assign]

    def step(self) -> None:
        """A step has ended."""
        self.steps += 1
        self._ended = time.process_time()
        if self.steps == self.uncounted:
            self._started = self._ended

    def show(self) -> None:
        """Print the result for the process that started this one."""
        pairs = self.pairs * (self.steps - self.uncounted)
        result = {
            "cpu_s_per_pair": (self._ended - self._started) / pairs + self.before / (self.pairs * self.steps),
            "padding": 1 - self.tokens / self.slots,
            "tokens_per_pair": self.tokens / pairs,
            "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "losses": self.losses,
        }
        print("RESULT " + json.dumps(result), flush=True)
