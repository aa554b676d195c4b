"""What a model is for: predicting tokens, scoring a text, labelling its tokens, or giving its vector.

A `Task` says it, in plain values, so that it can lie beside a checkpoint as `task.json` and an adapter finds the model
class that it was trained on. From a task and a configuration come the Hugging Face class (its own where the family has
one, else decoder + `score`) and the numbers of a head that the checkpoint doesn't hold. Those are drawn from the seed
and the parameter's name alone, so they are the same on every rank and in every layout. Knows nothing about losses, or
about how models are loaded, cut or adapted.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from swift.core.errors import ModelError, did_you_mean
from swift.core.files import disk_errors

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

ModelKind = Literal["causal_lm", "seq_cls", "token_cls", "embedding"]
KINDS: tuple[str, ...] = get_args(ModelKind)
PROBLEMS = ("single_label_classification", "multi_label_classification", "regression")
POOLINGS = ("last", "cls", "mean")
TASK_FILE = "task.json"

_ATTRIBUTE = "swift_task"  # of a model: its `Task`
_FRESH = "swift_fresh_parameters"  # of a model: names of parameters that its checkpoint lacked
_AUTO_CLASSES = {
    "causal_lm": "AutoModelForCausalLM",
    "seq_cls": "AutoModelForSequenceClassification",
    "token_cls": "AutoModelForTokenClassification",
    "embedding": "AutoModel",
}
_ENDINGS: dict[ModelKind, str] = {"seq_cls": "ForSequenceClassification", "token_cls": "ForTokenClassification"}
_WORDS = {
    "causal_lm": "a language model",
    "seq_cls": "a sequence classifier",
    "token_cls": "a token classifier",
    "embedding": "an embedding model",
}


@dataclass(frozen=True)
class Task:
    """What a model is for.

    Attributes:
        kind: which head it has.
        num_labels: rows of the head of a classifier; None: as the checkpoint says.
        problem_type: one of `PROBLEMS`, for other tools that load the model; None: not said.
        labels: their names, in the order of the head's rows; empty for none.
        pooling: which state stands for a text: its `last` token's, its first one's (`cls`), or the `mean`. None: the
            model's own way.
        extra: further facts that belong to the checkpoint, plain JSON values: words that mean yes and no, sizes of
            shortened vectors.
    """

    kind: ModelKind = "causal_lm"
    num_labels: int | None = None
    problem_type: str | None = None
    labels: tuple[str, ...] = ()
    pooling: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value, known in (
            ("kind", self.kind, KINDS),
            ("problem_type", self.problem_type or PROBLEMS[0], PROBLEMS),
            ("pooling", self.pooling or POOLINGS[0], POOLINGS),
        ):
            if value not in known:
                hint = did_you_mean(str(value), known)
                raise ModelError(
                    f"a task has no {name} called {value!r}", where=name, fix=f"{hint} known: {', '.join(known)}"
                )
        if self.num_labels is not None and self.num_labels < 1:
            raise ModelError(f"{self.num_labels} labels can't be told apart", where="num_labels", fix="1 or more")
        if self.labels and self.num_labels not in (None, len(self.labels)):
            raise ModelError(
                f"{len(self.labels)} labels are named, and num_labels is {self.num_labels}",
                where="num_labels",
                fix=f"num_labels {len(self.labels)}, or leave it out",
            )
        if len(set(self.labels)) < len(self.labels):
            twice = next(name for name in self.labels if self.labels.count(name) > 1)
            raise ModelError(f"the label {twice!r} is named twice", where="labels", fix="name each label once")

    @property
    def has_labels(self) -> bool:
        """Whether the head has a row for each label."""
        return self.kind in _ENDINGS

    @property
    def size(self) -> int | None:
        """Rows of a classifier's head, if they are known."""
        return self.num_labels if self.num_labels is not None else len(self.labels) or None


CAUSAL_LM = Task()


