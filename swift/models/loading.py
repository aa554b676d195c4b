"""Tokenizer and model from a folder that `resolve_model` found. Quiet, strict, and without network.

Strict means: a weight that the checkpoint lacks is an error that names it, never a random tensor. The one exception is
the head of a new classifier, which no checkpoint has: it is drawn from a seed, and the model knows that it was.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.config.model import ModelConfig
from swift.core.errors import ModelError, did_you_mean
from swift.core.logging import get_logger
from swift.models.hub import TOKENIZER_FILES, check_model_source, resolve_model
from swift.models.kinds import (
    CAUSAL_LM,
    Task,
    draw_fresh,
    mark,
    may_be_fresh,
    model_class,
    name_padding,
    note_fresh,
    settle_task,
)
from swift.models.quiet import quiet_transformers

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["check_model_source", "load_model", "load_tokenizer", "resolve_model"]

log = get_logger("models")

NEW_TOKEN_IDS = "new_token_ids"  # attribute of a tokenizer and a model that got new tokens: their ids

# tokens that models carry for padding, best first; those that end a text come last, and only if they aren't eos
_PAD_TOKENS = (
    "<|finetune_right_pad_id|>",
    "<pad>",
    "[PAD]",
    "<|pad|>",
    "<|PAD_TOKEN|>",
    "<|vision_pad|>",
    "<|endoftext|>",
    "<unk>",
)


def load_tokenizer(path: Path | str, config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a model or checkpoint folder, with a pad token and `new_special_tokens`.

    The pad token is the tokenizer's own; else a reserved token of the vocabulary that isn't the end-of-text token; else
    the end-of-text token (padding is never trained, so that is harmless, but it is the last choice).

    Args:
        path: folder with the tokenizer's files.
        config: `new_special_tokens` (tokens, or names of .txt files with one token a line) and `trust_remote_code`.

    Raises:
        ModelError: no tokenizer files, files that can't be read, or no token that could serve as padding.
    """
    from transformers import AutoTokenizer

    path = Path(path)
    if not any((path / name).is_file() for name in (*TOKENIZER_FILES, "tokenizer_config.json")):
        raise ModelError(
            f"{path} holds no tokenizer; missing: {', '.join(TOKENIZER_FILES[:3])} or the like",
            fix="copy the tokenizer files of the base model into the folder",
        )
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(
                str(path), use_fast=True, local_files_only=True, trust_remote_code=config.trust_remote_code
            )
    # tokenizers raises plain Exception for a damaged file, so nothing narrower would do
    except Exception as error:
        raise _load_error(path, "tokenizer", error) from error
    _set_pad_token(tokenizer, path)
    tokens = read_special_tokens(config.new_special_tokens)
    if tokens:
        known = tokenizer.get_vocab()
        tokenizer.add_special_tokens({"additional_special_tokens": tokens}, replace_extra_special_tokens=False)
        new = [token for token in tokens if token not in known]
        setattr(tokenizer, NEW_TOKEN_IDS, tokenizer.convert_tokens_to_ids(new))
    return tokenizer


def read_special_tokens(entries: Iterable[str]) -> list[str]:
    """`--new_special_tokens`: each entry is a token, or a .txt file with one token a line. Duplicates are dropped."""
    tokens: list[str] = []
    for entry in entries:
        if entry.endswith(".txt"):
            file = Path(entry).expanduser()
            try:
                lines = file.read_text(encoding="utf-8-sig").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise ModelError(
                    f"the list of tokens {file} can't be read: {error}", where="--new_special_tokens"
                ) from error
            tokens += [line.strip() for line in lines if line.strip()]
        elif entry.strip():
            tokens.append(entry.strip())
    return list(dict.fromkeys(tokens))


