"""From settings to an engine: which base model, which adapter, whose tokenizer and template, where and how precise.

In two steps, since the first one is cheap: `prepare` finds the folders and reads the tokenizer, which is enough to know
what a result file belongs to; `Prepared.load` reads the weights.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.config import InferConfig, build_config, to_flat
from swift.config.engine_checks import paged_settings
from swift.config.model import ModelConfig
from swift.core.devices import Device, detect_device
from swift.core.errors import ModelError, UsageError
from swift.core.logging import get_logger, local_rank
from swift.data.encoding.encode import ChatEncoder
from swift.data.encoding.units import UnitEncoder
from swift.inference.engine import Engine
from swift.inference.heads import Judge, make_judge, served_task
from swift.inference.scoring import Scorer
from swift.inference.warmup import warm_up
from swift.models.adapters import Swift, read_adapter_config
from swift.models.gguf import find_gguf, gguf_folder
from swift.models.hub import TOKENIZER_FILES, resolve_model
from swift.models.kinds import CAUSAL_LM, Task, fresh_words
from swift.models.loading import load_model, load_tokenizer
from swift.models.merge import FP32_TOLERANCE, HALF_TOLERANCE, merge_checked, probe_tokens
from swift.models.openvino import find_openvino

if TYPE_CHECKING:
    import torch

log = get_logger("inference")

_QUEUED = 4  # batches that the backend is given at a time: it may sort them, and is never out of work
_AHEAD = 4  # as many times that number of prompts are begun beyond a long answer; what a kill can lose
_IDENTITY_SUFFIXES = (".json", ".safetensors", ".bin", ".gguf", ".jinja", ".model", ".txt")


@dataclass(frozen=True)
class Prepared:
    """Everything of an engine but the weights.

    Attributes:
        config: the settings, with the model filled in.
        base: folder of the base model.
        adapter: folder of the adapter, if there is one.
        tokenizer, encoder: as trained, where a checkpoint says so.
        device, dtype: where the weights go, and as what.
        judge: of a model with a head of its own (classes, vectors, scores); None where answers are generated.
    """

    config: InferConfig
    base: Path
    adapter: Path | None
    tokenizer: Any
    encoder: ChatEncoder | UnitEncoder
    device: Device
    dtype: torch.dtype
    judge: Judge | None = None

    def identity(self) -> dict[str, Any]:
        """What an answer depends on, as plain JSON values: model, adapter, encoding and precision."""
        return {
            "model": str(self.base),
            "model_files": folder_hash(self.base),
            "adapter": str(self.adapter) if self.adapter else None,
            "adapter_files": folder_hash(self.adapter) if self.adapter else None,
            "merge_lora": self.config.infer.merge_lora,
            "encoding": self.encoder.fingerprint(),
            "dtype": str(self.dtype).removeprefix("torch."),
            "rope_scaling": self.config.model.rope_scaling,
            "max_model_len": self.config.model.max_model_len,
            **(self._engine_identity() if self.judge is None else {"task": self.judge.name, **vars(self.config.task)}),
        }

    def _engine_identity(self) -> dict[str, Any]:
        """What of the engine an answer can depend on. Sizes of batches and caches are none of it."""
        from swift.inference.backends.choose import wanted_backend

        engine = self.config.engine
        return {
            "infer_backend": wanted_backend(self.config),
            "kv_cache_dtype": engine.kv_cache_dtype,
            "weight_format": engine.weight_format,
            **({"skip_layers": engine.skip_layers} if engine.skip_layers else {}),
        }

    def load(self) -> Engine:
        """Read the weights, start what runs them, and make the engine.

        Raises:
            ModelError: weights that don't fit, or a merge that changes the answers.
        """
        from swift.inference.backends.choose import running_backend

        assert isinstance(self.encoder, ChatEncoder)  # where there is no judge
        backend = running_backend(self)
        in_flight = _QUEUED * self.config.engine.max_batch_size
        engine = Engine(
            backend,
            self.tokenizer,
            self.encoder,
            max_in_flight=in_flight,
            max_ahead=_AHEAD * in_flight,
            defaults=self.model_settings(),
        )
        if self.config.engine.warmup_file is not None:
            try:
                warm_up(engine, self.config.engine.warmup_file)
            except BaseException:
                engine.close()
                raise
        return engine

    def weights(self) -> Any:
        """The generating model with its adapter, merged if that was asked for, without the layers to skip.

        Raises:
            ModelError: weights that don't fit, or a merge that changes the answers.
            UsageError: layers to skip that the model doesn't have.
        """
        from peft import PeftModel

        from swift.inference.adaptive.layers import leave_out

        model = self._weights(CAUSAL_LM)
        inner: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        leave_out(inner, self.config.engine.skip_layers)
        return model

    def draft_weights(self) -> Any:
        """The smaller model of `--draft_model`, placed and typed as the model.

        Raises:
            ModelError: weights that don't fit.
        """
        settings = ModelConfig(model=self.config.engine.draft_model, use_hf=self.config.model.use_hf)
        return load_model(
            resolve_model(settings), settings, dtype=self.dtype, device=self.device.torch_device, task=CAUSAL_LM
        )

    def model_settings(self) -> Any:
        """The model's own `generation_config` (of transformers), read without the weights."""
        from transformers import AutoConfig, GenerationConfig

        if (self.base / "generation_config.json").is_file():
            return GenerationConfig.from_pretrained(str(self.base), local_files_only=True)
        trusted = self.config.model.trust_remote_code
        config = AutoConfig.from_pretrained(str(self.base), local_files_only=True, trust_remote_code=trusted)
        return GenerationConfig.from_model_config(config)

    def stop_token_ids(self) -> list[int]:
        """What ends an answer: end tokens of the chat encoding and of the model's own settings, each once."""
        assert isinstance(self.encoder, ChatEncoder)
        own = self.model_settings().eos_token_id
        own = [] if own is None else own if isinstance(own, list) else [own]
        return list(dict.fromkeys([*self.encoder.stop_token_ids(), *own]))

    def load_scorer(self) -> Scorer:
        """The same of a model with a head of its own.

        Raises:
            ModelError: as `load`; or the head isn't there.
            UsageError: vectors are shorter than `mrl_dim`.
        """
        assert self.judge is not None
        model = self._weights(self.judge.task)
        size, wanted = model.config.get_text_config().hidden_size, self.config.task.mrl_dim
        if wanted is not None and wanted > size:
            raise UsageError(
                f"the vectors have {size} numbers", where=f"--mrl_dim {wanted}", fix=f"--mrl_dim {size} at most"
            )
        return Scorer(
            model,
            self.judge.answerer,
            self.judge.probe,
            self.judge.targets,
            max_batch_size=self.config.engine.max_batch_size,
            pad_token_id=int(self.tokenizer.pad_token_id or 0),
        )

    def _weights(self, task: Task) -> Any:
        """The model with its adapter, merged if that was asked for."""
        model: Any = load_model(
            self.base,
            self.config.model,
            dtype=self.dtype,
            attn_implementation=_attention(self.config.model.attn_impl),
            device=self.device.torch_device,
            tokenizer=self.tokenizer,
            task=task,
        )
        if self.adapter is None and (words := fresh_words(model)):
            raise ModelError(f"the model has no head for this: {words}", where=str(self.base), fix="train it first")
        if self.adapter is not None:
            model = Swift.from_pretrained(model, self.adapter)
            if self.config.infer.merge_lora:
                model = self._merged(model)
        return model

    def _merged(self, model: Any) -> Any:
        """The adapter folded into the weights, if that leaves the answers as they are."""
        import torch

        tolerance = FP32_TOLERANCE if self.dtype == torch.float32 else HALF_TOLERANCE
        probes = probe_tokens(self.tokenizer, model.get_input_embeddings().weight.shape[0])
        try:
            merged, agreement = merge_checked(model, probes, tolerance=tolerance)
        except ModelError as error:
            fix = "leave out --merge_lora: the adapter works unmerged; or use --torch_dtype float32"
            raise ModelError(error.message, where="--merge_lora", fix=fix) from error
        log.info("merged the adapter: logits differ by %.1e of their spread", agreement.relative)
        return merged