def write_task(folder: Path, task: Task) -> None:
    """Write `task.json` beside a model or an adapter; nothing for a plain language model."""
    if task == CAUSAL_LM:
        return
    with disk_errors(folder):
        (folder / TASK_FILE).write_text(json.dumps(asdict(task), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_task(folder: Path) -> Task | None:
    """The task of a model or adapter folder; None where it has no `task.json`.

    Raises:
        ModelError: a file that can't be read, or a task that isn't known.
    """
    file = folder / TASK_FILE
    if not file.is_file():
        return None
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        known = {entry.name for entry in fields(Task)}
        if unknown := sorted(set(values) - known):
            raise ModelError(
                f"{file} has a field that isn't known here: {unknown[0]}",
                fix="a newer swift-llm wrote it; use that one",
            )
        return Task(**{**values, "labels": tuple(values.get("labels", ()))})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"{file} can't be read: {error}", fix="copy the folder again") from error


def task_of(model: object) -> Task:
    """What a Hugging Face model was loaded for; `CAUSAL_LM` where nothing was said."""
    task = getattr(model, _ATTRIBUTE, CAUSAL_LM)
    assert isinstance(task, Task)
    return task


def settle_task(model_config: PreTrainedConfig, task: Task, path: Path) -> Task:
    """Complete a task by what the checkpoint says, and write it into the model's configuration.

    Args:
        model_config: of the checkpoint in `path`; `num_labels`, `id2label`, `label2id`, `problem_type` are written.

    Raises:
        ModelError: the checkpoint has a head with another number of labels, or of another kind; or nobody says how many
            labels there are.
    """
    if task.kind == "causal_lm":
        return task
    task = replace(task, pooling=task.pooling or _own_pooling(model_config, task, path))
    if not task.has_labels:
        return task
    stored = stored_kind(model_config)
    if stored in _ENDINGS and stored != task.kind:
        raise ModelError(
            f"the model in {path} is {_WORDS[stored]}, and {_WORDS[task.kind]} is asked for",
            fix="start from the language model that it was made of",
        )
    has_head = stored == task.kind
    size = task.size or (model_config.num_labels if has_head else None)
    if size is None:
        raise ModelError(
            f"{_WORDS[task.kind]} needs to know how many labels there are, and the model in {path} has no head yet",
            where="--num_labels",
            fix="--num_labels N",
        )
    if has_head and model_config.num_labels != size:
        raise ModelError(
            f"the model in {path} has a head for {model_config.num_labels} labels, and {size} are asked for",
            where="--num_labels",
            fix=f"--num_labels {model_config.num_labels}, or start from the model that it was made of",
        )
    if not has_head or task.labels:
        names = task.labels or tuple(f"LABEL_{number}" for number in range(size))
        model_config.id2label = dict(enumerate(names))
        model_config.label2id = {name: number for number, name in enumerate(names)}
    known: Any = model_config  # whose annotations are narrower than its files
    known.problem_type = task.problem_type or (known.problem_type if has_head else None)
    names = tuple(str(known.id2label[number]) for number in range(size))
    plain = all(name == f"LABEL_{number}" for number, name in enumerate(names))
    return replace(task, num_labels=size, labels=() if plain else names, problem_type=known.problem_type or None)


def stored_kind(model_config: PreTrainedConfig) -> ModelKind | None:
    """The kind of head that a checkpoint was saved with, by the name of its class; None: of none that is known here."""
    name = next(iter(getattr(model_config, "architectures", None) or ()), "")
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return "causal_lm"
    return next((kind for kind, ending in _ENDINGS.items() if name.endswith(ending)), None)


def _own_pooling(model_config: PreTrainedConfig, task: Task, path: Path) -> str | None:
    """How a model pools by itself: as its sentence-embedding files say, else as its architecture does."""
    if task.kind == "token_cls":
        return None
    file = path / "1_Pooling" / "config.json"
    if task.kind == "embedding" and file.is_file():
        try:
            modes = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"{file} can't be read: {error}", fix="copy the folder again") from error
        found = {
            "last": modes.get("pooling_mode_lasttoken"),
            "cls": modes.get("pooling_mode_cls_token"),
            "mean": modes.get("pooling_mode_mean_tokens"),
        }
        chosen = [name for name, on in found.items() if on]
        if len(chosen) != 1:
            raise ModelError(f"{file} pools in a way that isn't known here", fix=f"one of: {', '.join(POOLINGS)}")
        return chosen[0]
    if task.kind == "embedding":
        return "mean" if is_encoder(model_config) else "last"
    return _classifier_pooling(model_config)


def _classifier_pooling(model_config: PreTrainedConfig) -> str:
    return getattr(model_config, "classifier_pooling", None) or ("cls" if is_encoder(model_config) else "last")


def own_pooling(model: PreTrainedModel) -> str:
    """How a classifier's own `forward` pools, whatever its task says."""
    return _classifier_pooling(model.config)


