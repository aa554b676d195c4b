"""What is wrong with the settings of parallelism, seen from the settings alone.

Sizes that depend on the number of processes and on the model are checked in `swift.config.degrees`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from swift.config.deepspeed import deepspeed_faults
from swift.config.resolve import Problem

Fault = Callable[..., Problem]  # (names, message, fix) -> the problem with its place

_SHARDED_ONLY = ("fsdp_cpu_offload",)
_ALONE = {  # DeepSpeed brings its own sharding, communication and optimizer
    "fsdp": "none",
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "sequence_parallel_size": 1,
    "expert_parallel_size": 1,
}
_AXES = {"tp": "tensor", "pp": "pipeline", "cp": "sequence", "ep": "expert"}
# starts of LoRA that need no weights to be known
_STARTS_FROM_SHAPES = ("true", "false", "gaussian", "orthogonal")


def parallel_faults(values: Mapping[str, Any], fault: Fault) -> Iterator[Problem]:
    """The rules of parallelism.

    Args:
        values: every setting by name; those of a command without parallelism bring none.
        fault: makes a problem of the settings' names, a message and a fix.
    """
    if "fsdp" not in values:
        return
    yield from _sharding(values, fault)
    yield from _deepspeed(values, fault)
    yield from spread_faults(values, fault)
    yield from _launching(values, fault)
    if values["global_batch_size"] is not None and values["global_batch_size"] < 1:
        yield fault("global_batch_size", f"global_batch_size must be at least 1, not {values['global_batch_size']}")
    if values["global_batch_size"] is not None and values["gradient_accumulation_steps"] is not None:
        yield fault(
            "global_batch_size gradient_accumulation_steps",
            "global_batch_size and gradient_accumulation_steps both say how many examples a step has",
            "leave one of them out",
        )
    if values["sequence_parallel"] and values["tensor_parallel_size"] == 1 and values["parallel"] == "manual":
        yield fault(
            "sequence_parallel tensor_parallel_size",
            "sequence_parallel shares tokens among tensor-parallel ranks, and tensor_parallel_size is 1",
            "--tensor_parallel_size 2; to share long sequences: --sequence_parallel_size 2",
        )


def _sharding(values: Mapping[str, Any], fault: Fault) -> Iterator[Problem]:
    if values["zero_stage"] not in (1, 2, 3):
        yield fault("zero_stage", f"zero_stage is 1, 2 or 3, not {values['zero_stage']}", "3 shards the most")
    if values["fsdp"] == "none" and values["parallel"] == "manual":
        for name in _SHARDED_ONLY:
            if values[name]:
                yield fault(f"{name} fsdp", f"{name} needs fsdp, and fsdp is none", "--fsdp fsdp2")


def _deepspeed(values: Mapping[str, Any], fault: Fault) -> Iterator[Problem]:
    if not values["deepspeed"]:
        return
    for name, off in _ALONE.items():
        if values[name] != off:
            yield fault(
                f"{name} deepspeed",
                f"deepspeed and {name} {values[name]} exclude each other: DeepSpeed shards by itself",
                "leave deepspeed out: --fsdp fsdp2 shards as zero3 does and goes with the other axes",
            )
    if values["parallel"] == "auto":
        yield fault("parallel deepspeed", "parallel auto chooses among our own axes, not DeepSpeed", "leave one out")
    yield from deepspeed_faults(values, fault)


def spread_faults(values: Mapping[str, Any], fault: Fault) -> Iterator[Problem]:
    """What can't be had where processes share the model or its rows: also what `--parallel auto` must not choose."""
    yield from _precision(values, fault)
    yield from _noise(values, fault)
    yield from _compilation(values, fault)
    sizes = {axis: values[f"{name}_parallel_size"] for axis, name in _AXES.items()}
    for name, message, fix in tuner_faults(values, sizes, fsdp=values["fsdp"] != "none"):
        yield fault(name, message, fix)


