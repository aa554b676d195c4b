"""Which peft configuration a `TunerConfig` means on a given model: one short function per adapter kind.

Targets are resolved and checked here, so that a name that matches nothing is answered with the names there are.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import peft
import torch
from peft import PeftType
from torch import nn

from swift.config.tuner import TunerConfig
from swift.core.errors import ModelError, UsageError, nearest
from swift.models.adapters import AdapterConfig
from swift.models.kinds import fresh_parameters, head_parts, task_of
from swift.models.loading import NEW_TOKEN_IDS

_LAYERS = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_LORA_INITS = ("true", "false", "gaussian", "pissa", "pissa_niter_N", "olora", "orthogonal", "mica")
_TASK_TYPES = {
    "causal_lm": "CAUSAL_LM",
    "seq_cls": "SEQ_CLS",
    "token_cls": "TOKEN_CLS",
    "embedding": "FEATURE_EXTRACTION",
}
_UNAVAILABLE_INITS = {
    "eva": "it needs activations of the training data before training",
    "corda": "it needs activations of the training data before training",
    "lora_ga": "it needs gradients of the training data before training",
    "lora-ga": "it needs gradients of the training data before training",
    "loftq": "it needs a base model that is quantized on loading",
}


def adapter_config(model: nn.Module, config: TunerConfig, *, total_steps: int | None = None) -> AdapterConfig:
    """The peft configuration for `config` on this model. Targets are checked against the model's modules.

    Raises:
        ModelError: a target matches no module.
        UsageError: a setting that this tuner doesn't have.
    """
    if config.tuner_type not in TUNERS:
        raise UsageError(f"there is no tuner {config.tuner_type!r}", where="--tuner_type", fix=", ".join(TUNERS))
    common: dict[str, Any] = {
        "task_type": _TASK_TYPES[task_of(model).kind] if hasattr(model, "get_output_embeddings") else None,
        "target_modules": _targets(model, config),
        "modules_to_save": _modules_to_save(model, config),
    }
    new_tokens = list(getattr(model, NEW_TOKEN_IDS, []))
    if new_tokens:
        common |= _new_token_settings(model, config.tuner_type, new_tokens, common)
    return TUNERS[config.tuner_type].build(model, config, common, total_steps)


# one function per kind: what of TunerConfig it reads, under peft's names
Builder = Callable[[nn.Module, TunerConfig, dict[str, Any], int | None], AdapterConfig]


@dataclass(frozen=True)
class Tuner:
    """An adapter kind: its name in peft, and how its configuration is made."""

    peft_type: PeftType
    build: Builder


def _lora(model: nn.Module, config: TunerConfig, common: dict[str, Any], total_steps: int | None) -> AdapterConfig:
    init = _lora_init(config)
    if config.target_parameters:
        common |= {"target_parameters": _target_parameters(model, config)}
        if config.lora_dropout:
            raise UsageError(
                "LoRA on parameters can't have dropout", where="--target_parameters", fix="--lora_dropout 0"
            )
    return peft.LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type] # a float works as well
        lora_dropout=config.lora_dropout,
        bias=config.lora_bias,
        use_dora=config.use_dora,
        use_rslora=config.use_rslora,
        init_lora_weights=init,  # type: ignore[arg-type] # peft's annotation lacks pissa_niter_16
        **common,
    )


def _adalora(model: nn.Module, config: TunerConfig, common: dict[str, Any], total_steps: int | None) -> AdapterConfig:
    _only_plain(config, "adalora")
    steps = total_steps or 1_000_000  # peft insists on a number; set_total_steps brings the real one
    return peft.AdaLoraConfig(
        target_r=config.adalora_target_r,
        init_r=config.adalora_init_r,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=config.lora_dropout,
        bias=config.lora_bias,
        orth_reg_weight=config.adalora_orth_reg_weight,
        total_step=steps,
        **common,
    )


def _ia3(model: nn.Module, config: TunerConfig, common: dict[str, Any], total_steps: int | None) -> AdapterConfig:
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING as FEEDFORWARD

    _only_plain(config, "ia3")
    if config.lora_bias != "none":
        raise UsageError("ia3 can't train biases", where="--lora_bias", fix="--lora_bias none")
    # scaled on their input, as in the paper: the second feed-forward matrix, where peft knows its name
    kind = getattr(getattr(model, "config", None), "model_type", "")
    targets = common["target_modules"]
    feedforward = [
        name
        for name in FEEDFORWARD.get(kind, [])
        if targets == "all-linear" or any(_ends(entry, name) for entry in targets)
    ]
    if isinstance(targets, str) and targets == "all-linear":
        common |= {"target_modules": _linear_names(model)}
        feedforward = [entry for entry in common["target_modules"] if any(_ends(entry, name) for name in feedforward)]
    return peft.IA3Config(feedforward_modules=feedforward, init_ia3_weights=_plain_init(config), **common)


def _vera(model: nn.Module, config: TunerConfig, common: dict[str, Any], total_steps: int | None) -> AdapterConfig:
    _only_plain(config, "vera")
    return peft.VeraConfig(
        r=config.vera_rank,
        d_initial=config.vera_d_initial,
        vera_dropout=config.lora_dropout,
        bias=_bias(config, "vera_only"),
        init_weights=_plain_init(config),
        **common,
    )


def _boft(model: nn.Module, config: TunerConfig, common: dict[str, Any], total_steps: int | None) -> AdapterConfig:
    _only_plain(config, "boft")
    if config.boft_n_butterfly_factor != 1 and not torch.cuda.is_available():
        raise UsageError(
            "BOFT with more than one butterfly factor needs peft's CUDA kernel",
            where="--boft_n_butterfly_factor",
            fix="--boft_n_butterfly_factor 1",
        )
    return peft.BOFTConfig(
        boft_block_size=config.boft_block_size,
        boft_n_butterfly_factor=config.boft_n_butterfly_factor,
        boft_dropout=config.lora_dropout,
        bias=_bias(config, "boft_only"),
        init_weights=_plain_init(config),
        **common,
    )


def _oft(model: nn.Module, config: TunerConfig, common: dict[str, Any], total_steps: int | None) -> AdapterConfig:
    _only_plain(config, "oft")
    return peft.OFTConfig(
        r=0,
        oft_block_size=config.oft_block_size,
        module_dropout=config.lora_dropout,
        bias=_bias(config, "oft_only"),  # type: ignore[arg-type]
        init_weights=_plain_init(config),
        **common,
    )


def _fourierft(model: nn.Module, config: TunerConfig, common: dict[str, Any], total_steps: int | None) -> AdapterConfig:
    _only_plain(config, "fourierft")
    return peft.FourierFTConfig(
        n_frequency=config.fourier_n_frequency,
        scaling=config.fourier_scaling,
        bias=_bias(config, "fourier_only"),
        init_weights=_plain_init(config),  # true: zeros, so that training starts from the base model
        **common,
    )


def _miss(model: nn.Module, config: TunerConfig, common: dict[str, Any], total_steps: int | None) -> AdapterConfig:
    _only_plain(config, "miss")
    init = config.init_weights if config.init_weights in ("bat", "mini") else _plain_init(config)
    return peft.MissConfig(
        r=config.lora_rank,
        miss_dropout=config.lora_dropout,
        bias=_bias(config, "MiSS_only"),
        init_weights=init,  # type: ignore[arg-type]
        **common,
    )


def _loha(model: nn.Module, config: TunerConfig, common: dict[str, Any], total_steps: int | None) -> AdapterConfig:
    _only_plain(config, "loha")
    return peft.LoHaConfig(
        r=config.lora_rank,
        alpha=config.lora_alpha,  # type: ignore[arg-type]
        rank_dropout=config.lora_dropout,
        init_weights=_plain_init(config),
        **common,
    )


def _lokr(model: nn.Module, config: TunerConfig, common: dict[str, Any], total_steps: int | None) -> AdapterConfig:
    _only_plain(config, "lokr")
    init = "lycoris" if config.init_weights == "lycoris" else _plain_init(config)
    return peft.LoKrConfig(
        r=config.lora_rank,
        alpha=config.lora_alpha,  # type: ignore[arg-type]
        rank_dropout=config.lora_dropout,
        init_weights=init,  # type: ignore[arg-type]
        **common,
    )


def _hra(model: nn.Module, config: TunerConfig, common: dict[str, Any], total_steps: int | None) -> AdapterConfig:
    _only_plain(config, "hra")
    return peft.HRAConfig(
        r=config.lora_rank, bias=_bias(config, "hra_only"), init_weights=_plain_init(config), **common
    )


TUNERS: dict[str, Tuner] = {
    "lora": Tuner(PeftType.LORA, _lora),
    "adalora": Tuner(PeftType.ADALORA, _adalora),
    "ia3": Tuner(PeftType.IA3, _ia3),
    "vera": Tuner(PeftType.VERA, _vera),
    "boft": Tuner(PeftType.BOFT, _boft),
    "oft": Tuner(PeftType.OFT, _oft),
    "fourierft": Tuner(PeftType.FOURIERFT, _fourierft),
    "miss": Tuner(PeftType.MISS, _miss),
    "bone": Tuner(PeftType.MISS, _miss),  # the earlier name of MiSS
    "loha": Tuner(PeftType.LOHA, _loha),
    "lokr": Tuner(PeftType.LOKR, _lokr),
    "hra": Tuner(PeftType.HRA, _hra),
}


def _only_plain(config: TunerConfig, kind: str) -> None:
    """Refuse what only LoRA has, rather than dropping it."""
    for flag in ("use_dora", "use_rslora", "target_parameters", "lorap_lr_ratio"):
        if getattr(config, flag):
            raise UsageError(f"{kind} has no --{flag}", where=f"--{flag}", fix="--tuner_type lora, or leave it out")


def _bias(config: TunerConfig, own_name: str) -> str:
    """`lora_only` means the biases of the layers with adapters, for which each kind has a name of its own."""
    return own_name if config.lora_bias == "lora_only" else config.lora_bias


def _plain_init(config: TunerConfig) -> bool:
    if config.init_weights.lower() not in ("true", "false"):
        raise UsageError(
            f"--init_weights {config.init_weights} is not for {config.tuner_type}",
            where="--init_weights",
            fix="true, the kind's own start; or --tuner_type lora",
        )
    return config.init_weights.lower() == "true"


def _lora_init(config: TunerConfig) -> bool | str:
    init = config.init_weights.lower()
    if init in ("true", "false"):
        return init == "true"
    if init in _UNAVAILABLE_INITS:
        raise UsageError(
            f"--init_weights {init} is not supported: {_UNAVAILABLE_INITS[init]}",
            where="--init_weights",
            fix="pissa or olora start from the weights alone",
        )
    if init in _LORA_INITS or re.fullmatch(r"pissa_niter_\d+", init):
        if init == "orthogonal" and config.lora_rank % 2:
            raise UsageError(
                "the orthogonal start needs an even rank",
                where="--lora_rank",
                fix=f"--lora_rank {config.lora_rank + 1}",
            )
        return init
    close = nearest(init, _LORA_INITS)
    hint = f"did you mean {close[0]}? " if close else ""
    raise UsageError(
        f"there is no start called {config.init_weights!r}",
        where="--init_weights",
        fix=f"{hint}known: {', '.join(_LORA_INITS)}",
    )


def _targets(model: nn.Module, config: TunerConfig) -> list[str] | str:
    """`target_modules` for peft: "all-linear", a list of names that exist, or a regular expression over full names."""
    names = [name for name, module in model.named_modules() if name]
    if config.target_regex:
        try:
            pattern = re.compile(config.target_regex)
        except re.error as error:
            raise ModelError(
                f"{config.target_regex!r} is not a regular expression: {error}", where="--target_regex"
            ) from error
        if not any(pattern.fullmatch(name) for name in names):
            raise ModelError(
                f"no module's full name matches {config.target_regex!r} from start to end",
                where="--target_regex",
                fix=f"full names look like {', '.join(_full_names(model)[:3])}",
            )
        return config.target_regex
    entries = [
        entry.lower() if entry.lower() in ("all-linear", "all-embedding") else entry for entry in config.target_modules
    ]
    if entries == ["all-linear"]:
        return "all-linear"
    found: list[str] = []
    for entry in entries:
        if entry == "all-linear":
            found += _linear_names(model)
        elif entry == "all-embedding":
            found += [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
        else:
            _require_module(model, entry, "--target_modules")
            found.append(entry)
    if not found:
        if config.target_parameters:
            return []
        raise ModelError("no module is targeted", where="--target_modules", fix="--target_modules all-linear")
    return list(dict.fromkeys(found))


def _modules_to_save(model: nn.Module, config: TunerConfig) -> list[str] | None:
    """What is trained in full beside an adapter: as asked for, and a classifier's head, which is new."""
    for entry in config.modules_to_save:
        _require_module(model, entry, "--modules_to_save")
    names = list(config.modules_to_save)
    if task_of(model).has_labels:
        names += head_parts(model)  # type: ignore[arg-type] # a model with a task is one of Hugging Face's
        names += ["pooler"] if any("pooler" in name.split(".") for name in fresh_parameters(model)) else []
    return list(dict.fromkeys(names)) or None


