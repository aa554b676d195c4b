"""What can be wrong with how answers are generated and with what runs the model, known from settings alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from swift.config.adaptive_checks import adaptive_faults
from swift.config.engine import EngineConfig
from swift.config.engine_words import ENGINES, of_others
from swift.config.files import what_is_there
from swift.config.resolve import Problem

Fault = Callable[..., Problem]

ENGINE_RANGES: dict[str, tuple[float, float | None, bool, bool]] = {
    "max_new_tokens": (1, None, True, True),
    "min_new_tokens": (0, None, True, True),
    "temperature": (0, None, True, True),
    "top_p": (0, 1, False, True),
    "top_k": (0, None, True, True),
    "min_p": (0, 1, True, True),
    "repetition_penalty": (0, None, False, True),
    "presence_penalty": (-2, 2, True, True),
    "frequency_penalty": (-2, 2, True, True),
    "length_penalty": (-10, 10, True, True),
    "num_beams": (1, None, True, True),
    "num_return_sequences": (1, None, True, True),
    "top_logprobs": (0, None, True, True),
    "max_lora_rank": (1, None, True, True),
    "max_batch_size": (1, None, True, True),
    "max_batch_tokens": (1, None, True, True),
    "kv_cache_gib": (0, None, False, True),
    "block_size": (1, None, True, True),
    "num_draft_tokens": (1, None, True, True),
    "tensor_parallel_size": (1, None, True, True),
    "max_latency_ms": (0, None, False, True),
    "adaptive_latency_ms": (0, None, False, True),
    "adaptive_concurrency": (1, None, True, True),
    "adaptive_max_loss_increase": (0, None, True, True),
}
STRUCTURES = (
    "structured_outputs_json",
    "structured_outputs_regex",
    "structured_outputs_choice",
    "structured_outputs_grammar",
)
_PAGED_ONLY = (
    "max_batch_tokens", "kv_cache_gib", "kv_cache_dtype", "block_size", "enable_prefix_caching", "weight_format",
    "speculative", "draft_model", "num_draft_tokens", "max_latency_ms", "warmup_file", "tensor_parallel_size",
    "skip_layers", "adaptive",
)  # fmt: skip


def paged_settings(config: EngineConfig) -> list[str]:
    """The settings that somebody changed and that only the paged engine (`--infer_backend swift`) reads."""
    usual = EngineConfig()
    return [name for name in _PAGED_ONLY if getattr(config, name) != getattr(usual, name)]


def engine_faults(values: Mapping[str, Any], fault: Fault) -> Iterator[Problem]:
    """Faults of generation and engine settings; none for a command that has no such settings."""
    if "num_beams" in values:
        yield from _generation(values, fault)
        yield from _structures(values, fault)
    if "infer_backend" in values:
        yield from _engine(values, fault)


def _generation(values: Mapping[str, Any], fault: Fault) -> Iterator[Problem]:
    most, least = values["max_new_tokens"], values["min_new_tokens"]
    if most is not None and least > most:
        yield fault("min_new_tokens max_new_tokens", f"min_new_tokens {least} is more than max_new_tokens {most}")
    if values["top_logprobs"] is not None and not values["logprobs"]:
        yield fault("top_logprobs", "top_logprobs says nothing without logprobs", "--logprobs true")
    if values["num_return_sequences"] > 1 and values["temperature"] == 0:
        message = f"{values['num_return_sequences']} answers at temperature 0 would be the same"
        yield fault("num_return_sequences temperature", message, "give a temperature above 0")
    if values["num_beams"] == 1:
        if values["length_penalty"] != 1:
            yield fault("length_penalty", "length_penalty is one of beam search", "--num_beams 4, or leave it out")
        return
    if values["stream"]:
        yield fault("stream num_beams", "beam search can't stream", "--num_beams 1, or --stream false")
    if values["logprobs"]:
        yield fault("logprobs num_beams", "log-probabilities of single tokens don't exist in beam search")
    if values["num_return_sequences"] > 1:
        yield fault("num_return_sequences num_beams", "beam search gives one answer", "leave out num_beams to sample")


def _structures(values: Mapping[str, Any], fault: Fault) -> Iterator[Problem]:
    given = [name for name in STRUCTURES if values[name]]
    if len(given) > 1:
        yield fault(" ".join(given), f"{' and '.join(given)} both say what answers look like", "keep one of them")
    if given and values["num_beams"] > 1:
        yield fault(f"{given[0]} num_beams", "beam search can't keep to a form", "leave out num_beams")
    schema, grammar = values["structured_outputs_json"], values["structured_outputs_grammar"]
    if schema and schema != "object" and not schema.lstrip().startswith("{"):
        yield from _schema_file(Path(schema).expanduser(), fault)
    elif schema and schema != "object":
        try:
            json.loads(schema)
        except ValueError as error:
            yield fault("structured_outputs_json", f"the schema in structured_outputs_json is no JSON: {error}")
    if grammar and not Path(grammar).expanduser().is_file():
        path = Path(grammar).expanduser()
        yield fault("structured_outputs_grammar", f"there is no file {path} with a grammar", what_is_there(path))


def _schema_file(path: Path, fault: Fault) -> Iterator[Problem]:
    if not path.is_file():
        yield fault("structured_outputs_json", f"there is no file {path} with a schema", what_is_there(path))
        return
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        yield fault("structured_outputs_json", f"{path} is no JSON schema: {error}")


def _engine(values: Mapping[str, Any], fault: Fault) -> Iterator[Problem]:
    yield from adaptive_faults(values, fault)
    if values["skip_layers"] and min(values["skip_layers"]) < 0:
        yield fault("skip_layers", "layers are counted from 0", "--skip_layers 28 29, say")
    if values["skip_layers"] and values["tensor_parallel_size"] > 1:
        yield fault("skip_layers tensor_parallel_size", "a model over several processes runs with all its layers")
    if values["speculative"] == "draft" and not values["draft_model"]:
        yield fault("speculative", "speculative draft needs a smaller model", "--draft_model FOLDER_OR_ID")
    if values["draft_model"] and values["speculative"] != "draft":
        yield fault("draft_model", "draft_model does nothing without speculative draft", "--speculative draft")
    warmup = values["warmup_file"]
    if warmup and not values["enable_prefix_caching"]:
        yield fault("warmup_file enable_prefix_caching", "warmup_file has nowhere to go without the prefix cache")
    if warmup and not Path(warmup).expanduser().exists():
        path = Path(warmup).expanduser()
        yield fault("warmup_file", f"there is no file {path} with prompts", what_is_there(path))
    yield from _words(values, fault)
    config = EngineConfig(**{member.name: values[member.name] for member in fields(EngineConfig)})
    attention = values.get("attn_impl", "auto")
    if values["infer_backend"] == "transformers":
        for name in paged_settings(config):
            yield fault(
                f"{name} infer_backend",
                f"{name} is a setting of the paged engine, and infer_backend is transformers",
                f"--infer_backend swift, or leave out {name}",
            )
    elif values["infer_backend"] == "auto" and attention != "auto":
        for name in paged_settings(config):
            yield fault(
                f"{name} attn_impl",
                f"{name} is a setting of the paged engine, and attn_impl {attention} is one of transformers' generate",
                "keep one of them",
            )


def _words(values: Mapping[str, Any], fault: Fault) -> Iterator[Problem]:
    """What is said to an engine of another project."""
    backend = values["infer_backend"]
    for engine, word in of_others(values["engine_words"], backend):
        said = f"{word.partition('=')[0]} is a word of {engine}'s" if word else f"a setting of {engine}'s was given"
        yield fault(
            "engine_words infer_backend", f"{said}, and infer_backend is {backend}", f"--infer_backend {engine}"
        )
    if backend in ("swift", "transformers"):
        for name in ("engine_python", "engine_url", "engine_args"):
            if values[name]:
                message = f"{name} is about engines of other projects, and infer_backend is {backend}"
                yield fault(f"{name} infer_backend", message, f"leave out {name}, or --infer_backend vllm, say")
    if values["engine_url"]:
        for name in ("engine_python", "engine_args"):
            if values[name]:
                message = f"the server of engine_url runs already, so {name} does nothing"
                yield fault(f"{name} engine_url", message, "keep one of the two")
        if any(" " in entry for entry in values["engine_words"]) and backend in ENGINES:
            message = "the server of engine_url runs already, and can't be told how to start"
            yield fault("engine_words engine_url", message, f"leave out the {backend}_ flags")