def load_model(
    path: Path | str,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    attn_implementation: str | None = None,
    device: str | torch.device = "cpu",
    tokenizer: PreTrainedTokenizerBase | None = None,
    task: Task = CAUSAL_LM,
    seed: int = 0,
) -> PreTrainedModel:
    """The model in `path`, ready to be tuned or run, in evaluation mode.

    Args:
        path: folder with config.json and weights.
        config: `rope_scaling`, `max_model_len`, `new_special_tokens`, `model_type`, `trust_remote_code` are read.
        dtype: of the weights in memory.
        attn_implementation: a name that transformers' attention interface knows; default: `usual_attention`.
        device: where the weights go.
        tokenizer: the tokenizer in use; the embeddings grow if it has more tokens than they have rows. When None and
            `new_special_tokens` are given, the folder's own tokenizer with those tokens.
        task: what the model is for; the loaded model's `task_of` is this one, completed by what the checkpoint says.
        seed: of a head that the checkpoint doesn't hold; `fresh_parameters` names what was drawn.

    Raises:
        ModelError: weights that are missing, damaged or of the wrong shape, an architecture that isn't known, or a head
            for another number of labels.
    """
    import torch

    path = Path(path)
    if tokenizer is None and config.new_special_tokens:
        tokenizer = load_tokenizer(path, config)
    model_config = load_configuration(path, config)
    task = settle_task(model_config, task, path)
    with load_errors(path, "model"), quiet_transformers():
        loaded: Any = model_class(model_config, task.kind).from_pretrained(
            str(path),
            config=model_config,
            dtype=dtype,
            attn_implementation=attn_implementation or usual_attention(model_config),
            local_files_only=True,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
        )
    model, info = loaded
    mark(model, task)
    missing = set(info["missing_keys"]) & set(model.state_dict())  # an embedding model's pooler is gone by now
    info["missing_keys"] = missing - set(_draw_missing(model, missing, seed))
    check_loaded(path, info)
    if tokenizer is not None:
        grow_embeddings(model, tokenizer)
        name_padding(model, tokenizer.pad_token_id)
    return model.to(torch.device(device)).eval()


def _draw_missing(model: PreTrainedModel, missing: Iterable[str], seed: int) -> list[str]:
    """Give the parameters of a head that no checkpoint holds their first numbers; returns their names."""
    fresh = sorted(name for name in missing if may_be_fresh(model, name))
    for name in fresh:
        parameter = model.get_parameter(name)
        parameter.data.copy_(draw_fresh(name, parameter.shape, model.config, seed))
    note_fresh(model, fresh)
    return fresh


def usual_attention(model_config: PreTrainedConfig) -> str:
    """`sdpa`, or `eager` for a model class that doesn't have it (Gemma 2's soft caps, Mamba)."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model_config), None)
    if known is None:
        known = MODEL_MAPPING.get(type(model_config), None)
    return "eager" if known is not None and not known._supports_sdpa else "sdpa"


def grow_embeddings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Add embedding rows for tokens that have none, each the mean of the old rows; returns how many were added.

    The mean makes the result a function of the checkpoint alone, so a tuned adapter finds the same rows again when it
    is loaded. The ids of new tokens are kept in ``model.new_token_ids`` for the tuner, which trains their rows: those
    added here, and those of new tokens for which the model had spare rows.
    """
    import torch

    table: Any = model.get_input_embeddings()
    old = table.weight.shape[0]
    new = {*range(old, len(tokenizer)), *getattr(tokenizer, NEW_TOKEN_IDS, [])}
    if new:
        setattr(model, NEW_TOKEN_IDS, sorted(new))
    if len(tokenizer) <= old:
        return 0
    with quiet_transformers():
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    embeddings: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    with torch.no_grad():
        for module in embeddings:
            if module is None:
                continue
            module.weight[old:] = module.weight[:old].float().mean(0).to(module.weight.dtype)
            bias = getattr(module, "bias", None)
            if bias is not None:
                bias[old:] = bias[:old].float().mean().to(bias.dtype)
    log.info("added %d rows to the embeddings for new tokens", len(tokenizer) - old)
    return len(tokenizer) - old