def is_encoder(model_config: PreTrainedConfig) -> bool:
    """Whether tokens see those after them, as in BERT: told by the family, whose base class has no causal decoder."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED

    family = model_config.get_text_config().model_type
    if family in MASKED:
        return not getattr(model_config, "is_decoder", False)
    return family not in CAUSAL


def model_class(model_config: PreTrainedConfig, kind: ModelKind) -> Any:
    """What loads such a model: an Auto class, or a class of decoder + `score` for a family that has none of its own.

    Raises:
        ModelError: the family has neither such a class nor a decoder that transformers knows.
    """
    import transformers as tf
    from transformers import modeling_layers

    auto = getattr(tf, _AUTO_CLASSES[kind])
    own_code = _AUTO_CLASSES[kind] in (getattr(model_config, "auto_map", None) or {})
    if kind in ("causal_lm", "embedding") or own_code or type(model_config) in auto._model_mapping:
        return auto
    decoder = tf.AutoModel._model_mapping.get(type(model_config), None)
    bases = [part for part in getattr(decoder, "__mro__", ()) if issubclass(part, tf.PreTrainedModel)]
    if len(bases) < 2 or is_encoder(model_config):
        raise ModelError(f"there is no {_WORDS[kind]} of the family {model_config.model_type}", fix="use another model")
    family: Any = bases[-2]  # the decoder's own class comes first, `PreTrainedModel` last
    name = type(model_config).__name__.removesuffix("Config") + _ENDINGS[kind]
    generic = getattr(modeling_layers, f"Generic{_ENDINGS[kind]}")
    return type(name, (generic, family), {"__module__": __name__, "base_model_prefix": family.base_model_prefix})


def make_empty(
    model_config: PreTrainedConfig,
    task: Task,
    *,
    dtype: torch.dtype,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A model of a settled task with numbers from today's random state, or none on the meta device."""
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    made = model_class(model_config, task.kind)
    options: dict[str, Any] = {"dtype": dtype}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if issubclass(made, _BaseAutoModelClass):
        model = made.from_config(model_config, trust_remote_code=trust_remote_code, **options)
    else:
        model = made._from_config(model_config, **options)
    return mark(model, task)


def mark(model: PreTrainedModel, task: Task) -> PreTrainedModel:
    """Let a model know its settled task. Of an embedding model, a pooler that no vector goes through is left out."""
    if task != CAUSAL_LM:
        setattr(model, _ATTRIBUTE, task)
    if task.kind == "embedding" and getattr(model, "pooler", None) is not None:
        model.pooler = None  # type: ignore[assignment]
    return model


def name_padding(model: PreTrainedModel, pad_token_id: int | None) -> None:
    """Tell the model's configuration which token pads, if it doesn't say: a classifier of Hugging Face's needs it.

    After building, since an embedding that is built with it would never train that token's row.
    """
    config = model.config.get_text_config()
    if task_of(model).kind != "causal_lm" and config.pad_token_id is None and pad_token_id is not None:
        config.pad_token_id = model.config.pad_token_id = int(pad_token_id)


def head_parts(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The parts of a model after its decoder, by name: what only its task needs. Empty for an embedding model."""
    if task_of(model).kind == "causal_lm":
        head = model.get_output_embeddings()
        return {name: part for name, part in model.named_modules() if part is head}
    decoder = model.base_model
    if decoder is model:
        return {}
    return {
        name: part
        for name, part in model.named_children()
        if part is not decoder and next(part.parameters(), None) is not None
    }


def may_be_fresh(model: PreTrainedModel, name: str) -> bool:
    """Whether a checkpoint may lack this parameter: of a classifier's head, if it has none yet, or of BERT's pooler."""
    task = task_of(model)
    if not task.has_labels:
        return False
    if "pooler" in name.split("."):
        return True
    return stored_kind(model.config) != task.kind and name.split(".")[0] in head_parts(model)


def draw_fresh(name: str, shape: Sequence[int], model_config: PreTrainedConfig, seed: int) -> torch.Tensor:
    """First numbers of a head's parameter, in float32: a function of its name, its shape and the seed.

    Matrices are normal with the model's `initializer_range` (0.02 where it says none) as deviation, as transformers
    draws them; biases zero, other vectors one.
    """
    import torch

    if len(shape) < 2:
        return torch.zeros(*shape) if name.endswith("bias") else torch.ones(*shape)
    deviation = getattr(model_config.get_text_config(), "initializer_range", None) or 0.02
    # torch's generator on the host heeds 32 bits of a seed
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.randn(*shape, generator=generator) * deviation


def note_fresh(model: PreTrainedModel, names: Sequence[str]) -> None:
    """Remember which parameters the checkpoint lacked."""
    setattr(model, _FRESH, sorted(names))


def fresh_parameters(model: object) -> list[str]:
    """Names of the parameters that weren't in the model's checkpoint and start from numbers drawn from the seed."""
    return list(getattr(model, _FRESH, ()))


def fresh_words(model: object) -> str | None:
    """A note for the user about a head that starts from random numbers; None if nothing does."""
    names = fresh_parameters(model)
    if not names:
        return None
    return f"the checkpoint has no {', '.join(names)}: drawn from the seed, and to be trained"
