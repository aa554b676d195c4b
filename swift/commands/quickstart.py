"""`swift quickstart`: the whole way on a small model. Ask, tune, ask again, and show what to type next.

Only composes what the other commands are made of: the inference engine, `sft`, and the monitor's curve.
"""

from __future__ import annotations

import gc
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from swift.commands.precheck import precheck
from swift.commands.sft import TrainResult, sft
from swift.config import InferConfig, SftConfig, build_config
from swift.config.fields import setting
from swift.config.parse import parse_command_line
from swift.monitor.history import History
from swift.monitor.text import duration, sparkline

QUESTIONS = ("Who are you?", "Who made you?", "What is the capital of France?")
_ANSWER_TOKENS = 48

# Chosen on the packaged model: enough for the new name, few enough for a coffee break on two cores.
_SETTINGS = {
    "dataset": ["self-cognition"],
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-3,
    "warmup_ratio": 0.1,
    "lora_dropout": 0.0,
    "logging_steps": 5,
}


@dataclass
class QuickstartOptions:
    """Tune a small model to know its new name, and talk to it before and after."""

    model: str = setting("smollm2", help="model to tune: the packaged one, a local folder or a hub id")
    model_name: list[str] = setting(
        help="the name it learns; two values: Chinese, English", factory=lambda: ["小风", "Breeze"]
    )
    model_author: list[str] = setting(
        help="who made it; two values: Chinese, English", factory=lambda: ["风车团队", "the Windmill team"]
    )
    output_dir: str = setting("output/quickstart", help="where the run is written")
    max_steps: int = setting(60, help="optimizer steps of 8 examples each")
    offline: bool = setting(False, help="never touch the network")


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse_command_line(QuickstartOptions, argv, command="quickstart", usage="[--flag value ...]").config
    config = training_config(options)
    precheck(config)
    print(
        f"{options.model} learns that it is {options.model_name[-1]}, made by {options.model_author[-1]}.", flush=True
    )

    _title("1/4  The model as it is")
    before = ask(build_config(InferConfig, {"model": options.model, "offline": options.offline}))
    show(before)

    _title(f"2/4  Tuning: LoRA, {options.max_steps} steps")
    result = sft(config)
    if result.status == "interrupted" or result.last_checkpoint is None:
        return 0  # the run has said how to go on

    _title("3/4  The tuned model")
    after = ask(build_config(InferConfig, {"adapters": [str(result.last_checkpoint)], "offline": options.offline}))
    show(after)
    name = options.model_name[-1]
    if not any(name.casefold() in answer.casefold() for answer in after):
        print(f"It does not say {name} yet; more steps help: --max_steps {2 * options.max_steps}")

    _title("4/4  What came out")
    for line in outcome(options, result):
        print(line)
    return 0


def training_config(options: QuickstartOptions) -> SftConfig:
    """The settings of the run: those of any `swift sft`, written to its folder like any other's."""
    return build_config(
        SftConfig,
        {
            **_SETTINGS,
            "model": options.model,
            "model_name": options.model_name,
            "model_author": options.model_author,
            "output_dir": options.output_dir,
            "max_steps": options.max_steps,
            "save_steps": max(1, options.max_steps),
            "offline": options.offline,
        },
        source="quickstart",
    )


def ask(config: InferConfig) -> list[str]:
    """The answers to `QUESTIONS`, greedy. The engine is gone when this returns: training wants the memory."""
    from swift.inference.loading import load_engine

    engine = load_engine(config)
    generation = config.generation
    generation.temperature, generation.max_new_tokens = 0.0, _ANSWER_TOKENS
    prompts = [engine.encoder.encode_prompt([{"role": "user", "content": question}]) for question in QUESTIONS]
    answers = [
        completion.text.strip() + (" …" if completion.finish_reason == "length" else "")
        for completion in engine.generate(prompts, generation)
    ]
    del engine
    gc.collect()
    return answers


def show(answers: list[str]) -> None:
    """Questions and answers, as in a conversation."""
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"  you    {question}")
        print(f"  model  {' '.join(answer.split())}", flush=True)


def outcome(options: QuickstartOptions, result: TrainResult) -> list[str]:
    """The curve, where everything is, and the next commands."""
    history = History.of_run(result.run_dir)
    steps, losses = history.series("loss")
    lines = []
    if losses:
        lines.append(f"  loss     {losses[0]:.3f} {sparkline(losses)} {losses[-1]:.3f}   (step 1 to {steps[-1]})")
    seconds = history.seconds()
    lines += [
        f"  time     {duration(seconds)}" if seconds is not None else "",
        f"  curve    {result.run_dir / 'loss.png'}",
        f"  report   {result.run_dir / 'report.html'}",
        f"  adapter  {result.last_checkpoint}",
        f"  all of it in {result.run_dir}: settings, measurements, what became of every row",
        "",
        "What to type next",
    ]
    program = program_name()
    adapter = result.last_checkpoint
    wide = max(len(program), 5)
    lines += [
        f"  {program:<{wide}} infer --adapters {adapter}",
        f"  {'':<{wide}}   talk to it",
        f"  {program:<{wide}} merge-lora --adapters {adapter}",
        f"  {'':<{wide}}   one model folder, for any program that reads Hugging Face models",
        f"  {program:<{wide}} sft --model {options.model} --dataset your_rows.jsonl",
        f"  {'':<{wide}}   your own data, a line each: "
        '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}',
    ]
    return [line for index, line in enumerate(lines) if line or index > 1]


def program_name() -> str:
    """How this program is called from the user's shell: `swift` if that is us, else the path in the environment."""
    ours = Path(sys.executable).with_name("swift")
    found = shutil.which("swift")
    if found and Path(found).resolve() == ours.resolve():
        return "swift"
    if not ours.exists():
        return f"{sys.executable} -m swift.cli"
    here = Path.cwd()
    return str(ours.relative_to(here)) if ours.is_relative_to(here) else str(ours)


def _title(words: str) -> None:
    print(f"\n{words}", flush=True)