def load_engine(config: InferConfig) -> Engine:
    """The engine that `config` describes.

    A checkpoint's adapter names its base model; its tokenizer and chat template win over the base model's, so that the
    tokens served are the tokens trained. float32 on a CPU and bfloat16 on accelerators that have it, unless
    `torch_dtype` says otherwise.

    Raises:
        UsageError: no model, several adapters, or a device that isn't there.
        ModelError: folders or weights that can't be used, or an adapter of another base model.
    """
    prepared = prepare(config)
    if prepared.judge is not None:
        raise UsageError(
            f"the model is one for {prepared.judge.name}: it generates nothing",
            where=str(prepared.adapter or prepared.base),
            fix="swift infer --val_dataset FILE, or prepare(config).load_scorer()",
        )
    return prepared.load()


def prepare(config: InferConfig) -> Prepared:
    """The first, cheap step of `load_engine`; the same errors, but for those of the weights.

    With `--adaptive`, the way to run the model is decided here: measured, where no earlier start did.
    """
    config = filled(config)
    device = choose_device(config.infer.device)
    adapter = _adapter_folder(config)
    base = _base_folder(config)
    source = adapter if adapter is not None and _has_tokenizer(adapter) else base
    tokenizer = load_tokenizer(source, config.model)
    dtype = choose_dtype(config.model.torch_dtype, device)
    task = served_task(config, base, adapter)
    if task is None:
        encoder = ChatEncoder(tokenizer, config.template)
        prepared = Prepared(config, base, adapter, tokenizer, encoder, device, dtype)
        if not config.engine.adaptive:
            return prepared
        from swift.inference.adaptive.adapt import adapted

        return adapted(prepared)
    if config.engine.infer_backend not in ("auto", "transformers") or paged_settings(config.engine):
        given = paged_settings(config.engine) or ["infer_backend"]
        raise UsageError(
            f"--{given[0]} is for models that generate, and this one is for {task[0]}",
            where=f"--{given[0]}",
            fix="leave it out",
        )
    judge = make_judge(config, *task, tokenizer, adapter or base)
    return Prepared(config, base, adapter, tokenizer, judge.encoder, device, dtype, judge)


