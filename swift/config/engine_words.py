"""Flags by which ms-swift's scripts speak to vLLM, SGLang and LMDeploy, as words of these engines' command lines.

They are kept with the engine's name before them (`vllm --gpu-memory-utilization=0.8`), so that a flag for another
engine than the one that runs is found. What our own settings say is translated to those; what an engine doesn't know
any more, or what is so in any case, is said.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from swift.config.values import FALSE_WORDS, NONE_WORDS, TRUE_WORDS, Words

ENGINES = ("vllm", "sglang", "lmdeploy")
SETTING = "engine_words"

Kind = Literal["value", "json", "switch", "pair"]  # pair: a switch that has a --no- form


@dataclass(frozen=True)
class Meaning:
    """What a flag comes to.

    Attributes:
        settings: ours, in its place.
        words: of the engine's command line, its name first.
        note: why it is so in any case.
        fault: why it can't be had.
        fix: what to do then.
    """

    settings: tuple[tuple[str, Words], ...] = ()
    words: tuple[str, ...] = ()
    note: str | None = None
    fault: str | None = None
    fix: str | None = None


_WORDS: dict[str, dict[str, tuple[str, Kind]]] = {
    "vllm": {
        "gpu_memory_utilization": ("--gpu-memory-utilization", "value"),
        "tensor_parallel_size": ("--tensor-parallel-size", "value"),
        "pipeline_parallel_size": ("--pipeline-parallel-size", "value"),
        "data_parallel_size": ("--data-parallel-size", "value"),
        "enable_expert_parallel": ("--enable-expert-parallel", "pair"),
        "disable_custom_all_reduce": ("--disable-custom-all-reduce", "pair"),
        "enforce_eager": ("--enforce-eager", "pair"),
        "limit_mm_per_prompt": ("--limit-mm-per-prompt", "json"),
        "enable_prefix_caching": ("--enable-prefix-caching", "pair"),
        "quantization": ("--quantization", "value"),
        "disable_cascade_attn": ("--disable-cascade-attn", "pair"),
        "mm_processor_cache_gb": ("--mm-processor-cache-gb", "value"),
        "speculative_config": ("--speculative-config", "json"),
    },
    "sglang": {
        "tp_size": ("--tp-size", "value"),
        "pp_size": ("--pp-size", "value"),
        "dp_size": ("--dp-size", "value"),
        "ep_size": ("--ep-size", "value"),
        "mem_fraction_static": ("--mem-fraction-static", "value"),
        "disable_cuda_graph": ("--disable-cuda-graph", "switch"),
        "quantization": ("--quantization", "value"),
        "kv_cache_dtype": ("--kv-cache-dtype", "value"),
        "enable_dp_attention": ("--enable-dp-attention", "switch"),
        "disable_custom_all_reduce": ("--disable-custom-all-reduce", "switch"),
        "speculative_algorithm": ("--speculative-algorithm", "value"),
        "speculative_num_steps": ("--speculative-num-steps", "value"),
        "speculative_eagle_topk": ("--speculative-eagle-topk", "value"),
        "speculative_num_draft_tokens": ("--speculative-num-draft-tokens", "value"),
    },
    "lmdeploy": {
        "tp": ("--tp", "value"),
        "cache_max_entry_count": ("--cache-max-entry-count", "value"),
        "quant_policy": ("--quant-policy", "value"),
        "vision_batch_size": ("--vision-max-batch-size", "value"),
    },
}
_SETTINGS: dict[str, dict[str, str]] = {
    "vllm": {"max_model_len": "max_model_len"},
    "sglang": {"context_length": "max_model_len"},
    "lmdeploy": {"session_len": "max_model_len"},
}
_NOTES = {"vllm_use_async_engine": "vLLM is run as a server, whose engine is asynchronous"}
_GONE = {
    "vllm_reasoning_parser": "leave it out: thoughts are told from answers by the model's template",
    "sglang_enable_ep_moe": "SGLang has it no more: --sglang_ep_size says how many share the experts",
}
_ONE_ENGINE = {"gpu_memory_utilization": "vllm_gpu_memory_utilization"}  # the older name without the engine's


def meaning(name: str, words: Words) -> Meaning | None:
    """What a flag comes to; None for one that isn't an engine's.

    Args:
        name: without dashes, with underscores.
        words: its value; empty for a bare flag.
    """
    name = _ONE_ENGINE.get(name, name)
    engine, _, own = name.partition("_")
    value = " ".join(words) or "true"
    if engine not in ENGINES:
        return None
    if name in _NOTES:
        return Meaning(note=_NOTES[name])
    if name in _GONE:
        off = value.lower() in FALSE_WORDS | NONE_WORDS
        return Meaning(note="off") if off else Meaning(fault=f"--{name} can't be had", fix=_GONE[name])
    if own in _SETTINGS[engine]:
        # the empty word keeps the engine's name, so that one for another engine is found
        return Meaning(settings=((_SETTINGS[engine][own], words),), words=(engine,))
    if own == "engine_kwargs":
        return _of_mapping(engine, name, value)
    if own not in _WORDS[engine]:
        return None
    return _of_word(engine, name, *_WORDS[engine][own], value)


def _of_word(engine: str, name: str, word: str, kind: Kind, value: str) -> Meaning:
    lowered = value.lower()
    if lowered in NONE_WORDS:
        return Meaning(words=(engine,))
    if kind in ("switch", "pair"):
        if lowered in TRUE_WORDS:
            return Meaning(words=(engine, word))
        if lowered in FALSE_WORDS:
            off = (f"--no-{word.removeprefix('--')}",) if kind == "pair" else ()
            return Meaning(words=(engine, *off))
        return Meaning(fault=f"--{name}: {value!r} is neither true nor false", fix="true or false")
    if kind == "json":
        try:
            json.loads(value)
        except ValueError as error:
            return Meaning(fault=f"--{name}: {value!r} is no JSON: {error}", fix="quote it: '{\"image\": 2}'")
    return Meaning(words=(engine, f"{word}={value}"))


def _of_mapping(engine: str, name: str, value: str) -> Meaning:
    """`{"max_logprobs": 5, "enforce_eager": true}`."""
    try:
        given = json.loads(value)
        if not isinstance(given, dict):
            raise ValueError("it is no mapping")
    except ValueError as error:
        return Meaning(fault=f"--{name}: {value!r} is no JSON mapping: {error}", fix="or say it with --engine_args")
    words = []
    for key, each in given.items():
        word = f"--{key.replace('_', '-')}"
        if isinstance(each, bool):
            words.append(word if each else f"--no-{word.removeprefix('--')}")
        elif each is not None:
            words.append(f"{word}={each if isinstance(each, str) else json.dumps(each)}")
    return Meaning(words=(engine, *words))


def kept(found: Meaning) -> Words:
    """How words are kept in the setting: one entry for each, the engine's name before it."""
    engine, *words = found.words
    return Words(f"{engine} {word}" for word in words) if words else Words((engine,))


def words_for(entries: list[str]) -> list[str]:
    """The words of the command line."""
    return [word for entry in entries for _, _, word in [entry.partition(" ")] if word]


def of_others(entries: list[str], engine: str) -> Iterator[tuple[str, str]]:
    """(engine, word or nothing) of entries for another engine than this one."""
    for entry in dict.fromkeys(entries):
        name, _, word = entry.partition(" ")
        if name != engine:
            yield name, word
