"""PowerSGD: each matrix travels as the product of two thin ones.

The method is torch's own hook; here it runs one bucket after another, is counted, and is put back by a checkpoint.
Of a matrix of n x m, rank r sends r (n + m) elements by all-reduce; vectors, and matrices that would gain less than
half, go whole. (Vogels et al., arXiv 1905.13727, algorithms 1 and 2.)
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from swift.config.communication import GradCompression
from swift.distributed.mesh import Axis
from swift.distributed.traffic import TRAFFIC

# a vanishing gradient has no direction: without this its column would be divided by zero
_EPSILON = 1e-8


class PowerSGD:
    """Averages buckets by torch's PowerSGD hook."""

    remembers = True

    def __init__(self, settings: GradCompression, axis: Axis) -> None:
        self.axis = axis
        self._keys: dict[int, Hashable] = {}
        self._loaded: dict[str, Any] = {}
        self.state = PowerSGDState(
            axis.group,
            matrix_approximation_rank=settings.rank,
            start_powerSGD_iter=settings.start_step,
            use_error_feedback=settings.error_feedback,
            warm_start=settings.warm_start,
            orthogonalization_epsilon=_EPSILON,
        )

    def average(self, bucket: dist.GradBucket, key: Hashable) -> None:
        state, gradients = self.state, bucket.buffer()
        compressing = state.iter >= state.start_powerSGD_iter
        if compressing and bucket.index() in self._loaded.get("keys", ()):
            self._restore(bucket.index(), key, gradients.device)
        before = state.total_numel_after_compression
        powerSGD_hook(state, bucket).wait()
        sent = state.total_numel_after_compression - before if compressing else gradients.numel()
        kind = "powersgd" if compressing else "all_reduce"
        share = 2 * (self.axis.size - 1) / self.axis.size
        TRAFFIC.count(self.axis.name, kind, share * sent * gradients.element_size())
        self._keys[bucket.index()] = key

    def state_dict(self) -> dict[str, Any]:
        state = self.state
        return {
            "iter": state.iter,
            "keys": dict(self._keys),
            "errors": state.error_dict,
            "left": state.p_memory_dict,
            "right": state.q_memory_dict,
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Go on after one step that goes whole: in it the buckets take their final form."""
        self.state.iter = min(state["iter"], self.state.start_powerSGD_iter - 1)
        self._loaded = state

    def _restore(self, index: int, key: Hashable, device: torch.device) -> None:
        """Take over what was saved of a bucket, if it is made of the same parameters."""
        fits = self._loaded["keys"].pop(index, None) == key
        pairs = (
            ("errors", self.state.error_dict),
            ("left", self.state.p_memory_dict),
            ("right", self.state.q_memory_dict),
        )
        for name, ours in pairs:
            if fits and index in self._loaded[name]:
                ours[index] = self._loaded[name][index].to(device)
