"""What this machine can compute with. torch is imported inside the functions only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def cpu_flags() -> frozenset[str]:
    """The processor's feature flags on Linux; empty elsewhere."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return frozenset()
    for line in info.read_text(errors="replace").splitlines():
        if line.lower().startswith(("flags", "features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def cpu_has_bf16() -> bool:
    """Whether the CPU multiplies bfloat16 matrices in hardware; without it bf16 is about 3x slower than fp32."""
    return bool(cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16", "sve_bf16"})


@dataclass(frozen=True)
class Device:
    """The device a process computes on.

    Attributes:
        type: ``cuda``, ``mps``, ``npu``, ``xpu`` or ``cpu``.
        index: number of the device in this node, 0 for CPU.
        name: what the vendor calls it.
        bf16: whether bfloat16 is native.
        fp16: whether float16 training is sensible.
        memory_bytes: total memory of the device (of the machine for CPU).
    """

    type: str
    index: int
    name: str
    bf16: bool
    fp16: bool
    memory_bytes: int

    @property
    def torch_device(self) -> torch.device:
        import torch

        return torch.device(self.type) if self.type in ("cpu", "mps") else torch.device(self.type, self.index)


def detect_device(local_rank: int = 0, prefer: str | None = None) -> Device:
    """The device of this process: an accelerator if torch sees one (or `prefer`), else the CPU."""
    import torch

    if prefer != "cpu" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(local_rank)
        return Device(
            "cuda", local_rank, properties.name, torch.cuda.is_bf16_supported(), True, properties.total_memory
        )
    if prefer != "cpu" and torch.backends.mps.is_available():
        return Device("mps", 0, "Apple GPU", True, True, total_memory_bytes())
    return Device("cpu", 0, cpu_name(), cpu_has_bf16(), False, total_memory_bytes())


def cpu_name() -> str:
    """The processor's model name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    import platform

    return platform.processor() or platform.machine()


def cpu_vendor() -> str:
    """`AuthenticAMD`, `GenuineIntel` or the like on Linux on x86; empty elsewhere."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("vendor_id"):
                return line.partition(":")[2].strip()
    return ""


def total_memory_bytes() -> int:
    """Memory this process may use: the machine's, or the control group's limit when that is smaller."""
    import os

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists():
        text = limit.read_text().strip()
        if text.isdigit():
            total = min(total, int(text))
    return total