def apply_context_settings(model_config: PreTrainedConfig, config: ModelConfig) -> None:
    """Write `--rope_scaling` and `--max_model_len` into the model's configuration.

    A scaling with a `factor` multiplies the longest position; `max_model_len` sets it outright.

    Raises:
        ModelError: the model has no rotary embedding, or uses different ones in different layers.
    """
    text_config = model_config.get_text_config()
    if config.rope_scaling:
        text_config.rope_parameters = _scaled_rope(text_config, config.rope_scaling)
        factor = config.rope_scaling.get("factor")
        if factor:
            original = text_config.rope_parameters.get(
                "original_max_position_embeddings", text_config.max_position_embeddings
            )
            text_config.max_position_embeddings = int(original * float(factor))
    if config.max_model_len:
        text_config.max_position_embeddings = config.max_model_len


def _scaled_rope(text_config: PreTrainedConfig, scaling: dict[str, Any]) -> dict[str, Any]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    present = getattr(text_config, "rope_parameters", None)
    if not present:
        raise ModelError(f"a {text_config.model_type} model has no rotary positions to scale", where="--rope_scaling")
    if any(isinstance(value, dict) for value in present.values()):
        raise ModelError(
            f"a {text_config.model_type} model has different rotary positions in different layers",
            where="--rope_scaling",
            fix="edit rope_parameters in the model's config.json",
        )
    wanted = dict(scaling)
    kind = wanted.pop("type", None) or wanted.get("rope_type")
    known = ["default", *ROPE_INIT_FUNCTIONS]
    if kind not in known:
        hint = did_you_mean(str(kind), known)
        raise ModelError(
            f"--rope_scaling has no kind of scaling called {kind!r}",
            where="--rope_scaling",
            fix=f"{hint} known: {', '.join(sorted(set(known)))}; for example " + '{"rope_type": "yarn", "factor": 2.0}',
        )
    wanted["rope_type"] = kind
    if kind in ("yarn", "longrope", "llama3", "dynamic"):
        wanted.setdefault("original_max_position_embeddings", text_config.max_position_embeddings)
    return {**copy.deepcopy(present), **wanted}


def check_context(model_config: PreTrainedConfig, longest: int, *, first_position: int = 0) -> str | None:
    """Compare the longest example with the positions that a model knows.

    Args:
        model_config: the model's configuration, as `load_model` left it.
        longest: tokens of the longest example.
        first_position: the number of a text's first position, as `swift.models.prepare.first_position` tells it.

    Returns:
        A note when rotary positions go beyond those the model was made for; None when all is well.

    Raises:
        ModelError: each position has a learnt (or stored) vector, and there are too few.
    """
    text_config = model_config.get_text_config()
    limit = getattr(text_config, "max_position_embeddings", None) or getattr(text_config, "n_positions", None)
    rope = getattr(text_config, "rope_parameters", None) or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        original, factor = part.get("original_max_position_embeddings"), part.get("factor")
        if limit and original and factor:
            limit = max(limit, int(original * factor))
    limit = limit - first_position if limit else limit
    if not limit or longest <= limit:
        return None
    if not rope and _has_position_table(text_config):
        raise ModelError(
            f"the longest example has {longest} tokens, and a {text_config.model_type} model has {limit} positions",
            where="--max_length",
            fix=f"--max_length {limit}",
        )
    if not rope:
        return None
    return (
        f"the longest example has {longest} tokens; the model was made for {limit}: answers may suffer there "
        f"(--max_length {limit}, or stretch it with --rope_scaling)"
    )


def _has_position_table(text_config: PreTrainedConfig) -> bool:
    """Whether a model without rotary parameters looks positions up; those with linear biases or states don't."""
    if getattr(text_config, "alibi", False):
        return False
    return not any(name.startswith(("mamba", "ssm", "state_size")) for name in text_config.to_dict())


