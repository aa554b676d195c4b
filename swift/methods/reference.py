"""The reference model's log-probabilities, without ever holding a second whole model by accident.

Three ways. With its adapter switched off, the model is its own reference. Or the reference is loaded before the model
that is trained, asked about every unit, and dropped (`precompute`); what it said lies in the run's folder, four bytes a
target. Or this process keeps a copy of what it trains, and exchanges it with the model while the reference is asked
(`Copied`); that copy can follow the model slowly (TR-DPO, arXiv 2404.09656, equation 2).

Knows nothing of losses.
"""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import nn

from swift.config.commands import TrainConfig
from swift.config.model import ModelConfig
from swift.config.tuner import TunerConfig
from swift.core.errors import DataError, ModelError, UsageError
from swift.core.files import disk_errors, write_atomic
from swift.core.memory import return_free_memory
from swift.data.files import stamp_of
from swift.data.loading.batch import Annotate, Batch, Examples, Layout, collate
from swift.data.loading.train_set import PreparedSet
from swift.distributed.spread import local_tensor
from swift.methods.vocabulary import check_same_vocabulary
from swift.models.head import OutputHead
from swift.models.kinds import CAUSAL_LM
from swift.models.loading import load_configuration, load_tokenizer, resolve_model
from swift.objectives.causal_lm import CausalLM
from swift.objectives.logprobs import token_logprobs
from swift.training.data import Data
from swift.training.model import Model, build_model
from swift.training.module import Objectives, TrainModule
from swift.training.parallelize import make_strategy
from swift.training.plan import build_layout
from swift.training.session import Session
from swift.training.strategy import DataParallel, Strategy
from swift.training.trainer import Trainer
from swift.training.trainer_parts import Callback

FACT = "ref_logps"
FOLDER = "reference"


def target_logprobs(hidden: torch.Tensor, head: OutputHead, batch: Batch) -> torch.Tensor:
    """A probe: the log-probability of each target, [targets]."""
    return token_logprobs(hidden, head, batch.target_ids).logprobs


@contextmanager
def adapters_off(models: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, the models are as they were before they got adapters."""
    models = list(models)
    trained = [parameter for model in models for parameter in model.parameters() if parameter.requires_grad]
    with ExitStack() as stack:
        for model in models:
            assert isinstance(model, PeftModel)  # the settings were checked
            stack.enter_context(model.disable_adapter())
        for parameter in trained:  # the library freezes adapters that are off, and what shards them would see to it
            parameter.requires_grad_(True)
        yield


class Copied(Callback):
    """A copy of this process's trained parameters, as they were when the run began, or following them slowly.

    Args:
        named: the trained parameters, by name.
        every: steps between two moves towards the model, each by the share `mixup`; 0 for a copy that stays.
    """

    without_it: str | None = None  # nothing else remembers the reference

    def __init__(self, named: dict[str, nn.Parameter], *, every: int = 0, mixup: float = 0.0) -> None:
        self._named = named
        self._copy = {name: part.clone() for name, part in self._parts()}
        self._every, self._mixup = every, mixup

    def _parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What this process holds of each, where it lies now: sharding moves it when it first runs."""
        return ((name, local_tensor(parameter).detach()) for name, parameter in self._named.items())

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model has the copy's numbers."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, part in self._parts():
            kept = part.clone()
            part.copy_(self._copy[name])
            self._copy[name] = kept

    @torch.no_grad()
    def after_phase(self, trainer: Trainer, phase: str) -> None:
        if phase == "rescale" and self._every and trainer.stepped and trainer.state.step % self._every == 0:
            for name, part in self._parts():
                self._copy[name].lerp_(part, self._mixup)

    def state_dict(self) -> dict[str, Any]:
        return {name: tensor.cpu() for name, tensor in self._copy.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, tensor in self._copy.items():
            tensor.copy_(state[name])


# --- worked out before step 1 ---


@dataclass
class Known:
    """Log-probabilities of the targets of each example, mapped: float32, and int64 [examples + 1] where each begins."""

    values: np.ndarray
    offsets: np.ndarray

    def of(self, indices: Sequence[int]) -> torch.Tensor:
        """Of these examples, end to end."""
        parts = [self.values[self.offsets[i] : self.offsets[i + 1]] for i in indices]
        return torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *parts]))


def annotate_with(own: Known, strangers: Known | None) -> Annotate:
    """Adds what is known to batches; `strangers` is of the companions."""

    def annotate(batch: Batch, indices: Sequence[int]) -> None:
        batch.facts[FACT] = own.of(indices)
        if batch.companion is not None and strangers is not None:
            batch.companion.facts[FACT] = strangers.of(indices)

    return annotate