def _target_parameters(model: nn.Module, config: TunerConfig) -> list[str]:
    names = [name for name, _ in model.named_parameters()]
    for entry in config.target_parameters:
        if not any(_ends(name, entry) for name in names):
            endings = sorted({".".join(name.split(".")[-2:]) for name in names})
            close = nearest(entry, endings, count=3) or endings[:8]
            raise ModelError(
                f"no parameter's name ends in {entry!r}",
                where="--target_parameters",
                fix="there are: " + ", ".join(close),
            )
    return list(config.target_parameters)


def _require_module(model: nn.Module, entry: str, flag: str) -> None:
    names = [name for name, _ in model.named_modules() if name]
    if any(_ends(name, entry) for name in names):
        return
    endings = sorted({name.rsplit(".", 1)[-1] for name in _full_names(model)})
    close = nearest(entry, endings)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ModelError(
        f"no module's name ends in {entry!r}", where=flag, fix=f"{hint}there are: {', '.join(endings[:20])}"
    )


def _full_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, _LAYERS)]


def _linear_names(model: nn.Module) -> list[str]:
    """Full names of all linear layers but those of the head."""
    heads = head_parts(model).values() if hasattr(model, "get_output_embeddings") else ()  # type: ignore[arg-type]
    inside = {part for head in heads for part in head.modules()}
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module not in inside]


