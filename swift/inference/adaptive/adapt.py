"""A model that is about to be loaded, and the way to run it that was measured to be fast and good enough.

Each way is loaded, timed and gated as it would be served, one after the other, most exact first, until one fits. What
was found is logged as a table and kept with the decision.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from swift.config.data import RowsConfig
from swift.config.engine import EngineConfig
from swift.config.model import ModelConfig
from swift.core.errors import SwiftError, UsageError, first_line
from swift.core.files import human_bytes
from swift.core.logging import get_logger, world_size
from swift.core.memory import resident_bytes, return_free_memory
from swift.core.version import __version__
from swift.data.encoding.encode import ChatEncoder
from swift.inference.adaptive.candidates import Candidate, DtypeName, Wanted, candidates, declared_exits
from swift.inference.adaptive.choose import Rules, Trial, decide, reference_loss, settled, too_lossy, verdicts
from swift.inference.adaptive.gate import GateText, gate_texts, mean_loss
from swift.inference.adaptive.measure import Clock, token_ms
from swift.inference.adaptive.store import check_report, key_of, store, stored
from swift.inference.backends.base import Backend
from swift.inference.backends.choose import running_backend
from swift.inference.inputs import Inputs
from swift.inference.paged.linear import has_products
from swift.models.hub import resolve_model
from swift.models.loading import load_configuration, load_tokenizer
from swift.models.smollm2 import cache_folder

if TYPE_CHECKING:
    from swift.inference.loading import Prepared

log = get_logger("inference")

_NAMES: dict[torch.dtype, DtypeName] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
_UNSTEADY = 1.5  # rounds that differ by more say that something else computes on this machine
_NOT_IN_KEY = ("warmup_file",)  # of the engine's settings, what no measurement depends on


def adapted(prepared: Prepared, *, clock_for: Callable[[Candidate], Clock] | None = None) -> Prepared:
    """The same model, or a smaller one, set up as `--adaptive` decides.

    Args:
        prepared: a generating model, with `adaptive` set.
        clock_for: the clock that a candidate is timed by; default: the system's.

    Raises:
        UsageError: layers that the model doesn't have, a sibling of another tokenizer, an evaluation row without an
            answer, a report that is another file, several processes without a decision.
        ModelError: no way to run the model is known to be good enough.
    """
    engine = prepared.config.engine
    assert engine.adaptive_latency_ms is not None and isinstance(prepared.encoder, ChatEncoder)
    file = engine.adaptive_eval_file
    increase = None if file is None else engine.adaptive_max_loss_increase
    rules = Rules(engine.adaptive_latency_ms, engine.adaptive_concurrency, increase)
    ways = candidates(_wanted(prepared))
    identity = _identity(prepared, ways, rules)
    key = key_of(identity)
    path = _report_path(engine, key)
    check_report(path)
    known = stored(path, key) or {}
    for way in ways:
        if way.name == known.get("chosen"):
            log.info("adaptive: %s, as decided before (%s)", way.name, path)
            return set_up(prepared, way)
    if world_size() > 1:
        raise UsageError(
            "several processes at once would disturb each other's measurements, and there is no decision yet",
            where="--adaptive",
            fix="run it once in one process, on a few rows; the decision is then taken from " + str(path),
        )
    tried = ways if file is not None else [way for way in ways if way.exact]
    texts = None if file is None else gate_texts(file, prepared.encoder)
    prompts = _prompts(prepared.encoder, engine.max_batch_size)
    trials: list[Trial] = []
    for way in tried:
        if settled(trials, rules):
            break
        log.info("adaptive: measuring %s", way.name)
        clock = time.perf_counter if clock_for is None else clock_for(way)
        bench = _Bench(prepared, rules, texts, prompts, reference_loss(trials))
        trials.append(bench.trial(way, clock))
    place = decide(trials, rules)
    fits = verdicts(trials, rules)[place] == "fits"
    untried = {way.name: _why_untried(way, tried) for way in ways if way.name not in {t.name for t in trials}}
    _tell(trials, untried, rules, place)
    decision = {
        "chosen": trials[place].name,
        "meets_latency": fits,
        "settings": asdict(tried[place]),
        "rules": asdict(rules),
        "trials": [
            {**asdict(trial), "verdict": verdict}
            for trial, verdict in zip(trials, verdicts(trials, rules), strict=True)
        ],
        "untried": untried,
        "identity": identity,
    }
    store(path, key, decision)
    log.info("adaptive: the decision -> %s", path)
    return set_up(prepared, tried[place])


def set_up(prepared: Prepared, way: Candidate) -> Prepared:
    """The model as `way` runs it; nothing is left to decide then."""
    config = prepared.config
    usual = EngineConfig()
    settled_fields = {f.name: getattr(usual, f.name) for f in fields(usual) if f.name.startswith("adaptive")}
    engine = replace(
        config.engine,
        **settled_fields,
        infer_backend="swift",
        weight_format=way.weight_format,
        kv_cache_dtype=way.kv_cache_dtype,
        skip_layers=list(way.skip_layers),
    )
    model = replace(config.model, torch_dtype=way.dtype, model=way.model or config.model.model)
    return replace(
        prepared,
        config=replace(config, engine=engine, model=model),
        base=prepared.base if way.model is None else Path(way.model),
        dtype=getattr(torch, way.dtype),
    )


def _wanted(prepared: Prepared) -> Wanted:
    config, engine = prepared.config.model, prepared.config.engine
    own = load_configuration(prepared.base, config)
    return Wanted(
        device=prepared.device.type,
        bf16=prepared.device.bf16,
        fewer_bits=has_products(),
        dtype=_NAMES[prepared.dtype],
        dtype_given=config.torch_dtype is not None,
        num_layers=own.get_text_config(decoder=True).num_hidden_layers,
        weight_format=engine.weight_format,
        kv_cache_dtype=engine.kv_cache_dtype,
        exits=declared_exits(own, prepared.model_settings()),
        skips=tuple(engine.adaptive_skip_layers),
        siblings=tuple(_sibling(prepared, name) for name in engine.adaptive_siblings),
    )


def _sibling(prepared: Prepared, name: str) -> Path:
    """The folder of a smaller model that speaks the same tokens."""
    settings = ModelConfig(model=name, use_hf=prepared.config.model.use_hf)
    folder = resolve_model(settings)
    if load_tokenizer(folder, settings).get_vocab() != prepared.tokenizer.get_vocab():
        raise UsageError(
            f"{folder} has another tokenizer than {prepared.base}",
            where="--adaptive_siblings",
            fix="take a smaller model of the same family",
        )
    return folder


def _identity(prepared: Prepared, ways: Sequence[Candidate], rules: Rules) -> dict[str, Any]:
    """All that the decision depends on, as plain JSON values."""
    from swift.inference.loading import folder_hash

    engine = prepared.config.engine
    device = prepared.device
    file = engine.adaptive_eval_file
    kept = {k: v for k, v in vars(engine).items() if not k.startswith("adaptive") and k not in _NOT_IN_KEY}
    return {
        **prepared.identity(),
        "engine": kept,
        "rules": asdict(rules),
        "candidates": [asdict(way) for way in ways],
        "siblings": [folder_hash(Path(way.model)) for way in ways if way.model is not None],
        "rows": None if file is None else Inputs([file], RowsConfig(), 0).fingerprint,
        "machine": [device.type, device.name, device.memory_bytes, os.cpu_count(), torch.get_num_threads()],
        "versions": {"swift": __version__, **{name: version(name) for name in ("torch", "transformers")}},
    }


def _report_path(engine: EngineConfig, key: str) -> Path:
    if engine.adaptive_report is not None:
        return Path(engine.adaptive_report).expanduser()
    return cache_folder() / "adaptive" / f"{key}.json"


def _prompts(encoder: ChatEncoder, count: int) -> list[list[int]]:
    """Short ones, each another."""
    return [
        encoder.encode_prompt([{"role": "user", "content": f"Question {k + 1}: what is it?"}]) for k in range(count)
    ]


@dataclass(frozen=True)
class _Bench:
    """What every way is measured with.

    Attributes:
        texts: whose loss is taken; None for no loss.
        prompts: that are timed.
        reference: the loss that others are held against, once it is known.
    """

    prepared: Prepared
    rules: Rules
    texts: Sequence[GateText] | None
    prompts: Sequence[list[int]]
    reference: float | None

    def trial(self, way: Candidate, clock: Clock) -> Trial:
        """Load the model this way, take its loss and, unless that turns it down, time it."""
        device = self.prepared.device.torch_device
        before = _start_memory(device)
        try:
            backend = running_backend(set_up(self.prepared, way))
            try:
                loss = None if self.texts is None else mean_loss(backend, self.texts)
                times = {} if self._turned_down(loss) else self._times(backend, clock)
                return Trial(
                    way.name,
                    way.exact,
                    {number: ms for number, (ms, _) in times.items()},
                    _taken_memory(device, before),
                    loss,
                    unsteadiness=times[self.rules.concurrency][1] if times else 1.0,
                )
            finally:
                backend.close()
                del backend
        except (SwiftError, torch.OutOfMemoryError) as error:
            if way.exact and isinstance(error, UsageError):  # what was asked for can't be had, whichever way
                raise
            problem = error.message if isinstance(error, SwiftError) else first_line(error)
            return Trial(way.name, way.exact, problem=problem)
        finally:
            gc.collect()
            return_free_memory()
            if device.type == "cuda":
                torch.cuda.empty_cache()

    def _turned_down(self, loss: float | None) -> bool:
        return loss is not None and self.reference is not None and too_lossy(loss, self.reference, self.rules)

    def _times(self, backend: Backend, clock: Clock) -> dict[int, tuple[float, float]]:
        numbers = sorted({1, self.rules.concurrency, self.prepared.config.engine.max_batch_size})
        return {number: token_ms(backend, self.prompts, number, clock) for number in numbers}


def _start_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return 0
    return resident_bytes() if device.type == "cpu" else None


def _taken_memory(device: torch.device, before: int | None) -> int | None:
    """Bytes: the most that an accelerator allocated; on a CPU, by how much this process grew."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    now = resident_bytes() if before is not None else None
    return None if before is None or now is None else max(0, now - before)