def precompute(config: TrainConfig, session: Session, data: Data, named: str | None, adapters: list[str]) -> None:
    """Ask the reference about all units, or map what a run that is continued has asked already.

    Args:
        named: the reference, where it isn't the model that is trained; adapters: on it.
    """
    folder = session.run_dir / FOLDER
    sets = {"train": data.prepared.train} | ({"validation": data.val} if data.val is not None else {})
    changed = replace(config.model, model=named or config.model.model, adapters=adapters)
    model = data.model_path
    if named is not None:
        model = session.group.from_main(lambda: _folder_of(changed, data))
    identity = {
        "model": _stamps(model),
        "adapters": [_stamps(Path(adapter).expanduser()) for adapter in adapters],
        "settings": asdict(replace(config.model, model=None, adapters=[], offline=False)),
        "rows": {name: examples.digest() for name, examples in sets.items()},
        "companions": session.method.batches.get("companions", False),
    }
    asked = session.group.from_main(lambda: _asked(folder, identity))
    if not asked:
        session.monitor.event("progress", "asking the reference model about every row, before the run's own is loaded")
        strategy, layout = _reference(replace(config, model=changed), session, replace(data, model_path=model))
        for name, examples in sets.items():
            _ask(strategy, layout, examples, session, folder / name)
        del strategy  # the last that holds the reference
        gc.collect()
        return_free_memory()
        session.group.from_main(lambda: write_atomic(folder / "identity.json", json.dumps(identity)))
    known = {name: annotate_with(*_open(folder / name)) for name in sets}
    assert isinstance(data.train, PreparedSet)  # `check_precomputable` was asked
    data.train.annotate = known["train"]
    data.annotate_eval = known.get("validation")


def _stamps(folder: Path) -> dict[str, str]:
    """The files of a model or an adapter that decide its numbers, and a text for each that changes with its content."""
    kinds = ("*.json", "*.safetensors", "*.bin", "*.gguf", "*.py")
    return {str(path.resolve()): stamp_of(str(path)) for kind in kinds for path in sorted(folder.glob(kind))}


def _asked(folder: Path, identity: dict[str, Any]) -> bool:
    """Whether what lies in the folder is what is wanted, and whole; what isn't goes away."""
    try:
        if json.loads((folder / "identity.json").read_text(encoding="utf-8")) == identity:
            return True
    except (OSError, ValueError):  # not there, or not finished
        pass
    shutil.rmtree(folder, ignore_errors=True)
    return False


def _folder_of(named: ModelConfig, data: Data) -> Path:
    """The folder of a reference that the user named.

    Raises:
        ModelError: it isn't there, or it would read other tokens than the rows have.
    """
    flag = f"--ref_model {named.model}"
    try:
        folder = resolve_model(named)
    except ModelError as error:
        raise ModelError(error.message, where=flag, fix=error.fix) from error
    fix = "name a reference of the model's own family"
    theirs = load_tokenizer(folder, named)
    tokens = check_same_vocabulary(data.tokenizer, theirs, names=("model", "reference"), where=flag, fix=fix)
    rows = load_configuration(folder, named).get_text_config().vocab_size
    if rows < tokens and not named.new_special_tokens:
        raise ModelError(
            f"the reference has numbers for {rows:,} tokens, and the tokenizer has {tokens:,}", where=flag, fix=fix
        )
    return folder


def _reference(config: TrainConfig, session: Session, data: Data) -> tuple[Strategy, Layout]:
    """The reference, spread as the run is, and how batches are laid out for it.

    Args:
        config: of the run, but for the model, which is the reference; its folder is that of `data`.
    """
    changed = config
    if not config.model.adapters:  # a new one adds nothing, and makes the weights be held as beside the trained one
        full = config.tuner.tuner_type == "full"
        changed = replace(config, tuner=TunerConfig(tuner_type="full" if full else "lora"))
    notes = list(session.notes)
    model = build_model(changed, session, data, CAUSAL_LM)
    session.notes[:] = notes  # what is said of the model that is trained comes with it
    layout = build_layout(
        config,
        world_size=session.mesh["dp"].size,
        padding_free=model.padding_free,
        pad_token_id=int(data.tokenizer.pad_token_id or 0),
        longest=data.longest_unit(written_out=True),
    )
    return _measuring(model, session), session.method.arrange(layout, why_unshared=model.why_unshared)


