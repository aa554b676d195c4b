"""Build the model of a run whose processes hold parts of it: empty, cut, sharded, then each reads its own part."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel

from swift.config.commands import TrainConfig
from swift.core.errors import UsageError
from swift.models.empty import build_empty_model
from swift.models.fill import Start, fill_model
from swift.models.head import find_decoder
from swift.models.kinds import Task, fresh_words, name_padding, task_of
from swift.models.loading import check_context
from swift.models.prefix_proof import why_written_out
from swift.models.prepare import choose_attention, compile_layers, first_position, fix_ends
from swift.models.proof import small_model
from swift.models.tuners import apply_tuner
from swift.training.data import Data
from swift.training.parallelize import Making, SpreadModel, spread_model
from swift.training.session import Session
from swift.training.sharded import check_sharded_tuner


class Attending(NamedTuple):
    """The attention's name, whether examples are laid end to end, and why sequences can't share a unit's prompt (None:
    they can)."""

    name: str
    padding_free: bool
    why_unshared: str | None


def build_spread(
    config: TrainConfig, session: Session, data: Data, task: Task
) -> tuple[SpreadModel, Making, Attending]:
    """The spread model, what it was made of, and how it attends.

    Raises:
        UsageError, ModelError: the model, or how it is tuned, can't be spread in the way that was asked for.
    """
    settings, degrees = session.layout.parallelism, session.layout.degrees
    check_sharded_tuner(config.tuner, degrees, fsdp=settings.fsdp != "none")
    dtype = session.precision.stored(full=config.tuner.tuner_type == "full")
    start = Start(data.model_path, config.model, config.tuner, config.training.seed, dtype, task)
    attention = _settle_attention(config, session, data, task)
    stops = data.encoder.stop_token_ids()

    def build() -> tuple[nn.Module, PreTrainedModel]:
        causal_lm = build_empty_model(data.model_path, config.model, dtype=dtype, task=task)
        name_padding(causal_lm, data.tokenizer.pad_token_id)
        fix_ends(causal_lm, stops)
        return apply_tuner(causal_lm, config.tuner, adapters=config.model.adapters), causal_lm

    def prepare(whole: nn.Module, causal_lm: PreTrainedModel) -> None:
        if config.training.torch_compile:
            compile_layers(find_decoder(causal_lm))

    def fill(module: nn.Module, causal_lm: PreTrainedModel) -> None:
        fill_model(module, causal_lm, start, device=session.device.torch_device)

    making = Making(
        settings,
        config.objective,
        session.precision,
        attention=attention.name,
        pad_token_id=int(data.tokenizer.pad_token_id or 0),
        prepare=prepare,
        fill=fill,
        objectives=partial(session.method.make_objectives, config),
    )
    model = spread_model(build, session.mesh, making)
    if config.training.torch_compile:
        session.notes.append("the layers are compiled in the first steps, which take half a minute or more")
    return model, making, attention


def _settle_attention(config: TrainConfig, session: Session, data: Data, task: Task) -> Attending:
    """How the model attends, proven on a small model of the same kind."""
    rows = bool(session.mesh["tp"] or session.mesh["cp"] or session.mesh["pp"])
    axis = next((name for name in ("tp", "cp", "pp") if session.mesh[name]), "")

    def settle() -> tuple[Attending, list[str]]:
        empty = build_empty_model(data.model_path, config.model, dtype=session.precision.compute, task=task)
        first = first_position(find_decoder(empty))
        beyond = check_context(empty.config, data.train.longest, first_position=first)
        words = [beyond, None if config.model.adapters else fresh_words(empty)]
        small = small_model(empty.config, trust_remote_code=config.model.trust_remote_code, task=task_of(empty))
        padding_free, notes = choose_attention(
            small, config.model.attn_impl, padding_free=config.batching.padding_free, packing=config.batching.packing
        )
        able = padding_free
        if rows and not able:  # batches become rows of examples end to end, however they are loaded
            able, _ = choose_attention(small, "auto", padding_free=None, packing=False)
        if rows and not able:
            raise UsageError(
                f"{type(small).__name__} can't take examples laid end to end, which {axis} needs",
                where=_FLAGS[axis],
                fix="--fsdp fsdp2 shards it over the same processes",
            )
        name = small.config._attn_implementation or "sdpa"
        why: str | None = "ranks share rows" if session.mesh["cp"] else "rows are padded"
        if session.method.units and padding_free and not session.mesh["cp"]:
            why = why_written_out(small, find_decoder(small), session.precision.autocast)
        return Attending(name, padding_free, why), notes + [note for note in words if note]

    attention, notes = session.group.from_main(settle)
    session.notes += notes
    return attention


_FLAGS = {
    "tp": "--tensor_parallel_size",
    "cp": "--sequence_parallel_size",
    "pp": "--pipeline_parallel_size",
}


def trainable_of(model: SpreadModel, session: Session) -> dict[str, object]:
    """Trained and all parameters, and their share, over all stages; a tied matrix that two stages hold counts once."""
    numbers = [0.0, 0.0]
    for chunk in model.chunks:
        second = set(chunk.causal_lm.all_tied_weights_keys) if chunk.num_stages > 1 else set()
        for name, parameter in chunk.causal_lm.named_parameters():
            if name not in second:
                numbers[0] += parameter.numel() if parameter.requires_grad else 0
                numbers[1] += parameter.numel()
    trainable, total = session.group.along(session.mesh["pp"]).sum(numbers)
    return {"trainable": int(trainable), "total": int(total), "percent": 100 * trainable / total}