def _base_folder(config: InferConfig) -> Path:
    """The folder of the base model; of a GGUF file, one with its tokenizer and configuration."""
    engine, name = config.engine, config.model.model or ""
    if engine.infer_backend == "llamacpp" and (engine.engine_url is None or name.endswith(".gguf")):
        return gguf_folder(find_gguf(config.model))
    if engine.infer_backend == "openvino":
        return find_openvino(config.model)
    return resolve_model(config.model)


def choose_device(wanted: str) -> Device:
    """The device of this process.

    Raises:
        UsageError: the device asked for isn't there.
    """
    device = detect_device(local_rank(), None if wanted == "auto" else wanted)
    if wanted not in ("auto", device.type):
        raise UsageError(
            f"--device {wanted}: torch sees no such device here, only {device.type} ({device.name})",
            where="--device",
            fix="--device auto, or a torch built for that device; `swift doctor` shows what there is",
        )
    return device


def choose_dtype(wanted: str | None, device: Device) -> torch.dtype:
    """The precision of the weights: as asked; else float32 on a CPU, bfloat16 or float16 on an accelerator."""
    import torch

    if wanted is not None:
        return getattr(torch, wanted)
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if device.bf16 else torch.float16


def filled(config: InferConfig) -> InferConfig:
    """A configuration made in Python may name an adapter only; the checkpoint then says the rest."""
    model, adapters = config.model.model, config.model.adapters
    if model is None and not adapters:
        raise UsageError(
            "which model?", where="--model", fix="--model FOLDER_OR_ID, or --adapters CHECKPOINT, or --model smollm2"
        )
    if model is not None or not config.infer.load_args:
        return config
    values = to_flat(config)
    given = {name: values[name] for name, default in to_flat(InferConfig()).items() if values[name] != default}
    return build_config(InferConfig, given)


def _adapter_folder(config: InferConfig) -> Path | None:
    adapters = config.model.adapters
    if len(adapters) > 1:
        raise UsageError(
            f"{len(adapters)} adapters were given, and one can answer: {' '.join(adapters)}",
            where="--adapters",
            fix="give one; to combine several, merge them one after the other with `swift merge-lora`",
        )
    if config.infer.merge_lora and not adapters:
        raise UsageError(
            "--merge_lora has nothing to merge: there is no adapter", where="--merge_lora", fix="add --adapters"
        )
    if not adapters:
        return None
    folder = Path(adapters[0]).expanduser()
    read_adapter_config(folder)
    return folder


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def _attention(wanted: str) -> str | None:
    """The attention for generating, where batches are padded, never laid end to end; None: the model's usual."""
    if wanted == "varlen":
        raise UsageError(
            "--attn_impl varlen is for training on concatenated examples", where="--attn_impl", fix="leave it out"
        )
    return None if wanted == "auto" else wanted


def folder_hash(folder: Path) -> str:
    """Names, sizes and times of a model's files: cheap, and changes when the folder is written again."""
    files = sorted(path for path in folder.iterdir() if path.suffix in _IDENTITY_SUFFIXES and path.is_file())
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:16]