def _measuring(model: Model, session: Session) -> Strategy:
    if model.spread is not None and model.making is not None:
        return make_strategy(model.spread, model.making)
    objective = CausalLM()
    if session.precision.managed:  # the engine would hold it so
        model.whole.to(session.precision.compute)
    module = TrainModule(
        model.whole, decoder=model.decoder, head=model.head, objectives=Objectives(objective, objective)
    )
    return DataParallel(module, session.group, session.precision, mesh=session.mesh, alone=True)


def _ask(strategy: Strategy, layout: Layout, examples: Examples, session: Session, folder: Path) -> None:
    """Each data-parallel rank asks about its share; rank 0 puts the shares together."""
    data, mesh = strategy.mesh["dp"], strategy.mesh
    order = np.argsort(-examples.lengths, kind="stable")
    budget = max(4096, int(examples.lengths.max()))
    chunks: list[list[int]] = []
    for index in order.tolist():
        if not chunks or (len(chunks[-1]) + 1) * int(examples.lengths[chunks[-1][0]]) > budget:
            chunks.append([])
        chunks[-1].append(index)
    own: dict[int, np.ndarray] = {}
    strangers: dict[int, np.ndarray] = {}
    for turn in range(-(-len(chunks) // data.size)):
        number = turn * data.size + data.rank
        asked = chunks[number] if number < len(chunks) else []
        batch = collate(examples, asked, layout)
        _sort_out(strategy.measure(batch, target_logprobs), batch, asked, own)
        if batch.companion is not None:
            _sort_out(strategy.measure(batch.companion, target_logprobs), batch.companion, asked, strangers)
    if not mesh["tp"].rank and not mesh["pp"].rank and not mesh["cp"].rank:
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for name, found in (("own", own), ("strangers", strangers)):
                if found or name == "own":
                    indices, sizes, values = _flat(found)
                    np.savez(folder / f".{name}-{data.rank}.npz", indices=indices, sizes=sizes, values=values)
    session.group.barrier()
    session.group.from_main(lambda: _join(folder, len(examples), data.size))


def _sort_out(logprobs: torch.Tensor, batch: Batch, indices: Sequence[int], into: dict[int, np.ndarray]) -> None:
    sequences = batch.sequences
    assert sequences is not None
    values = logprobs.float().cpu().numpy()
    units = sequences.unit[sequences.target].numpy()
    for number, index in enumerate(indices):
        into[index] = values[units == number]


def _flat(found: dict[int, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers of examples, how many values each has, and the values end to end."""
    indices = np.array(sorted(found), dtype=np.int64)
    sizes = np.array([len(found[i]) for i in indices.tolist()], dtype=np.int64)
    values = np.concatenate([np.zeros(0, np.float32), *(found[i] for i in indices.tolist())])
    return indices, sizes, values


def _join(folder: Path, count: int, ranks: int) -> None:
    for name in ("own", "strangers"):
        parts = [folder / f".{name}-{rank}.npz" for rank in range(ranks)]
        if not any(part.exists() for part in parts):
            continue
        shares = [np.load(part) for part in parts if part.exists()]
        if sum(len(share["indices"]) for share in shares) != count:
            raise DataError(
                f"only some of the processes' answers of the reference are in {folder}",
                fix="let --output_dir lie on a disk that all machines share",
            )
        sizes = np.zeros(count, np.int64)
        for share in shares:
            sizes[share["indices"]] = share["sizes"]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        with disk_errors(folder, int(offsets[-1]) * 4):
            whole = np.memmap(folder / f"{name}.values", np.float32, "w+", shape=(max(1, int(offsets[-1])),))
            for share in shares:
                bounds = np.concatenate([[0], np.cumsum(share["sizes"])])
                values = share["values"]
                for place, index in enumerate(share["indices"].tolist()):
                    whole[offsets[index] : offsets[index + 1]] = values[bounds[place] : bounds[place + 1]]
            whole.flush()
            np.save(folder / f"{name}.offsets.npy", offsets)
        for part in parts:
            part.unlink(missing_ok=True)


def _open(folder: Path) -> tuple[Known, Known | None]:
    def one(name: str) -> Known | None:
        if not (folder / f"{name}.values").exists():
            return None
        values = np.memmap(folder / f"{name}.values", np.float32, "r")
        return Known(values, np.load(folder / f"{name}.offsets.npy"))

    own = one("own")
    assert own is not None
    return own, one("strangers")


def check_precomputable(config: TrainConfig) -> None:
    """What is asked before step 1 has to be there before step 1.

    Raises:
        UsageError: the rows are streamed.
    """
    if config.data.streaming:
        raise UsageError(
            "the reference can't be asked beforehand about rows that are read while training",
            where="--streaming true",
            fix="--tuner_type lora, whose reference is the model without its adapter, or --reference copy",
        )