def _ends(name: str, entry: str) -> bool:
    return name == entry or name.endswith("." + entry)


def _new_token_settings(model: Any, kind: str, new_tokens: list[int], common: dict[str, Any]) -> dict[str, Any]:
    """What makes an adapter train the rows of new tokens, in the embeddings and in the output head.

    All new rows start as one mean, so a head that isn't trained would give every new token the same logit for ever.
    A head that shares the embeddings' weight follows them, as long as they are trained row by row.

    Raises:
        UsageError: the kind of adapter can't train single rows, and the matrices aren't trained otherwise.
    """
    tables = {_name_of(model, table): table for table in (model.get_input_embeddings(), model.get_output_embeddings())}
    left = [name for name, table in tables.items() if table is not None and not _is_trained(name, common)]
    if not left:
        return {}
    flag = f"--modules_to_save {' '.join(name.rpartition('.')[2] for name in tables if name)}"
    if kind != "lora":
        raise UsageError(
            f"{kind} can't train the rows of new tokens in {' and '.join(left)}",
            where="--new_special_tokens",
            fix=f"{flag} trains these matrices whole; --tuner_type lora trains the new rows alone",
        )
    biased = [name for name in left if getattr(tables[name], "bias", None) is not None]
    if biased:  # peft's row-wise layer leaves the bias out
        raise UsageError(
            f"single rows of {biased[0]} can't be trained: it has a bias", where="--new_special_tokens", fix=flag
        )
    weights = {table.weight.data_ptr() for table in tables.values() if table is not None}
    if len(left) == 2 and len(weights) == 1:
        return {"trainable_token_indices": new_tokens}
    if len(weights) == 1 and left[0] == next(iter(tables)):  # peft would change the rows of the head as well
        raise UsageError(
            f"the rows of new tokens in {left[0]} can't be trained beside another adapter on the output head, which "
            "shares its weight",
            where="--new_special_tokens",
            fix=flag,
        )
    return {"trainable_token_indices": dict.fromkeys(left, new_tokens)}


def _name_of(model: nn.Module, wanted: nn.Module | None) -> str:
    return next((name for name, module in model.named_modules() if module is wanted), "")


def _is_trained(name: str, common: dict[str, Any]) -> bool:
    """Whether a matrix is among the targets or the modules to save, so that all its rows learn."""
    targets = common["target_modules"]
    entries = [*(targets if isinstance(targets, list) else []), *(common["modules_to_save"] or [])]
    return any(_ends(name, entry) for entry in entries) or (
        isinstance(targets, str) and targets != "all-linear" and re.fullmatch(targets, name) is not None
    )