def _precision(values: Mapping[str, Any], fault: Fault) -> Iterator[Problem]:
    if values.get("torch_dtype") != "float16":
        return
    for name, off in _ALONE.items():
        if values[name] != off:
            yield fault(
                f"torch_dtype {name}",
                f"float16 needs a loss scale that all ranks agree on, which {name} {values[name]} doesn't have",
                "--torch_dtype bfloat16",
            )
            return


def _noise(values: Mapping[str, Any], fault: Fault) -> Iterator[Problem]:
    if not values.get("neftune_noise_alpha"):
        return
    for name in ("tensor_parallel_size", "sequence_parallel_size"):
        if values[name] > 1:
            yield fault(
                f"neftune_noise_alpha {name}",
                f"neftune_noise_alpha draws noise for whole rows on each rank, and with {name} {values[name]} ranks "
                "share rows",
                "leave it out; or --fsdp fsdp2 instead, with which each rank has rows of its own",
            )


def _compilation(values: Mapping[str, Any], fault: Fault) -> Iterator[Problem]:
    if not values.get("torch_compile"):
        return
    for name in ("tensor_parallel_size", "expert_parallel_size"):
        if values[name] > 1:
            yield fault(
                f"torch_compile {name}",
                f"torch_compile can't see through what ranks send each other inside layers with {name} {values[name]}",
                "leave it out; it goes with --fsdp, --pipeline_parallel_size and --sequence_parallel_size",
            )


def tuner_faults(tuner: Mapping[str, Any], sizes: Mapping[str, int], *, fsdp: bool) -> Iterator[tuple[str, str, str]]:
    """Ways of tuning that need whole matrices, which no process of a spread model has: setting, message and remedy.

    Plain LoRA and its starts `true`, `false`, `gaussian` and `orthogonal` depend on shapes only, so they run in any
    layout. Other kinds of adapters, and starts that come from the base weights, run where every process holds the whole
    model: in plain copies.

    Args:
        tuner: the tuner's settings by name.
        sizes: of the axes tp, pp, cp and ep.
        fsdp: whether weights are sharded over data-parallel ranks.
    """
    if not fsdp and max(sizes.values()) == 1:
        return
    kind, start = tuner["tuner_type"], str(tuner["init_weights"]).lower()
    copies = "plain data parallelism (--fsdp none and all parallel sizes 1) has it"
    if kind not in ("lora", "full"):
        yield (
            "tuner_type",
            f"{kind} starts from, or changes, whole matrices, and here each process holds only a part of the model",
            f"--tuner_type lora; {copies}",
        )
    if kind == "lora" and tuner["use_dora"]:
        yield (
            "use_dora",
            "DoRA needs the length of each whole row of the weights, and here each process holds only a part of the "
            "model",
            f"leave it out; {copies}",
        )
    if kind == "lora" and start not in _STARTS_FROM_SHAPES:
        yield (
            "init_weights",
            f"the start {start} comes from whole weights, and here each process reads only its part of them",
            f"--init_weights true; {copies}",
        )


def _launching(values: Mapping[str, Any], fault: Fault) -> Iterator[Problem]:
    nodes, node, port = values["nnodes"], values["node_rank"], values["master_port"]
    if nodes is not None and nodes < 1:
        yield fault("nnodes", f"nnodes must be at least 1, not {nodes}")
    elif node is not None and (node < 0 or (nodes is not None and node >= nodes)):
        last = f" to {nodes - 1}" if nodes is not None else ""
        yield fault("node_rank nnodes", f"machines are numbered from 0{last}, and node_rank is {node}")
    if port is not None and not 0 < port < 65536:
        yield fault("master_port", f"master_port {port} is not a port", "from 1024 to 65535, such as 29500")
    if values["join_timeout_s"] <= 0:
        yield fault("join_timeout_s", f"join_timeout_s must be above 0, not {values['join_timeout_s']}", "such as 50")
