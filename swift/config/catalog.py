"""The commands: name, what it does, where its code and its settings are. New commands add a line here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """One command of the program.

    Attributes:
        name: as typed; it may be two words.
        module: module under `swift.commands` with `main`. It takes the configuration if there is one, else the
            remaining arguments as a list; it returns the exit code.
        config: name of the configuration class in `swift.config`; None for commands with a few options of their own.
        help: one line.
        usage: what follows the name in a usage line.
        group: heading in the overview.
        distributed: several processes can run it (`--nproc_per_node`).
    """

    name: str
    module: str
    config: str | None
    help: str
    usage: str
    group: str
    distributed: bool = False


_FLAGS = "[FILE.yaml] [--flag value ...]"

COMMANDS: dict[str, Command] = {
    command.name: command
    for command in (
        Command(
            "sft",
            "sft",
            "SftConfig",
            "fine-tune a model on conversations, or as a classifier, embedder or reranker",
            _FLAGS,
            "Train",
            True,
        ),
        Command("pt", "pt", "PtConfig", "go on pre-training a model on plain text", _FLAGS, "Train", True),
        Command("train", "sft", "SftConfig", "the same as sft", _FLAGS, "Train", True),
        Command(
            "megatron sft", "sft", "MegatronSftConfig", "the same as sft, full tuning by default", _FLAGS, "Train", True
        ),
        Command("megatron pt", "pt", "PtConfig", "the same as pt", _FLAGS, "Train", True),
        Command(
            "rlhf",
            "rlhf",
            "RlhfConfig",
            "tune by preferences (dpo, kto, orpo, ...), train a reward model, or distil a teacher",
            _FLAGS,
            "Train",
            True,
        ),
        Command(
            "megatron rlhf",
            "rlhf",
            "MegatronRlhfConfig",
            "the same as rlhf, full tuning by default",
            _FLAGS,
            "Train",
            True,
        ),
        Command("infer", "infer", "InferConfig", "talk to a model, or answer a file of prompts", _FLAGS, "Use", True),
        Command(
            "deploy",
            "deploy",
            "DeployConfig",
            "serve a model over HTTP, as OpenAI's clients expect it",
            _FLAGS,
            "Use",
            True,
        ),
        Command("app", "app", "AppConfig", "talk to a model in the browser", _FLAGS, "Use"),
        Command(
            "sample",
            "sample",
            "SampleConfig",
            "draw several answers to each prompt, rank them, keep the best as a data set",
            _FLAGS,
            "Use",
            True,
        ),
        Command("merge-lora", "merge_lora", "MergeLoraConfig", "merge an adapter into its model", _FLAGS, "Use"),
        Command("export", "export", "ExportConfig", "write a data set as token shards", _FLAGS, "Use"),
        Command(
            "data",
            "data",
            None,
            "clean, deduplicate and tokenise data by a recipe; check and preview it",
            "run|report|operators|check|preview ...",
            "Look",
        ),
        Command("config", "config", None, "show, describe or convert settings", "show|schema|convert ...", "Look"),
        Command("doctor", "doctor", None, "what is installed, what this machine can do, what conflicts", "", "Look"),
        Command(
            "quickstart", "quickstart", None, "tune a small model and talk to it, in minutes", "[--flag value]", "Start"
        ),
    )
}

# commands that scripts written for ms-swift may call and that this version lacks -> what to do meanwhile
LATER: dict[str, str] = {
    "eval": "benchmarks are being built; `swift sft --eval_steps N --val_dataset FILE` reports the evaluation loss",
    "web-ui": "the studio is being built; every run writes report.html meanwhile",
    "rollout": "rollout servers come with reinforcement learning, which is being built",
    "megatron": "`swift megatron sft`, `pt` and `rlhf` are there, on the engine of `swift sft`, `pt` and `rlhf`",
}
