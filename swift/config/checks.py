"""Everything that can be found wrong with a configuration before torch is imported, reported together.

Only the settings themselves, the output folder and the checkpoint to resume are looked at. Whether a model or data
file exists is known to the rooms that read them; `swift.commands.precheck` asks all of them.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from swift.config.commands import PtConfig
from swift.config.communication import communication_faults
from swift.config.curriculum import read_curriculum
from swift.config.engine_checks import ENGINE_RANGES, engine_faults
from swift.config.files import CONFIG_NAME, what_is_there
from swift.config.parallel_checks import parallel_faults
from swift.config.preference_checks import PREFERENCE_RANGES, preference_faults
from swift.config.replicas import REPLICA_RANGES, replica_faults
from swift.config.resolve import Problem, raise_problems
from swift.config.saved import DEEPSPEED_FOLDER, LATEST, MANIFEST, damage, latest_root, resume_folder
from swift.config.schema import values_of
from swift.config.task_checks import TASK_RANGES, task_faults
from swift.core.errors import nearest
from swift.core.logging import rank

# setting -> (lowest, highest, whether the lowest itself is allowed, whether the highest is)
_RANGES: dict[str, tuple[float, float | None, bool, bool]] = {
    "split_dataset_ratio": (0, 1, True, False),
    "max_bad_rows": (0, None, True, True),
    "dataset_num_proc": (1, None, True, True),
    "max_length": (2, None, True, True),
    "packing_length": (2, None, True, True),
    "shuffle_buffer_size": (1, None, True, True),
    "mix_temperature": (0, None, False, True),
    "dataloader_num_workers": (0, None, True, True),
    "dataloader_prefetch_factor": (1, None, True, True),
    "max_model_len": (1, None, True, True),
    "lora_rank": (1, None, True, True),
    "lora_alpha": (0, None, False, True),
    "lora_dropout": (0, 1, True, False),
    "lorap_lr_ratio": (0, None, False, True),
    "adalora_target_r": (1, None, True, True),
    "adalora_init_r": (1, None, True, True),
    "vera_rank": (1, None, True, True),
    "boft_n_butterfly_factor": (1, None, True, True),
    "freeze_parameters_ratio": (0, 1, True, True),
    "label_smoothing_factor": (0, 1, True, False),
    "neftune_noise_alpha": (0, None, True, True),
    "loss_chunk_size": (0, None, True, True),
    "learning_rate": (0, None, True, True),
    "weight_decay": (0, None, True, True),
    "adam_beta1": (0, 1, True, False),
    "adam_beta2": (0, 1, True, False),
    "adam_epsilon": (0, None, False, True),
    "warmup_ratio": (0, 1, True, True),
    "warmup_steps": (0, None, True, True),
    "min_lr_ratio": (0, 1, True, True),
    "decay_ratio": (0, 1, True, True),
    "num_train_epochs": (0, None, True, True),
    "per_device_train_batch_size": (1, None, True, True),
    "per_device_eval_batch_size": (1, None, True, True),
    "router_aux_loss_coef": (0, None, True, True),
    "gradient_accumulation_steps": (1, None, True, True),
    "max_grad_norm": (0, None, True, True),
    "nproc_per_node": (1, None, True, True),
    "eval_steps": (1, None, True, True),
    "early_stop_interval": (1, None, True, True),
    "save_steps": (1, None, True, True),
    "save_total_limit": (1, None, True, True),
    "logging_steps": (1, None, True, True),
    "merge_tolerance": (0, None, False, True),
    **ENGINE_RANGES,
    **PREFERENCE_RANGES,
    **TASK_RANGES,
    **REPLICA_RANGES,
}

_LORA_ONLY = ("use_dora", "use_rslora", "lorap_lr_ratio")
_FULL_ONLY = (
    "freeze_parameters",
    "freeze_parameters_regex",
    "freeze_parameters_ratio",
    "trainable_parameters",
    "trainable_parameters_regex",
)
_METRICS = ("eval_loss", "eval_perplexity", "eval_token_accuracy")
_REGEXES = ("target_regex", "freeze_parameters_regex", "trainable_parameters_regex")


def check(config: Any, *, places: Mapping[str, str] | None = None) -> None:
    """Find every fault of a configuration that needs neither torch nor the model.

    Args:
        config: a command's configuration.
        places: where settings were given (`Parsed.places`), for messages.

    Raises:
        UsageError: naming all faults at once.
    """
    raise_problems(find_problems(config, places=places))


def find_problems(config: Any, *, places: Mapping[str, str] | None = None) -> list[Problem]:
    """The faults that `check` would raise."""
    checker = _Checker(config, places or {})
    return list(checker.problems())


def has_evaluation_rows(values: Mapping[str, Any]) -> bool:
    """Whether these settings give rows to evaluate on; an export that is named as a whole may hold some."""
    if values["val_dataset"] or values["cached_val_dataset"] or values["split_dataset_ratio"] > 0:
        return True
    return any((Path(text.partition("#")[0]).expanduser() / "val").is_dir() for text in values["cached_dataset"])


class _Checker:
    """The settings by name, and the rules over them. A rule whose settings a command lacks doesn't apply."""

    def __init__(self, config: Any, places: Mapping[str, str]) -> None:
        self.places = places
        self.values = values_of(config)
        self.training = hasattr(config, "training")
        self.plain_text = isinstance(config, PtConfig)

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name)

    def fault(self, names: str, message: str, fix: str | None = None) -> Problem:
        """A problem that comes from the first of these settings that somebody gave, or else from the first."""
        given = [self.places[name] for name in names.split() if name in self.places]
        where = " and ".join(dict.fromkeys(given)) or f"--{names.split()[0]}"
        return Problem(message, where, fix)

    def problems(self) -> Iterator[Problem]:
        yield from self.ranges()
        yield from self.regexes()
        yield from self.template()
        if self.training:
            yield from self.data()
            yield from self.mixing()
            yield from self.streaming()
            yield from self.batches()
            yield from self.tuner()
            yield from self.length_of_run()
            yield from self.evaluation()
            yield from self.resume()
            yield from self.output()
            yield from communication_faults(self.values, self.fault)
            yield from parallel_faults(self.values, self.fault)
            yield from preference_faults(self.values, self.fault)
        yield from task_faults(self.values, self.fault, plain_text=self.plain_text)
        yield from self.generation()
        yield from self.merging()

    def ranges(self) -> Iterator[Problem]:
        for name, (low, high, low_allowed, high_allowed) in _RANGES.items():
            value = self[name]
            if value is None:
                continue
            if not math.isfinite(value):
                yield self.fault(name, f"{name} must be a finite number, not {value:g}")
                continue
            too_low = value < low or (value == low and not low_allowed)
            too_high = high is not None and (value > high or (value == high and not high_allowed))
            if too_low or too_high:
                least = f"at least {low:g}" if low_allowed else f"above {low:g}"
                most = "" if high is None else f" and {'at most' if high_allowed else 'below'} {high:g}"
                yield self.fault(name, f"{name} must be {least}{most}, not {value:g}")

    def regexes(self) -> Iterator[Problem]:
        for name in _REGEXES:
            if self[name]:
                try:
                    re.compile(self[name])
                except re.error as error:
                    yield self.fault(name, f"{name} is not a regular expression: {error}", "escape dots as \\.")

    def template(self) -> Iterator[Problem]:
        template = self["template"]
        if template and template != "chatml" and not Path(template).expanduser().is_file():
            yield self.fault(
                "template",
                f"template {template!r} is neither `chatml` nor a file",
                "leave it out: every tokenizer's own template is used; or give a .jinja file",
            )
        system = self["system"]
        if system and system.endswith(".txt") and "\n" not in system and not Path(system).expanduser().is_file():
            yield self.fault("system", f"there is no file {system} with the system prompt", what_is_there(Path(system)))

    def data(self) -> Iterator[Problem]:
        if not self["dataset"] and not self["cached_dataset"] and not self["dry_run"]:
            yield self.fault("dataset", "no data given", "--dataset rows.jsonl (several files or folders work as well)")
        if self["cached_val_dataset"] and (self["val_dataset"] or self["split_dataset_ratio"] > 0):
            yield self.fault(
                "cached_val_dataset val_dataset split_dataset_ratio",
                "cached_val_dataset is not the only one that gives evaluation rows",
                "leave out val_dataset and split_dataset_ratio, or cached_val_dataset",
            )
        for name in ("model_name", "model_author"):
            if len(self[name]) > 2:
                yield self.fault(name, f"{name} takes one value, or two (Chinese, English), not {len(self[name])}")

    def mixing(self) -> Iterator[Problem]:
        sources = len(self["dataset"]) + len(self["cached_dataset"] or [])
        for name in ("interleave_prob", "mix_epochs"):
            values = self[name]
            if not values:
                continue
            if len(values) != sources:
                yield self.fault(
                    f"{name} dataset",
                    f"{name} has {len(values)} value(s) for {sources} dataset(s)",
                    "give one for each, in the order of --dataset and --cached_dataset",
                )
            least = "above 0" if name == "mix_epochs" else "from 0 on, one of them above it"
            if any(not math.isfinite(v) or v < 0 or (v == 0 and name == "mix_epochs") for v in values) or not any(
                values
            ):
                yield self.fault(name, f"the values of {name} must be numbers {least}: {' '.join(map(str, values))}")
        deciders = [n for n in ("interleave_prob", "mix_temperature", "curriculum") if self[n] not in (None, [], {})]
        if len(deciders) > 1:
            yield self.fault(
                " ".join(deciders), f"{' and '.join(deciders)} both give the shares", "leave out one of them"
            )
        if self["stopping_strategy"] and not deciders and not self["mix_epochs"]:
            yield self.fault(
                "stopping_strategy",
                "stopping_strategy does nothing: the datasets aren't mixed",
                "--interleave_prob, --mix_temperature, --mix_epochs or --curriculum mixes them",
            )
        if self["curriculum"]:
            yield from self.curriculum(sources)

    def curriculum(self, sources: int) -> Iterator[Problem]:
        try:
            curriculum = read_curriculum(self["curriculum"])
        except ValueError as error:
            yield self.fault("curriculum", f"curriculum {error}", "see docs/mixing.md for its form")
            return
        if curriculum.difficulty is None and len(curriculum.weights[0]) != sources:
            yield self.fault(
                "curriculum dataset",
                f"curriculum gives {len(curriculum.weights[0])} weights at a step, and there are {sources} dataset(s)",
                "give one for each, in the order of --dataset and --cached_dataset",
            )
        if curriculum.difficulty is not None and self["mix_epochs"]:
            yield self.fault(
                "mix_epochs curriculum", "mix_epochs is for datasets; difficulty bins are passed through once"
            )
        if curriculum.difficulty is not None and self["streaming"]:
            yield self.fault(
                "curriculum streaming",
                "examples can't be put into difficulty bins before they are read",
                "leave streaming out, or sort them into files and mix these",
            )

    def streaming(self) -> Iterator[Problem]:
        if not self["streaming"]:
            return
        if self["split_dataset_ratio"] > 0:
            yield self.fault(
                "split_dataset_ratio streaming",
                "a share of rows that are read while training can't be set aside",
                "give the evaluation rows with --val_dataset",
            )
        if self["cached_dataset"]:
            yield self.fault(
                "cached_dataset streaming",
                "cached_dataset is mapped, not streamed: it needs no memory as it is",
                "leave streaming out, or give the rows with --dataset",
            )

    def batches(self) -> Iterator[Problem]:
        if self["packing"]:
            if self["padding_free"] is False:
                yield self.fault(
                    "padding_free packing",
                    "packing true and padding_free false exclude each other",
                    "leave padding_free out: packed rows have no padding",
                )
            if self["group_by_length"]:
                yield self.fault(
                    "group_by_length packing",
                    "packing and group_by_length exclude each other",
                    "leave group_by_length out: packed rows have one length",
                )
            if self["attn_impl"] in ("sdpa", "eager"):
                yield self.fault(
                    "attn_impl packing",
                    f"attn_impl {self['attn_impl']} would let packed examples see each other",
                    "leave attn_impl out",
                )
        length = self["packing_length"]
        if length is not None and not self["packing"]:
            yield self.fault("packing_length", "packing_length does nothing without packing", "--packing true")
        elif length is not None and length < self["max_length"]:
            yield self.fault(
                "packing_length max_length",
                f"rows of packing_length {length} can't hold examples of up to max_length {self['max_length']}",
                f"--max_length {length}, or a larger packing_length",
            )
        if self["truncation_strategy"] == "split" and self["use_chat_template"] is not False:
            yield self.fault(
                "truncation_strategy",
                "truncation_strategy split is for plain text; a conversation can't be cut into rows",
                "--truncation_strategy delete, right or left",
            )

    def tuner(self) -> Iterator[Problem]:
        kind = self["tuner_type"]
        if kind != "full":
            for name in _FULL_ONLY:
                if self[name]:
                    yield self.fault(
                        name, f"{name} is for full tuning; with {kind} the model is frozen", "--tuner_type full"
                    )
        if kind != "lora":
            for name in _LORA_ONLY:
                if self[name]:
                    yield self.fault(name, f"{name} does nothing with tuner_type {kind}", "--tuner_type lora")
        if kind == "adalora" and self["adalora_init_r"] < self["adalora_target_r"]:
            yield self.fault(
                "adalora_init_r adalora_target_r",
                f"adalora_init_r {self['adalora_init_r']} is below adalora_target_r {self['adalora_target_r']}",
                "AdaLoRA starts with the larger rank and prunes",
            )
        if kind == "full" and self["adapters"]:
            yield self.fault(
                "adapters",
                "an adapter can't be trained on in full tuning",
                f"merge it first: swift merge-lora --adapters {self['adapters'][0]}",
            )

    def length_of_run(self) -> Iterator[Problem]:
        steps, epochs = self["max_steps"], self["num_train_epochs"]
        if steps == 0 or steps < -1:
            yield self.fault("max_steps", f"max_steps must be above 0, not {steps}", "leave it out to count in epochs")
        elif steps == -1 and epochs == 0:
            yield self.fault("num_train_epochs", "num_train_epochs is 0: nothing would be trained")
        if self["learning_rate"] == 0:
            yield self.fault("learning_rate", "learning_rate is 0: nothing would be learnt", "--learning_rate 1e-4")
        if self["router_aux_loss_coef"] and self["balance_micro_batches"]:
            yield self.fault(
                "router_aux_loss_coef balance_micro_batches",
                "router_aux_loss_coef balances experts over the micro-batches that all ranks run at the same time, and "
                "with balance_micro_batches ranks run different numbers of them",
                "leave one of them out",
            )
        if self["lr_scheduler_type"] == "wsd":
            yield from self.warmup_and_decay()

    def warmup_and_decay(self) -> Iterator[Problem]:
        """Both must fit into the run, as far as its length is known here."""
        warmup, decay, steps = self["warmup_steps"], self["decay_ratio"], self["max_steps"]
        if not warmup and self["warmup_ratio"] + decay > 1:
            yield self.fault(
                "decay_ratio warmup_ratio", "warmup_ratio and decay_ratio add up to more than the whole run"
            )
        elif warmup and steps > 0 and warmup + round(decay * steps) > steps:
            yield self.fault(
                "warmup_steps decay_ratio",
                f"{warmup} steps of warm-up and {round(decay * steps)} of decay are more than the {steps} of the run",
            )

    def evaluation(self) -> Iterator[Problem]:
        rows = has_evaluation_rows(self.values)
        strategy = self["eval_strategy"]
        needing = {
            "load_best_model_at_end": self["load_best_model_at_end"],
            "early_stop_interval": self["early_stop_interval"] is not None,
            "eval_on_start": self["eval_on_start"],
        }
        for name in (name for name, asked in needing.items() if asked):
            if not rows:
                yield self.fault(
                    name,
                    f"{name} needs evaluation rows, and there are none",
                    "--val_dataset FILE, or --split_dataset_ratio 0.01",
                )
            elif strategy == "no" and name in ("load_best_model_at_end", "early_stop_interval"):
                yield self.fault(f"{name} eval_strategy", f"{name} needs evaluation, and eval_strategy is no")
        metric = self["metric_for_best_model"]
        conversation = self["rlhf_type"] is None and self["task_type"] == "causal_lm"  # else the method has its own
        if conversation and f"eval_{metric.removeprefix('eval_')}" not in _METRICS:
            close = nearest(metric, _METRICS)
            yield self.fault(
                "metric_for_best_model",
                f"metric_for_best_model {metric!r} is not measured",
                (f"did you mean {close[0]}? " if close else "") + f"there are: {', '.join(_METRICS)}",
            )
        saving = self["save_strategy"]
        if rows and self["load_best_model_at_end"] and saving == "no":
            yield self.fault(
                "load_best_model_at_end save_strategy",
                "load_best_model_at_end needs checkpoints, and save_strategy is no",
                "--save_strategy steps",
            )
        if rows and strategy is None and saving == "no" and self["early_stop_interval"] is not None:
            yield self.fault(
                "early_stop_interval save_strategy",
                "early_stop_interval needs evaluation, which follows save_strategy no",
                "--eval_strategy steps",
            )

    def resume(self) -> Iterator[Problem]:
        wanted = self["resume_from_checkpoint"]
        if not wanted:
            if self["resume_only_model"]:
                yield self.fault(
                    "resume_only_model", "resume_only_model needs a checkpoint", "--resume_from_checkpoint FOLDER"
                )
            return
        folder = resume_folder(wanted, self["output_dir"], self["model"])
        if folder is None:
            latest = f"there is no complete checkpoint below {latest_root(self['output_dir'], self['model'])}"
            by_name = wanted.lower() not in LATEST
            message = f"there is no checkpoint {wanted}" if by_name else latest
            fix = what_is_there(Path(wanted)) if by_name else "leave resume_from_checkpoint out to start afresh"
            yield self.fault("resume_from_checkpoint", message, fix)
        elif not (folder / MANIFEST).is_file():
            yield self.fault(
                "resume_from_checkpoint",
                f"{folder} is not a complete checkpoint of `swift` (it has no complete.json)",
                "name a checkpoint-N folder, or `latest`; weights of other tools: --model or --adapters",
            )
        elif (wrong := damage(folder)) is not None:
            yield self.fault(
                "resume_from_checkpoint",
                f"the checkpoint {folder} is damaged: {wrong}",
                "resume from another one; `latest` takes the newest whole one",
            )
        elif self["resume_only_model"]:
            return
        elif (by_deepspeed := (folder / DEEPSPEED_FOLDER).is_dir()) or (folder / "optimizer.pt").is_file():
            if by_deepspeed != bool(self["deepspeed"]):
                yield self.fault(
                    "resume_from_checkpoint deepspeed",
                    f"the optimizer's state in {folder} was written {'by' if by_deepspeed else 'without'} DeepSpeed, "
                    "and only such a run can go on with it",
                    ("give --deepspeed as the run had it" if by_deepspeed else "--deepspeed none")
                    + "; or take only the weights: --resume_only_model true",
                )
        else:
            yield self.fault(
                "resume_from_checkpoint",
                f"{folder} holds weights only (it was saved with save_only_model)",
                "--resume_only_model true starts new steps from its weights",
            )

    def output(self) -> Iterator[Problem]:
        if rank() != 0:  # rank 0 may have begun to write
            return
        folder = Path(self["output_dir"] or "output").expanduser()
        existing = folder
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        if not existing.is_dir():
            yield self.fault("output_dir", f"{existing} is a file; output_dir {folder} can't be made")
        elif not os.access(existing, os.W_OK | os.X_OK):
            yield self.fault("output_dir", f"output_dir {folder} can't be written: no rights in {existing}")
        elif not self["add_version"] and not self["overwrite_output_dir"] and not self["resume_from_checkpoint"]:
            left = [p.name for p in folder.glob("checkpoint-*")] if folder.is_dir() else []
            if left or (folder / CONFIG_NAME).is_file():
                yield self.fault(
                    "output_dir add_version",
                    f"{folder} holds another run already ({', '.join(sorted(left)[:3]) or CONFIG_NAME})",
                    "--resume_from_checkpoint latest goes on with it; --overwrite_output_dir true writes over it; "
                    "--add_version true makes a sub-folder",
                )

    def generation(self) -> Iterator[Problem]:
        yield from engine_faults(self.values, self.fault)
        yield from replica_faults(self.values, self.fault)
        if self["load_data_args"] and self["load_args"] is False:
            yield self.fault("load_data_args load_args", "load_data_args needs load_args true")
        if self["merge_lora"] and not self["adapters"]:
            yield self.fault("merge_lora", "merge_lora needs an adapter", "--adapters FOLDER")

    def merging(self) -> Iterator[Problem]:
        if "max_shard_size" not in self.values:
            return
        if not self["adapters"]:
            yield self.fault("adapters", "no adapter given", "--adapters output/.../checkpoint-100")
        if not re.fullmatch(r"\d+(\.\d+)?\s*[KMGT]i?B", self["max_shard_size"], re.IGNORECASE):
            yield self.fault(
                "max_shard_size", f"max_shard_size {self['max_shard_size']!r} is not a size", "such as 5GB"
            )
        target = self["output_dir"]
        if target and Path(target).is_dir() and any(Path(target).iterdir()) and not self["exist_ok"]:
            yield self.fault("output_dir", f"{target} is not empty", "--exist_ok true writes over it")
