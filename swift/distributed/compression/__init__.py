"""How data-parallel ranks exchange gradients, other than by one all-reduce of 32-bit numbers."""

from swift.distributed.compression.exchange import GradientExchange, build_exchange
from swift.distributed.compression.replicas import ReplicaExchange, build_replica_exchange
from swift.distributed.compression.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter

__all__ = [
    "GradientExchange",
    "ReplicaExchange",
    "build_exchange",
    "build_replica_exchange",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
]
