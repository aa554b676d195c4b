"""Tensor parallelism: every matrix of a decoder is cut over the ranks of `tp`, and so is the vocabulary."""

from swift.distributed.tensor.apply import apply_tensor_parallel
from swift.distributed.tensor.cut import fsdp_placement
from swift.distributed.tensor.sizes import check_tensor_parallel

__all__ = ["apply_tensor_parallel", "check_tensor_parallel", "fsdp_placement"]
