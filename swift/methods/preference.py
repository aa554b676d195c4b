"""`swift rlhf` with pairs or labelled answers: DPO and its relatives, ORPO, CPO, SimPO, KTO."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from swift.config.commands import RlhfConfig, TrainConfig
from swift.config.preference import reference_way, settle
from swift.core.errors import DataError, UsageError
from swift.data.columns import Layout as RowLayout
from swift.data.encoding.encode import ChatEncoder
from swift.data.encoding.units import UnitEncoder
from swift.distributed.mesh import Mesh
from swift.methods.look_ahead import PreferenceLookAhead
from swift.methods.reference import Copied, adapters_off, check_precomputable, precompute
from swift.objectives.preference import KtoObjective, PreferenceObjective
from swift.objectives.preference_options import PreferenceOptions
from swift.training.data import Data
from swift.training.method import LookAhead, Method, Surroundings
from swift.training.module import Objectives
from swift.training.session import Session


def preference_method(config: RlhfConfig, command: str) -> Method:
    """The method that the settings ask for.

    Raises:
        UsageError: they contradict each other.
    """
    options, settings = preference_options(config), config.preference
    binary = settings.rlhf_type == "kto"
    way = reference_way(settings, config.tuner, config.model.adapters)
    if way == "precompute":
        check_precomputable(config)
    if way == "copy" and (settings.ref_model or settings.ref_adapters):
        raise UsageError(
            "a copy is one of the model that is trained; another reference is asked beforehand",
            where="--reference copy",
            fix="--reference precompute",
        )
    batches: dict[str, Any] = {"units": True, "targets": "next", "companions": "kto" in options.loss_types}
    notes = [_REFERENCE_WORDS[way]] if way in _REFERENCE_WORDS else []
    return Method(
        command,
        make_encoder=partial(_encoder, layout="binary" if binary else "pairs"),
        make_objectives=partial(_objectives, options, binary),
        row_layout="binary" if binary else "pairs",
        batches=batches,
        wants_dropout=not settings.disable_dropout,
        share_prompts=settings.share_prompts,
        make_look_ahead=partial(_look_ahead, options, way),
        before_model=partial(_before_model, options, way),
        notes=tuple(notes),
    )


_REFERENCE_WORDS = {
    "adapter_off": "the reference is the model with its adapter switched off: no second model is held",
    "precompute": "the reference is asked about all rows before step 1, and then dropped: no second model is held",
    "copy": "a copy of what is trained is held as the reference",
}


def preference_options(config: RlhfConfig) -> PreferenceOptions:
    """The settings of the loss, with everything left open settled.

    Raises:
        UsageError: they contradict each other.
    """
    settings, settled = config.preference, settle(config.preference, config.distill)
    names, weights = zip(*settled.losses, strict=True)
    return PreferenceOptions(
        kind=settings.rlhf_type,
        loss_types=names,
        loss_weights=weights,
        beta=settled.beta,
        label_smoothing=settings.label_smoothing,
        ld_alpha=settings.ld_alpha,
        discopop_tau=settings.discopop_tau,
        f_divergence=settings.f_divergence_type,
        f_alpha=settings.f_alpha_divergence_coef,
        simpo_gamma=settled.simpo_gamma,
        cpo_alpha=settled.cpo_alpha,
        alphapo_alpha=settings.alphapo_alpha,
        rpo_alpha=settings.rpo_alpha or 0.0,
        reference_free=settings.reference_free,
        wpo=settings.use_weighting,
        desirable_weight=settings.desirable_weight,
        undesirable_weight=settings.undesirable_weight,
        center=settings.center_rewards_coefficient or 0.0,
        compat=settings.compat,
    ).check()


def _encoder(tokenizer: Any, config: TrainConfig, *, layout: RowLayout) -> UnitEncoder:
    return UnitEncoder(ChatEncoder(tokenizer, config.template), layout)


def _objectives(options: PreferenceOptions, binary: bool, config: TrainConfig, mesh: Mesh) -> Objectives:
    chosen = KtoObjective if binary else PreferenceObjective
    objective = chosen(options, chunk=config.objective.loss_chunk_size, axis=mesh["cp"] or None)
    return Objectives(objective, objective)


def _before_model(options: PreferenceOptions, way: str, config: TrainConfig, session: Session, data: Data) -> None:
    if "kto" in options.loss_types and len(data.prepared.train) == 1:
        raise DataError(
            "kto compares each row with the answer of another, and there is only one row",
            where="--dataset",
            fix="give more rows; or --loss_type apo_zero_unpaired, which needs no other rows",
        )
    if way != "precompute":
        return
    settings = cast(RlhfConfig, config).preference
    adapters = settings.ref_adapters or ([] if settings.ref_model else config.model.adapters)
    precompute(config, session, data, settings.ref_model, adapters)


def _look_ahead(options: PreferenceOptions, way: str, around: Surroundings) -> LookAhead:
    session, model, settings = around.session, around.model, cast(RlhfConfig, around.config).preference
    wholes = [model.whole] if model.spread is None else [chunk.whole for chunk in model.spread.chunks]
    ahead = PreferenceLookAhead(options, session.group.along(session.mesh["dp"]), shared=bool(session.mesh["cp"]))
    if way == "adapter_off":
        ahead.reference = partial(adapters_off, wholes)
    elif way == "copy":
        trained = model.whole.named_parameters() if model.spread is None else model.spread.local.named_whole()
        every = settings.ref_model_sync_steps if settings.sync_ref_model else 0
        copied = Copied(
            {name: p for name, p in trained if p.requires_grad}, every=every, mixup=settings.ref_model_mixup_alpha
        )
        ahead.reference = copied.in_place
        ahead.callbacks.append(copied)
        ahead.rank_states["reference"] = copied
    return ahead
