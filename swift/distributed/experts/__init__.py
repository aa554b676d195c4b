"""Expert parallelism: the experts of a layer live on different ranks, and tokens travel to them and back."""

from swift.distributed.experts.apply import apply_expert_parallel, expert_parameters

__all__ = ["apply_expert_parallel", "expert_parameters"]
