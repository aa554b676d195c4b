"""How a run is spread over processes: which axes, how large, and what travels between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swift.config.fields import setting


@dataclass
class ParallelConfig:
    """Parallelism"""

    parallel: Literal["manual", "auto"] = setting(
        "manual", help="auto: sizes below are chosen from model, devices and memory, and explained"
    )
    fsdp: Literal["none", "fsdp2", "hsdp"] = setting(
        "none",
        help="shard weights, gradients and optimizer over data-parallel ranks; hsdp: within a node, replicated across; "
        "none: every rank holds all",
    )
    zero_stage: int = setting(
        3, help="what fsdp shards: 1 optimizer state, 2 gradients too, 3 weights too (like ZeRO stages)"
    )
    dp_replicate_size: int = setting(-1, help="replicas of the sharded model; -1: what the other sizes leave")
    dp_shard_size: int = setting(-1, help="ranks a replica is sharded over by fsdp; -1: what the other sizes leave")
    fsdp_cpu_offload: bool = setting(False, help="keep sharded weights, gradients and optimizer state in host memory")
    reduce_dtype: Literal["float32", "bfloat16"] = setting("float32", help="type in which fsdp adds gradients up")
    tensor_parallel_size: int = setting(
        1, help="ranks that share every matrix", aliases=("tensor_model_parallel_size", "tp_size")
    )
    sequence_parallel: bool = setting(
        False, help="with tensor parallel: norms and residuals hold a share of the tokens each"
    )
    sequence_parallel_size: int = setting(
        1, help="ranks that share every sequence (context parallel)", aliases=("context_parallel_size", "cp_size")
    )
    attention_impl: Literal["auto", "ulysses", "ring", "allgather"] = setting(
        "auto",
        help="how shared sequences attend; auto: ulysses as far as heads divide, ring for the rest",
    )
    pipeline_parallel_size: int = setting(
        1, help="ranks that hold consecutive layers", aliases=("pipeline_model_parallel_size", "pp_size")
    )
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zbv"] = setting(
        "1f1b", help="order of micro-batches in the pipeline; interleaved and zbv hold several pieces of layers a rank"
    )
    pipeline_stages_per_rank: int | None = setting(
        None,
        help="pieces of layers a rank holds; default: 2 for interleaved and zbv, else 1",
    )
    pipeline_layers: list[int] = setting(
        help="layers of each stage in order; default: split by cost, embedding and head counted", factory=list
    )
    expert_parallel_size: int = setting(
        1,
        help="ranks that share the experts, out of the data and sequence ones",
        aliases=("expert_model_parallel_size", "ep_size"),
    )
    deepspeed: str | None = setting(
        None, help="zero1, zero2, zero3, zero2_offload, zero3_offload, a DeepSpeed file, or JSON: train by DeepSpeed"
    )
    grad_compression: str | None = setting(
        None,
        help="fp16, bf16, hierarchical, powersgd, topk, ring2d, or JSON such as "
        '{"intra": "bf16", "inter": "topk", "ratio": 0.1}',
    )
    local_updates: str | None = setting(
        None, help='local_sgd, diloco, streaming_diloco, or JSON such as {"method": "diloco", "every": 20}'
    )
    balance_micro_batches: bool = setting(
        False, help="more micro-batches for faster data-parallel ranks, by their measured speed"
    )
    cluster_file: str | None = setting(
        None, help="YAML with nodes, devices per node and switches; default: found from host names"
    )
    dry_run: bool = setting(
        False, help="print mesh, memory per rank and bytes per axis of one step, without weights, and end"
    )
    nnodes: int | None = setting(None, help="machines; default: NNODES or Slurm's, else 1")
    node_rank: int | None = setting(None, help="number of this machine; default: NODE_RANK or Slurm's")
    master_addr: str | None = setting(None, help="host of machine 0; default: MASTER_ADDR or Slurm's first host")
    master_port: int | None = setting(
        None, help="port on it; default: MASTER_PORT, else 29500, or one made of the number of Slurm's job"
    )
    join_timeout_s: int = setting(
        50, help="seconds to wait for the other processes at the start; more where machines come minutes apart"
    )
