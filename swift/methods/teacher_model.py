"""A teacher that is a model of its own, held frozen beside the student.

As a whole in every process that holds the whole student; else spread over the processes as the student is, with its
output head whole everywhere, since the loss makes logits of its states. Knows nothing of steps or losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swift.config.commands import TrainConfig
from swift.config.model import ModelConfig
from swift.config.tuner import TunerConfig
from swift.core.errors import UsageError
from swift.data.loading.batch import Layout
from swift.methods.distill_rows import Lesson
from swift.methods.probes import scaled_logprobs
from swift.methods.rollouts import Writing, context_of, write_anew, write_cached
from swift.methods.teacher import Facts, Form, facts_of, probe_of, texts_batch
from swift.models.adapters import Swift, read_adapter_config
from swift.models.empty import build_empty_model
from swift.models.fill import read_weights
from swift.models.head import OutputHead, find_decoder, find_head, prove_head
from swift.models.kinds import CAUSAL_LM
from swift.models.loading import check_context, load_model
from swift.models.prepare import choose_attention, first_position
from swift.objectives.causal_lm import CausalLM
from swift.training.data import Data
from swift.training.model import build_model
from swift.training.module import Objectives, Probe, TrainModule, decoder_owner
from swift.training.parallelize import make_strategy
from swift.training.session import Session
from swift.training.strategy import DataParallel, Strategy


@dataclass(frozen=True)
class TeacherSource:
    """Which model teaches.

    Attributes:
        path: its folder; adapters: on it.
        offload: keep it in the computer's memory while it isn't asked.
    """

    path: Path
    adapters: tuple[str, ...] = ()
    offload: bool = False


@dataclass
class ModelTeacher:
    """A model that is held frozen beside the student.

    Attributes:
        strategy: runs it; layout: how it takes examples.
        whole: all of it, where this process has it; else None.
        here: the context in which it is where it computes.
    """

    strategy: Strategy
    layout: Layout
    form: Form
    session: Session
    head: OutputHead | None = None
    whole: nn.Module | None = None
    here: Callable[[], AbstractContextManager[None]] = nullcontext
    context: int | None = None

    def tell(self, strategy: Strategy, lessons: Sequence[Lesson]) -> Facts:
        return facts_of(self._measure(lessons, probe_of(self.form)), self.form)

    def likelihood(self, strategy: Strategy, lessons: Sequence[Lesson]) -> torch.Tensor:
        return self._measure(lessons, scaled_logprobs(self.form.vocab_size, self.form.temperature)).cpu()

    def _measure(self, lessons: Sequence[Lesson], probe: Probe) -> torch.Tensor:
        with self.here():
            return self.strategy.measure(texts_batch([lesson.teacher for lesson in lessons], self.layout), probe)

    def write(
        self, strategy: Strategy, prompts: Sequence[Sequence[int]], seeds: Sequence[str], writing: Writing
    ) -> list[list[int]]:
        limits = [limit for limit in (writing.context, self.context) if limit is not None]
        writing = replace(writing, context=min(limits, default=None))
        with self.here():
            if self.whole is not None:
                return write_cached(self.whole, prompts, seeds, writing, self.session.precision.autocast)
            return write_anew(self.strategy, prompts, seeds, writing, (self.layout, self.session.group))


def load_teacher(config: TrainConfig, session: Session, data: Data, form: Form, source: TeacherSource) -> ModelTeacher:
    """Load a teacher, frozen; as a whole in every process, or spread as the student will be.

    Raises:
        UsageError: it can't be held in the way that was asked for.
    """
    if len(source.adapters) > 1:
        raise UsageError(
            "only one adapter can be on a teacher",
            where="--teacher_adapters",
            fix="merge the others first: swift merge-lora",
        )
    if source.offload and session.layout.spread:
        raise UsageError(
            "a teacher that is spread over processes stays where it is",
            where="--offload_teacher_model true",
            fix="leave it out",
        )
    settings = teacher_settings(config.model, source)
    data = replace(data, model_path=source.path)
    layout = Layout(pad_token_id=int(data.tokenizer.pad_token_id or 0))
    if session.layout.spread:
        return _load_spread(replace(config, model=settings), session, data, form, layout)
    model = load_model(
        source.path,
        settings,
        dtype=session.precision.stored(full=False),
        device=session.device.torch_device,
    )
    decoder = find_decoder(model)
    prove_head(model, decoder, find_head(model))
    padding_free, _ = choose_attention(
        model,
        settings.attn_impl,
        padding_free=False if config.batching.padding_free is False else None,
        packing=False,
        autocast=session.precision.autocast,
    )
    beyond = check_context(model.config, data.train.longest, first_position=first_position(decoder))
    session.notes += [f"the teacher: {beyond}"] if beyond else []
    whole: nn.Module = model
    for folder in settings.adapters:
        whole = Swift.from_pretrained(whole, Path(folder).expanduser())
    whole = whole.requires_grad_(False).eval()
    objective = CausalLM()
    head = find_head(decoder_owner(whole))
    module = TrainModule(whole, decoder=decoder, head=head, objectives=Objectives(objective, objective))
    strategy = DataParallel(module, session.group, session.precision, mesh=session.mesh, alone=True)
    teacher = ModelTeacher(strategy, replace(layout, padding_free=padding_free), form, session, head, whole)
    teacher.context = context_of(decoder_owner(whole))
    if source.offload and session.device.type != "cpu":
        teacher.head = _copied(head)
        teacher.here = _Visiting(module, session.device.torch_device).visit
    return teacher


def teacher_settings(student: ModelConfig, source: TeacherSource) -> ModelConfig:
    """How the teacher is loaded: as the student, but for what belongs to the student alone."""
    return replace(
        student,
        model=str(source.path),
        model_type=None,
        rope_scaling=None,
        max_model_len=None,
        new_special_tokens=[],
        adapters=list(source.adapters),
    )


@dataclass
class _Visiting:
    """A module that is on the device only while it computes."""

    module: nn.Module
    device: torch.device

    def __post_init__(self) -> None:
        self.module.to("cpu")

    @contextmanager
    def visit(self) -> Iterator[None]:
        self.module.to(self.device)
        try:
            yield
        finally:
            self.module.to("cpu")


def _copied(head: OutputHead) -> OutputHead:
    """The head with its own copy of its parameters, which stays where it is."""
    if not head.plain:
        raise UsageError(
            "a teacher whose output head is more than a matrix can't be moved away",
            where="--offload_teacher_model",
            fix="--offload_teacher_model false",
        )
    matrix = head.module.weight
    assert isinstance(matrix, torch.Tensor)
    module = nn.Linear(matrix.shape[1], matrix.shape[0], bias=head.module.bias is not None, device="meta")
    module.weight = nn.Parameter(matrix.detach().clone(), requires_grad=False)
    if isinstance(head.module.bias, torch.Tensor):
        module.bias = nn.Parameter(head.module.bias.detach().clone(), requires_grad=False)
    return replace(head, module=module)


def _load_spread(config: TrainConfig, session: Session, data: Data, form: Form, layout: Layout) -> ModelTeacher:
    config = replace(config, tuner=TunerConfig(tuner_type="lora" if config.model.adapters else "full"))
    notes = list(session.notes)
    model = build_model(config, session, data, CAUSAL_LM)
    session.notes[:] = notes  # what is said of the student comes with it
    assert model.spread is not None and model.making is not None
    for parameter in (p for module in model.spread.modules for p in module.parameters()):
        parameter.requires_grad_(False)
    strategy = make_strategy(model.spread, model.making)
    head = None if form.k else read_head(data.model_path, config.model, session)
    return ModelTeacher(
        strategy,
        replace(layout, padding_free=model.padding_free),
        form,
        session,
        head,
        context=context_of(model.causal_lm),
    )


def read_head(path: Path, settings: ModelConfig, session: Session) -> OutputHead:
    """The whole output head of a model whose other parts are on other processes, read from its files.

    Raises:
        UsageError: an adapter changes it.
    """
    empty = build_empty_model(path, settings, dtype=session.precision.stored(full=False))
    head = find_head(empty)
    name = next(name for name, module in empty.named_modules() if module is head.module)
    for folder in settings.adapters:
        changed: Any = read_adapter_config(Path(folder).expanduser())
        targets = changed.target_modules
        named = {*(targets if not isinstance(targets, str) else (targets,)), *(changed.modules_to_save or ())}
        if any(name.endswith(part.split(".")[-1]) for part in named):
            raise UsageError(
                f"an adapter of the teacher changes its output head, {name}, which is needed whole",
                where="--teacher_adapters",
                fix="merge it first with swift merge-lora, or --gkd_logits_topk 64",
            )
    stub = nn.Module()
    inner = stub
    *parents, last = name.split(".")
    for parent in parents:
        inner.add_module(parent, nn.Module())
        inner = inner.get_submodule(parent)
    inner.add_module(last, head.module.to_empty(device=session.device.torch_device))
    whole = build_empty_model(path, settings, dtype=session.precision.stored(full=False))
    with torch.no_grad():
        read_weights(stub, path, whole)  # type: ignore[arg-type]
    return replace(head, module=head.module.requires_grad_(False))