def check_model_type(given: str | None, actual: str) -> None:
    """Compare an older script's `--model_type` with the model's own; a difference is noted and has no effect."""
    if not given:
        return
    wanted, real = (_letters(name) for name in (given, actual))
    if wanted and (wanted in real or real in wanted or _family(wanted) == _family(real)):
        return
    log.warning("--model_type %s has no effect: the model's own config.json says %s", given, actual)


def _letters(name: str) -> str:
    return "".join(char for char in name.lower() if char.isalnum())


def _family(name: str) -> str:
    """`qwen2moe` and `qwen3` -> `qwen`: the letters before the first digit."""
    for position, char in enumerate(name):
        if char.isdigit():
            return name[:position] or name
    return name


def _set_pad_token(tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    if tokenizer.pad_token_id is not None:
        return
    vocabulary = tokenizer.get_vocab()
    reserved = [token for token in _PAD_TOKENS if token in vocabulary and token != tokenizer.eos_token]
    reserved += [token for token in tokenizer.all_special_tokens if "pad" in token.lower()]
    choice = reserved[0] if reserved else tokenizer.eos_token
    if choice is None:
        raise ModelError(
            f"the tokenizer in {path} has neither a pad token nor an end-of-text token",
            fix="name one in its tokenizer_config.json (pad_token)",
        )
    tokenizer.pad_token = choice


def load_configuration(path: Path, config: ModelConfig) -> PreTrainedConfig:
    """The configuration of the model in a folder, with the user's settings of context and positions in it."""
    from transformers import AutoConfig

    try:
        with quiet_transformers():
            model_config = AutoConfig.from_pretrained(
                str(path), local_files_only=True, trust_remote_code=config.trust_remote_code
            )
    except (ValueError, KeyError, OSError, ImportError, TypeError) as error:
        raise _load_error(path, "configuration", error) from error
    check_model_type(config.model_type, model_config.model_type)
    apply_context_settings(model_config, config)
    return model_config


@contextmanager
def load_errors(path: Path, what: str) -> Iterator[None]:
    """Turn whatever reading a model's files raises into a `ModelError` that names the folder."""
    try:
        yield
    except _load_exceptions() as error:
        raise _load_error(path, what, error) from error


def _load_exceptions() -> tuple[type[Exception], ...]:
    import pickle

    from safetensors import SafetensorError

    return (
        SafetensorError,
        ValueError,
        KeyError,
        RuntimeError,
        OSError,
        ImportError,
        TypeError,
        pickle.UnpicklingError,
        EOFError,
    )


def _load_error(path: Path, what: str, error: Exception) -> ModelError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines)
    if "trust_remote_code" in text:
        return ModelError(
            f"the model in {path} comes with its own Python code",
            fix="--trust_remote_code true, if you trust its author",
        )
    fix = "copy or download the folder again; a newer transformers may know newer architectures"
    return ModelError(f"the {what} in {path} can't be loaded: {type(error).__name__}: {text[:400]}", fix=fix)


def check_loaded(path: Path, info: dict[str, Any]) -> None:
    """Refuse a checkpoint that left parameters without a value."""
    missing = sorted(info.get("missing_keys") or ())
    mismatched = sorted(
        str(entry[0]) if isinstance(entry, tuple) else str(entry) for entry in info.get("mismatched_keys") or ()
    )
    if missing or mismatched:
        bad = missing or mismatched
        shown = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
        kind = "lacks weights" if missing else "has weights of another shape than its config.json says"
        unexpected = sorted(info.get("unexpected_keys") or ())
        hint = f"; it holds unknown ones instead, such as {unexpected[0]}" if unexpected else ""
        raise ModelError(
            f"the model in {path} {kind}: {shown}{hint}",
            fix="copy or download it again; an adapter goes to --adapters, and a classifier or encoder has no head "
            "that predicts tokens",
        )
