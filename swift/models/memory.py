"""How much memory a training step will take, told before the first one.

The estimate decides one thing: whether activations are kept or computed again in the backward pass (which costs about a
third more time). It counts what a decoder layer keeps for the backward pass per token, in elements: about 14 of the
hidden size (residual, norms, query, key, value, attention output and its input) and 8 of the feed-forward size. With
recompute only one hidden state per layer and one layer's worth stay. Fitted to a 135M Llama in fp32 with LoRA.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PretrainedConfig

from swift.core.devices import Device
from swift.core.files import human_bytes
from swift.distributed.spread import local_tensor

# Share of the free memory that the estimate may fill; the rest is for what it doesn't see.
USABLE_SHARE = 0.8
HIDDEN_COPIES = 14
FEED_FORWARD_COPIES = 8


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes a training step needs beyond what is allocated already.

    Attributes:
        weights: all parameters; gradients; optimizer: both Adam moments of the trained ones.
        activations: kept for the backward pass with everything kept; recomputed: with recompute.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    recomputed: int

    def total(self, *, checkpointing: bool) -> int:
        """Peak bytes with or without activation recompute."""
        return self.weights + self.gradients + self.optimizer + (self.recomputed if checkpointing else self.activations)


def estimate_memory(
    model: nn.Module, config: PretrainedConfig, *, tokens: int, dtype: torch.dtype, logits_rows: int
) -> MemoryEstimate:
    """Estimate for micro-batches of `tokens` tokens (padding included) and chunks of `logits_rows` logits.

    Of a model that is spread over processes, the part that this one holds counts.
    """
    text = config.get_text_config()
    hidden, layers = text.hidden_size, text.num_hidden_layers
    feed_forward = getattr(text, "intermediate_size", None) or 4 * hidden
    if getattr(text, "num_experts_per_tok", None) and getattr(text, "moe_intermediate_size", None):
        feed_forward = text.moe_intermediate_size * text.num_experts_per_tok
    width = torch.finfo(dtype).bits // 8
    per_layer = (HIDDEN_COPIES * hidden + FEED_FORWARD_COPIES * feed_forward) * tokens * width
    logits = 2 * logits_rows * text.vocab_size * 4
    here = [(local_tensor(parameter.detach()), parameter.requires_grad) for parameter in model.parameters()]
    trained = sum(part.numel() * part.element_size() for part, learns in here if learns)
    return MemoryEstimate(
        weights=sum(part.numel() * part.element_size() for part, _ in here),
        gradients=trained,
        optimizer=2 * trained,
        activations=per_layer * layers + logits,
        recomputed=hidden * tokens * width * layers + per_layer + logits,
    )


def free_memory_bytes(device: Device) -> int:
    """What this process could still take on the device, counting what the model holds already as taken."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device.index)[0]
    meminfo = Path("/proc/meminfo")
    available = device.memory_bytes
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip().isdigit():
        taken = int(used.read_text()) - _reclaimable_bytes()
        available = min(available, int(limit.read_text()) - taken)
    return max(0, available)


def _reclaimable_bytes() -> int:
    """Cached file pages that the control group counts as used but gives back when memory is wanted."""
    stat = Path("/sys/fs/cgroup/memory.stat")
    for line in stat.read_text().splitlines() if stat.exists() else []:
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0


def decide_checkpointing(
    wanted: bool | None, estimate: MemoryEstimate, free_bytes: int, *, processes: int = 1
) -> tuple[bool, str]:
    """Whether to recompute activations, and the words that say why.

    Args:
        wanted: the user's choice, or None to decide by memory.
        free_bytes: free on the device, the weights already taken off; shared by `processes` processes.
    """
    usable = int(free_bytes * USABLE_SHARE / processes)
    need = estimate.total(checkpointing=False) - estimate.weights
    with_recompute = estimate.total(checkpointing=True) - estimate.weights
    sizes = f"{human_bytes(need)} beside the weights, {human_bytes(usable)} usable"
    if wanted is not None:
        return wanted, f"gradient checkpointing {'on' if wanted else 'off'} as asked ({sizes})"
    if need <= usable:
        return False, f"gradient checkpointing off: a step needs about {sizes}"
    words = f"gradient checkpointing on: without it a step needs about {sizes}; with it {human_bytes(with_recompute)}"
    if with_recompute > usable:
        words += "; that may not fit either: lower --max_length or --per_device_train_batch_size"
    return True, words
