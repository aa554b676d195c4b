"""Merging an adapter into its base model, with proof: the merged model's logits are compared with the unmerged ones.

In three steps: in memory, in float32, every logit must agree, which shows that the merge is the same function; the
files are read back and must give what was written; and rounding to a half precision, if that is what is stored, may
move the logits a little on the whole (single logits move by a tenth of the spread, with any bf16 model). A folder
appears only if all hold. Of a classifier, the scores at every token are compared; of an embedding model, the states.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, TrainableTokensWrapper
from torch import nn

from swift.config.inference import MergeConfig
from swift.config.model import ModelConfig
from swift.core.errors import ModelError, UsageError
from swift.core.files import disk_errors, fsync_dir, fsync_tree, is_disk_fault, require_space
from swift.models.adapters import Swift, read_adapter_config
from swift.models.head import find_decoder, find_head
from swift.models.hub import TOKENIZER_FILES, check_model_folder, is_adapter_folder
from swift.models.kinds import CAUSAL_LM, Task, read_task, task_of, write_task
from swift.models.loading import load_model, load_tokenizer
from swift.models.quiet import quiet_transformers
from swift.models.smollm2 import readable

_TEXTS = (
    "The capital of France is Paris, and the capital of Japan is Tokyo.",
    "def add(a: int, b: int) -> int:\n    return a + b\n",
    "Q: 17 * 24 = ?\nA: 408. Because 17 * 24 = 17 * 20 + 17 * 4.",
    "你好！请用一句话介绍你自己。",
)
_RANDOM_PROBES, _PROBE_TOKENS, _PROBE_SEED = 2, 48, 20260101
FP32_TOLERANCE, HALF_TOLERANCE = 1e-4, 5e-2


@dataclass(frozen=True)
class Agreement:
    """How far apart two models are on the probes.

    Attributes:
        max_difference: largest absolute difference of two logits.
        relative: that, divided by the spread (standard deviation) of the first model's logits.
        rms: root mean square of the differences at a position, by the spread, averaged over positions.
        top1: share of positions where both prefer the same next token.
        tokens: positions compared.
    """

    max_difference: float
    relative: float
    rms: float
    top1: float
    tokens: int


@dataclass(frozen=True)
class MergeReport:
    """What a merge did: `merged` compares in memory in float32, `written` what was read back from the files."""

    base: Path
    adapter: Path
    output: Path
    dtype: str
    tolerance: float
    merged: Agreement
    written: Agreement


def merge_adapter(
    base: Path,
    adapter: Path,
    output: Path,
    *,
    model_config: ModelConfig,
    merge_config: MergeConfig,
    extra_files: Sequence[Path] = (),
) -> MergeReport:
    """Write `base` with `adapter` folded in to `output`: weights, config, tokenizer, chat template, generation config.

    Args:
        base: folder of the model that the adapter was trained on.
        adapter: adapter folder; its tokenizer is taken if it has one, else the base model's.
        output: folder to make. It appears complete or not at all.
        model_config: `torch_dtype` (default: the base model's own), positions and new tokens, as when training.
        merge_config: `exist_ok`, `max_shard_size`, `merge_tolerance`.
        extra_files: files to copy into the folder.

    Raises:
        ModelError: the adapter doesn't fit or can't be merged, or the logits differ by more than the tolerance; nothing
            is written then.
        UsageError: `output` is in the way.
        SwiftError: the disk is full, as seen before the merge or while writing.
    """
    _check_output(base, adapter, output, merge_config.exist_ok)
    settings = read_adapter_config(adapter)
    if settings.is_prompt_learning:
        raise ModelError(
            f"a {settings.peft_type} adapter works on the prompt: it has no weights to merge", where=str(adapter)
        )
    has_tokenizer = any((adapter / name).is_file() for name in TOKENIZER_FILES)
    tokenizer = load_tokenizer(adapter if has_tokenizer else base, model_config)
    dtype = _stored_dtype(base, model_config)
    task = read_task(adapter) or CAUSAL_LM
    model: Any = load_model(base, model_config, dtype=torch.float32, tokenizer=tokenizer, task=task)
    task = task_of(model)
    require_space(output, sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize)
    model = Swift.from_pretrained(model, adapter)
    probes = probe_tokens(tokenizer, model.get_base_model().get_input_embeddings().weight.shape[0])
    expected = probe_logits(model, probes)
    model, agreement = merge_checked(model, probes, expected, tolerance=merge_config.merge_tolerance or FP32_TOLERANCE)
    tolerance = merge_config.merge_tolerance or (FP32_TOLERANCE if dtype == torch.float32 else HALF_TOLERANCE)
    for precision in (dtype, torch.float32):  # parameters only: position tables are float32 in every model
        _convert(model, precision)
    rounded = probe_logits(model, probes)
    _convert(model, dtype)
    aside = output.with_name(f".{output.name}.merging-{os.getpid()}")
    try:
        _write(model, tokenizer, base, aside, merge_config.max_shard_size)
        write_task(aside, task)
        for file in extra_files:
            shutil.copyfile(file, aside / file.name)
        del model  # two models in memory at most
        answers = probe_logits(_read_back(aside, model_config, dtype, task), probes)
        _require(compare(rounded, answers), FP32_TOLERANCE, "the files as read back", "the model that was written")
        written = compare(expected, answers)
        _require(written, tolerance, f"the model in {dtype}", by_rms=dtype != torch.float32)
        fsync_tree(aside)
        _put_in_place(aside, output)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return MergeReport(base, adapter, output, str(dtype).removeprefix("torch."), tolerance, agreement, written)


def merge_checked(
    model: nn.Module, probes: list[list[int]], expected: list[torch.Tensor] | None = None, *, tolerance: float
) -> tuple[Any, Agreement]:
    """Merge the active adapters in memory and compare the logits before and after.

    Args:
        model: a model wrapped with adapters; used up.
        probes: token sequences, as from `probe_tokens`.
        expected: logits of the unmerged model on them, if they are known already.
        tolerance: largest `Agreement.relative` allowed.

    Raises:
        ModelError: peft can't merge this kind, or the logits differ by more.
    """
    unmerged = expected if expected is not None else probe_logits(model, probes)
    separate = _separate_head(model)
    with quiet_transformers():
        merged: Any = Swift.merge_and_unload(model)
    if separate:
        _join_head(merged)
    agreement = compare(unmerged, probe_logits(merged, probes))
    _require(agreement, tolerance, "the merged model")
    return merged, agreement


def probe_tokens(tokenizer: Any, vocab_size: int) -> list[list[int]]:
    """Token sequences to compare models on: texts of several kinds, and random tokens from the whole vocabulary."""
    texts = [tokenizer.encode(text)[:_PROBE_TOKENS] for text in _TEXTS]
    generator = torch.Generator().manual_seed(_PROBE_SEED)
    usable = min(vocab_size, len(tokenizer))
    noise = torch.randint(usable, (_RANDOM_PROBES, _PROBE_TOKENS), generator=generator).tolist()
    added = list(range(max(0, usable - 8), usable))  # the newest tokens: rows that an adapter may have trained
    return [tokens for tokens in texts if tokens] + noise + [added]


@torch.no_grad()
def probe_logits(model: Any, probes: list[list[int]]) -> list[torch.Tensor]:
    """Logits [tokens, vocab] in float32 for each sequence on its own, in evaluation mode.

    Of a classifier, [tokens, labels]; of an embedding model, hidden states.
    """
    model.eval()
    device = next(model.parameters()).device
    inner: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    rows = (torch.tensor([tokens], device=device) for tokens in probes)
    if task_of(inner).kind == "causal_lm":
        return [model(input_ids=row, use_cache=False).logits[0].float().cpu() for row in rows]
    decoder, head = find_decoder(inner), find_head(inner)
    states = (decoder(input_ids=row, use_cache=False).last_hidden_state[0] for row in rows)
    return [head.logits(state).float().cpu() for state in states]


def compare(expected: list[torch.Tensor], actual: list[torch.Tensor]) -> Agreement:
    """How far `actual` is from `expected`; not-a-number counts as infinitely far."""
    gaps = [float((left - right).abs().max()) for left, right in zip(expected, actual, strict=True)]
    largest = max(float("inf") if math.isnan(gap) else gap for gap in gaps)
    same = sum(int((left.argmax(-1) == right.argmax(-1)).sum()) for left, right in zip(expected, actual, strict=True))
    tokens = sum(len(left) for left in expected)
    spread = float(torch.cat([left.flatten() for left in expected]).std())
    spread = max(spread, 1e-12)
    errors = torch.cat([(left - right).square().mean(-1).sqrt() for left, right in zip(expected, actual, strict=True)])
    return Agreement(largest, largest / spread, float(errors.mean()) / spread, same / tokens, tokens)


def _require(
    agreement: Agreement, tolerance: float, what: str, other: str = "the unmerged model", *, by_rms: bool = False
) -> None:
    """Raise if a model differs by more than `tolerance`: anywhere, or (`by_rms`, for half precision) on the whole."""
    measured = agreement.rms if by_rms else agreement.relative
    if measured <= tolerance:
        return
    raise ModelError(
        f"{what} would answer differently: the logits differ from those of {other} by {measured:.2e} of their spread "
        f"(allowed: {tolerance:.0e}); the first choice agrees at {agreement.top1:.1%} of {agreement.tokens} places",
        where="--merge_tolerance",
        fix="nothing was written; use the adapter unmerged, merge in --torch_dtype float32, or allow more",
    )


def _convert(model: nn.Module, dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _separate_head(model: Any) -> bool:
    """Give a tied output head a weight of its own if it and the embeddings are adapted apart; True if it did.

    Merging would write both changes into the shared weight, where the unmerged model sees one of them at each end.
    """
    base = model.get_base_model()
    table, head = base.get_input_embeddings(), base.get_output_embeddings()
    if head is None or (type(table) is nn.Embedding and type(head) is nn.Linear):
        return False
    if isinstance(head, TrainableTokensWrapper) and head.token_adapter.tied_adapter is not None:
        return False  # the same rows, changed in the same way
    inner = _inner_layer(head)
    if inner.weight.data_ptr() not in {parameter.data_ptr() for parameter in table.parameters()}:
        return False
    inner.weight = nn.Parameter(inner.weight.detach().clone(), requires_grad=False)
    return True


def _inner_layer(module: Any) -> Any:
    """The base model's own layer inside an adapter's wrappers."""
    while True:
        if isinstance(module, TrainableTokensWrapper):
            module = module.token_adapter
        elif isinstance(module, AuxiliaryTrainingWrapper):
            module = module.original_module
        if not isinstance(module, BaseTunerLayer):
            return module
        module = module.get_base_layer()


def _join_head(model: Any) -> None:
    """Tie the head again if the merge left both weights equal; else say in the configuration that they differ."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if torch.equal(table.weight, head.weight):
        head.weight = table.weight
    else:
        model.config.get_text_config().tie_word_embeddings = False
        model.config.tie_word_embeddings = False


def _stored_dtype(base: Path, config: ModelConfig) -> torch.dtype:
    """The precision to write: as asked, else that of the base model's files."""
    from transformers import AutoConfig

    if config.torch_dtype is not None:
        return getattr(torch, config.torch_dtype)
    with quiet_transformers():
        stored = AutoConfig.from_pretrained(
            str(base), local_files_only=True, trust_remote_code=config.trust_remote_code
        ).dtype
    return stored if isinstance(stored, torch.dtype) else torch.float32


def _write(model: Any, tokenizer: Any, base: Path, folder: Path, max_shard_size: str) -> None:
    needed = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    with disk_errors(folder, needed):
        folder.mkdir(parents=True)
        with quiet_transformers():
            try:
                model.save_pretrained(str(folder), max_shard_size=max_shard_size)
            except (RuntimeError, ValueError) as error:
                if is_disk_fault(error):
                    raise
                raise ModelError(f"the merged model can't be written to {folder.parent}: {error}") from error
            tokenizer.save_pretrained(str(folder))
        for code in base.glob("*.py"):  # models that come with their own code
            shutil.copy2(code, folder / code.name)
    readable(folder)


def _read_back(folder: Path, config: ModelConfig, dtype: torch.dtype, task: Task) -> Any:
    plain = ModelConfig(trust_remote_code=config.trust_remote_code)
    # in float32, so that the comparison sees the rounding of the weights and not that of the arithmetic
    return load_model(check_model_folder(folder), plain, dtype=dtype, task=task).float()


def _check_output(base: Path, adapter: Path, output: Path, exist_ok: bool) -> None:
    if output.resolve() in (base.resolve(), adapter.resolve()):
        raise UsageError(
            "the merged model can't replace what it is made from", where="--output_dir", fix="another folder"
        )
    if not output.exists():
        return
    if not exist_ok:
        raise UsageError(
            f"{output} exists", where="--output_dir", fix="--exist_ok true replaces it, or name another folder"
        )
    replaceable = output.is_dir() and ((output / "config.json").is_file() or not any(output.iterdir()))
    if not replaceable or is_adapter_folder(output):
        raise UsageError(
            f"{output} is no model folder, so it is not replaced", where="--output_dir", fix="another folder"
        )


def _put_in_place(aside: Path, output: Path) -> None:
    """Rename the finished folder to `output`; an older one is moved away first and removed last."""
    older = output.with_name(f".{output.name}.replaced-{os.getpid()}")
    if output.exists():
        output.rename(older)
    aside.rename(output)
    fsync_dir(output.parent)
    shutil.rmtree(older, ignore_errors=True)
