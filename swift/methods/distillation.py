"""`swift rlhf --rlhf_type gkd`: a student learns from a teacher, on the rows' answers, its own, or the teacher's."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from swift.config.commands import RlhfConfig, TrainConfig
from swift.config.preference import DistillConfig, settle
from swift.core.errors import DataError, ModelError, UsageError
from swift.core.memory import return_free_memory
from swift.data.encoding.encode import ChatEncoder
from swift.data.encoding.units import UnitEncoder
from swift.data.loading.batch import Batch, Examples, Layout
from swift.distributed.mesh import Mesh
from swift.inference.requests import SamplingParams
from swift.methods.distill_rows import DistillEncoder, Lesson, Wanted, answered, lessons_of, read_system
from swift.methods.endpoint import EndpointSettings, TeacherEndpoint, served_model
from swift.methods.probes import scaled_logprobs
from swift.methods.rollouts import Writing, context_of, write_anew, write_cached
from swift.methods.teacher import Form, PresentTeacher, SelfTeacher, ServerTeacher, Teacher, texts_batch
from swift.methods.teacher_model import TeacherSource, load_teacher, teacher_settings
from swift.methods.teacher_store import StoreTeacher, ask_about_all, is_finished, open_store
from swift.methods.vocabulary import check_same_vocabulary
from swift.models.head import OutputHead
from swift.models.loading import load_tokenizer, resolve_model
from swift.objectives import LossTerms
from swift.objectives.distill import Distillation, DistillObjective
from swift.training.data import Data
from swift.training.method import LookAhead, Method, Surroundings
from swift.training.model import Model
from swift.training.module import Objectives
from swift.training.session import Session
from swift.training.strategy import Strategy
from swift.training.trainer_parts import Callback, RankState

# The key of a teacher behind an endpoint.
API_KEY = "TEACHER_API_KEY"
_WRITTEN = "written"  # a fact of batches whose answers the student wrote


@dataclass
class _Held:
    """What is known once the data are there: the teacher, unless it is the trained model, and what it is asked."""

    teacher: Teacher | None = None
    form: Form = field(default_factory=Form)


def distillation_method(config: RlhfConfig, command: str) -> Method:
    """The method that the settings ask for."""
    held = _Held()
    return Method(
        command,
        make_encoder=_encoder,
        make_objectives=partial(_objectives, held),
        row_layout="prompts",
        batches={"units": True, "targets": "next"},
        wants_dropout=not config.preference.disable_dropout,
        share_prompts="false",  # what student and teacher read is taken apart again
        make_look_ahead=partial(_look_ahead, held),
        before_model=partial(_find_teacher, held),
    )


def _encoder(tokenizer: Any, config: TrainConfig) -> DistillEncoder:
    settings = cast(RlhfConfig, config).distill
    wanted = Wanted(
        answers=not settings.seq_kd and settings.lmbda < 1,
        other_prompt=settings.teacher_self and config.tuner.tuner_type == "full",
        system=read_system(settings.teacher_prompt) if settings.teacher_self else None,
    )
    return DistillEncoder(UnitEncoder(ChatEncoder(tokenizer, config.template), "prompts"), wanted)


@dataclass(frozen=True)
class _Objective:
    """`DistillObjective` with the head of whoever teaches: a teacher's own, or the student's."""

    options: Distillation
    held: _Held
    chunk: int

    def __call__(self, hidden: torch.Tensor, head: OutputHead, batch: Batch) -> LossTerms:
        teacher = self.held.teacher.head if self.held.teacher is not None else None
        options = self.options._replace(vocab_size=self.held.form.vocab_size)
        if _WRITTEN in batch.facts:  # the likelihood is that of the rows' own answers
            options = options._replace(sft_alpha=0.0)
        terms = DistillObjective(options, teacher or head, self.chunk)(hidden, head, batch)
        for name in ("agreement", "teacher_nll", *(["teacher_topk_mass"] if self.held.form.k else [])):
            if name not in terms.sums:  # steps differ in what is known of the teacher, and not in what they log
                terms.sums[name], terms.counts[name] = terms.loss_sum.new_zeros(()), 0.0
        return terms


def _objectives(held: _Held, config: TrainConfig, mesh: Mesh) -> Objectives:
    settings = cast(RlhfConfig, config)
    settled = settle(settings.preference, settings.distill)
    options = Distillation(
        settled.beta, settled.distill_temperature, settings.distill.sft_alpha, settled.topk_tail == "bucket"
    )
    objective = _Objective(options, held, config.objective.loss_chunk_size)
    return Objectives(objective, objective)


# --- the teacher ---


def _find_teacher(held: _Held, config: TrainConfig, session: Session, data: Data) -> None:
    """Load the teacher, or open what it said, before the student is there."""
    settings = cast(RlhfConfig, config).distill
    settled = settle(cast(RlhfConfig, config).preference, settings)
    vocab_size = max(data.tokenizer.get_vocab().values()) + 1
    held.form = Form(
        settings.gkd_logits_topk or 0, vocab_size, settled.distill_temperature, settled.topk_tail == "bucket"
    )
    if data.val is not None and not answered(data.val):
        raise DataError(
            "no evaluation row has an answer to measure by",
            where="--val_dataset or --split_dataset_ratio",
            fix="give rows with answers, or none",
        )
    sets: list[Examples] = [data.prepared.train, *([data.val] if data.val is not None else [])]
    if settings.teacher_logits:
        folder = Path(settings.teacher_logits).expanduser()
        if settings.teacher_model and not session.group.from_main(lambda: is_finished(folder)):
            session.monitor.event("progress", f"asking the teacher about every row; what it says is kept in {folder}")
            ask_about_all(_load(config, session, data, held.form, settings), held.form, sets, session, folder)
            gc.collect()
            return_free_memory()
        store = open_store(folder, vocab_size, sets)
        held.form = held.form._replace(k=min(held.form.k or store.header.k, store.header.k))
        held.teacher = StoreTeacher(store, held.form)
    elif settings.teacher_model:
        held.teacher = _load(config, session, data, held.form, settings)
        session.notes.append(f"the teacher, {settings.teacher_model}, is held frozen beside the model")
    elif settings.teacher_model_server:
        url = settings.teacher_model_server.rstrip("/")
        key = API_KEY if os.environ.get(API_KEY) else None
        name = session.group.from_main(lambda: served_model(url, key))
        endpoint = TeacherEndpoint(EndpointSettings(url, name, k=held.form.k, api_key_env=key), data.tokenizer)
        held.teacher = ServerTeacher(endpoint, held.form, session)
        session.notes.append(f"the teacher is {name} at {url}, asked for its {held.form.k} likeliest tokens")


def _load(config: TrainConfig, session: Session, data: Data, form: Form, settings: DistillConfig) -> Any:
    where = f"--teacher_model {settings.teacher_model}"

    def find() -> Path:
        try:
            return resolve_model(replace(config.model, model=settings.teacher_model))
        except ModelError as error:
            raise ModelError(error.message, where=where, fix=error.fix) from error

    path = session.group.from_main(find)
    source = TeacherSource(path, tuple(settings.teacher_adapters), settings.offload_teacher_model)
    check_same_vocabulary(data.tokenizer, load_tokenizer(path, teacher_settings(config.model, source)), where=where)
    return load_teacher(config, session, data, form, source)


# --- before each step ---


@dataclass
class DistillLookAhead:
    """Writes the step's answers where somebody is to write them, and asks the teacher about all texts.

    Attributes:
        coupled: no.
        teacher: who is asked. layout: how texts share a batch.
        student: the whole model, if this process has it and can run it alone; else None.
        writing: how answers are written.
    """

    session: Session
    settings: DistillConfig
    teacher: Teacher
    form: Form
    layout: Layout
    writing: Writing
    seed: int
    student: torch.nn.Module | None = None
    coupled: bool = False
    callbacks: list[Callback] = field(default_factory=list)
    rank_states: dict[str, RankState] = field(default_factory=dict)

    def __call__(self, strategy: Strategy, batches: list[Batch], *, training: bool) -> None:
        """Replace the step's units by what the student reads of them, with what the teacher says."""
        lessons = [lessons_of(batch) for batch in batches]
        own = training and self._writes_itself()
        if own or (training and self.settings.seq_kd):
            lessons = self._rewritten(strategy, lessons, own)
        for number, some in enumerate(lessons):
            batch = texts_batch([lesson.student for lesson in some], self.layout)
            batch.refs = [lesson.ref for lesson in some]
            if own:
                batch.facts[_WRITTEN] = torch.ones(len(batch.target_index), dtype=torch.bool)
            if own and self.settings.on_policy_objective == "policy_gradient":
                present = cast(PresentTeacher, self.teacher)  # the settings were checked
                probe = scaled_logprobs(self.form.vocab_size, self.form.temperature)
                batch.facts["teacher_logps"] = present.likelihood(strategy, some)
                batch.facts["old_logps"] = strategy.measure(batch, probe).cpu()
            else:
                batch.facts.update(self.teacher.tell(strategy, some))
            batches[number] = batch

    def _writes_itself(self) -> bool:
        """Whether the student writes this step's answers: a function of seed and step, so alike on all ranks."""
        return random.Random(f"{self.seed}/{self.session.state.step}/who").random() < self.settings.lmbda

    def _rewritten(self, strategy: Strategy, lessons: list[list[Lesson]], own: bool) -> list[list[Lesson]]:
        flat = [lesson for some in lessons for lesson in some]
        rows = [f"{Path(lesson.ref.file).name}:{lesson.ref.line}" for lesson in flat]  # data may move between runs
        seeds = [f"{self.seed}/{self.session.state.step}/{row}" for row in rows]
        prompts = [lesson.prompt(lesson.student if own else lesson.teacher).tolist() for lesson in flat]
        answers = iter(self._write(strategy, prompts, seeds, own))
        return [[lesson.with_answer(next(answers)) for lesson in some] for some in lessons]

    def _write(
        self, strategy: Strategy, prompts: Sequence[Sequence[int]], seeds: Sequence[str], own: bool
    ) -> list[list[int]]:
        if not own:
            return cast(PresentTeacher, self.teacher).write(strategy, prompts, seeds, self.writing)
        if self.student is not None:
            return write_cached(self.student, prompts, seeds, self.writing, self.session.precision.autocast)
        return write_anew(strategy, prompts, seeds, self.writing, (self.layout, self.session.group))


