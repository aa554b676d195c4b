"""In which precision a run computes, chosen by what the device really does well."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from swift.core.devices import Device
from swift.core.errors import UsageError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """How tensors are held and multiplied.

    Trained parameters are fp32 always, so that small updates aren't lost; in bf16 and fp16 the frozen ones are held in
    that type and the forward pass runs under autocast.

    Attributes:
        compute: dtype of matrix products; also of frozen weights.
        device_type: for autocast.
        managed: another engine holds the weights in `compute` and scales fp16's losses itself, so that there is neither
            autocast nor a scaler here.
    """

    compute: torch.dtype
    device_type: str
    managed: bool = False

    def stored(self, *, full: bool) -> torch.dtype:
        """The type in which a model's own weights are held: all trained (`full`), or frozen beside an adapter."""
        return torch.float32 if full else self.compute

    @property
    def name(self) -> str:
        return str(self.compute).removeprefix("torch.")

    def autocast(self) -> AbstractContextManager:
        """The context that forward passes run in."""
        if self.compute == torch.float32 or self.managed:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.compute)

    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler that fp16 needs to keep small gradients from vanishing."""
        scaled = self.compute == torch.float16 and not self.managed
        return torch.amp.GradScaler(self.device_type) if scaled else None


def choose_precision(wanted: str | None, device: Device) -> tuple[Precision, list[str]]:
    """The precision to use, and notes for the user.

    Unasked: bf16 on an accelerator that has it, fp16 on one that doesn't, fp32 on a CPU (where it is exact and, without
    bf16 units, about three times faster than bf16).

    Raises:
        UsageError: fp16 on a device that can't train in it.
    """
    notes = []
    if wanted is None:
        wanted = (
            "float32"
            if device.type == "cpu"
            else "bfloat16"
            if device.bf16
            else "float16"
            if device.fp16
            else "float32"
        )
        if device.type == "cpu" and device.bf16:
            notes.append("this CPU multiplies bfloat16 natively: --torch_dtype bfloat16 trades exactness for speed")
    if wanted == "float16" and not device.fp16:
        raise UsageError(
            f"{device.name} can't train in float16",
            where="--torch_dtype",
            fix="use --torch_dtype float32" + (" or bfloat16" if device.bf16 else ""),
        )
    if wanted == "bfloat16" and not device.bf16:
        notes.append(f"{device.name} has no bfloat16 units: float32 is about three times faster here")
    return Precision(DTYPES[wanted], device.type), notes