def _why_untried(way: Candidate, tried: Sequence[Candidate]) -> str:
    if way not in tried:
        return "not exact, and no --adaptive_eval_file tells whether it is good enough"
    return "a more exact one fits"


def _tell(trials: Sequence[Trial], untried: dict[str, str], rules: Rules, place: int) -> None:
    """Log what was measured and what was chosen."""
    numbers = sorted({number for trial in trials for number in trial.token_ms})
    head = ["way", *(f"ms/token at {number}" for number in numbers), "memory", "loss", "verdict"]
    rows = [head]
    for trial, verdict in zip(trials, verdicts(trials, rules), strict=True):
        times = [f"{trial.token_ms[n]:.2f}" if n in trial.token_ms else "" for n in numbers]
        memory = "" if trial.memory_bytes is None else human_bytes(trial.memory_bytes)
        loss = "" if trial.loss is None else f"{trial.loss:.4f}"
        rows.append([trial.name, *times, memory, loss, f"{verdict}: {trial.problem}" if trial.problem else verdict])
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    for row in rows:
        log.info("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if unsteady := [trial.name for trial in trials if trial.unsteadiness > _UNSTEADY]:
        log.warning(
            "adaptive: the times of %s differ by up to %.1f times from round to round; decide on an idle machine, "
            "and remove the report first",
            "; ".join(unsteady),
            max(trial.unsteadiness for trial in trials),
        )
    for name, why in untried.items():
        log.info("not measured: %s (%s)", name, why)
    taken = trials[place]
    took = taken.token_ms[rules.concurrency]
    wanted = f"{took:.2f} ms between two tokens at {rules.concurrency}, wanted {rules.latency_ms:g}"
    if took <= rules.latency_ms:
        log.info("adaptive: %s (%s)", taken.name, wanted)
    else:
        log.warning("adaptive: nothing that is good enough is fast enough; the fastest is %s (%s)", taken.name, wanted)