def _look_ahead(held: _Held, around: Surroundings) -> LookAhead:
    config, session, model = cast(RlhfConfig, around.config), around.session, around.model
    settings, tokenizer = config.distill, around.data.tokenizer
    layout = Layout(padding_free=model.padding_free, pad_token_id=int(tokenizer.pad_token_id or 0))
    alone = model.spread is None and not config.parallelism.deepspeed
    teacher = held.teacher
    if teacher is None:
        wholes = [model.whole] if model.spread is None else [chunk.whole for chunk in model.spread.chunks]
        off = [] if config.tuner.tuner_type == "full" else wholes
        if off and not held.form.k and not model.head.plain:
            raise UsageError(
                "an adapter of the output head can't be switched off for the teacher alone",
                where="--teacher_self true",
                fix="--gkd_logits_topk 64, or --target_modules without the head",
            )
        teacher = SelfTeacher(off, layout, held.form, session, model.whole if alone else None)
        session.notes.append("the teacher is the model itself" + (", with its adapter switched off" if off else ""))
    return DistillLookAhead(
        session,
        settings,
        teacher,
        held.form,
        layout,
        _writing(settings, around.data, model, held.form.vocab_size),
        config.training.seed,
        model.whole if alone else None,
    )


def _writing(settings: DistillConfig, data: Data, model: Model, vocab_size: int) -> Writing:
    sampling = SamplingParams(
        max_new_tokens=settings.max_completion_length,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        seed="0",
    )
    stops = tuple(data.encoder.stop_token_ids())
    pad = int(data.tokenizer.pad_token_id or 0)
    return Writing(sampling, stops, vocab_size, context_of(model.causal_lm), pad)
