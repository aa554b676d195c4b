"""`swift sample`: several answers to each prompt, ranked by rewards; the best become a new data set.

Drawing is a batch job of `swift infer` (resumable, one line for each row, shared by several processes); what was drawn
stays beside the data set, so that other rewards or formats need no new answers.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from swift.commands.infer import INTERRUPTED, resumable_infer
from swift.commands.precheck import precheck
from swift.config import InferConfig, SampleConfig, build_config
from swift.config.sample import OutputFormat
from swift.core.errors import UsageError
from swift.core.files import require_writable, write_atomic
from swift.core.logging import get_logger, rank, world_size

log = get_logger("sample")


def sample(config: SampleConfig | None = None, **flags: Any) -> dict[str, Any]:
    """Draw answers and write the data set.

    Args:
        config: the whole configuration; or give settings by name:
            `sample(model="smollm2", dataset=["questions.jsonl"], reward=["number"])`.

    Returns:
        the numbers of the report; empty on processes other than the first.

    Raises:
        SwiftError: with what was wrong, where, and what to do.
        KeyboardInterrupt: Ctrl-C ended the drawing; the same call continues it.
    """
    config = build_config(SampleConfig, flags) if config is None else config
    precheck(config)
    output = Path(config.sample.output_file).expanduser()
    targets = _targets(output, config.sample.output_format)
    _check(config, list(targets.values()))
    from swift.methods.rewards import make_reward

    reward = make_reward(config.sample.reward)  # a wrong name is found before the model is loaded
    drawn = _beside(output, "samples")
    report = resumable_infer(_as_infer(config, drawn))
    if report.interrupted:
        raise KeyboardInterrupt
    if rank() > 0:
        return {}
    judged = _judged(config, drawn, _beside(output, "judged"))
    return _write(config, drawn, targets, reward, judged)


def main(config: SampleConfig) -> int:
    """The command's entry: 0; 1 when no prompt was answered; 130 when Ctrl-C ended the drawing."""
    try:
        numbers = sample(config)
    except KeyboardInterrupt:
        log.info("stopped; the same command goes on")
        return INTERRUPTED
    return 1 if numbers and not numbers["prompts"] else 0


def _check(config: SampleConfig, targets: list[Path]) -> None:
    """What can be refused before anything is loaded."""
    run = config.sample
    if not (config.data.dataset or config.data.val_dataset):
        raise UsageError("there are no prompts", where="--dataset", fix="--dataset FILE")
    if run.orm_model is not None and world_size() > 1:
        raise UsageError(
            "a reward model judges in one process",
            where="--orm_model",
            fix="draw with --nproc_per_node and --reward length:0-1000000 first; then the same command without "
            "--nproc_per_node and with --orm_model",
        )
    if not run.reward and run.orm_model is None:
        raise UsageError(
            "nothing judges the answers",
            where="--reward",
            fix="--reward match (or number, json, regex:…, length:…, FILE.py:FUNCTION), or --orm_model FOLDER",
        )
    if config.generation.num_return_sequences < 2 and "dpo" in run.output_format:
        raise UsageError("pairs need two answers at least", where="--num_return_sequences", fix="give 2 or more")
    if len(set(run.output_format)) != len(run.output_format) or not run.output_format:
        raise UsageError("name each format once", where="--output_format", fix="--output_format sft dpo")
    if run.n_best_to_keep < 1:
        raise UsageError(f"--n_best_to_keep {run.n_best_to_keep} is not possible", fix="give 1 or more")
    for path in targets:
        if path.exists() and not run.override_exist_file and rank() == 0:
            raise UsageError(
                f"{path} is there already", where="--output_file", fix="another name, or --override_exist_file true"
            )
    if rank() == 0:
        require_writable(targets[0])


def _as_infer(config: SampleConfig, path: Path) -> InferConfig:
    """The batch job that draws."""
    return InferConfig(
        model=config.model,
        data=config.data,
        template=config.template,
        generation=config.generation,
        engine=config.engine,
        infer=replace(config.infer, result_path=str(path)),
    )


def _judged(config: SampleConfig, drawn: Path, path: Path) -> list[float] | None:
    """What a reward model says of all answers, in order; None without one."""
    if config.sample.orm_model is None:
        return None
    rows = _beside(path, "rows")
    lines = [
        json.dumps({"messages": [*_asked(line), {"role": "assistant", "content": text}]}, ensure_ascii=False)
        for line in _lines(drawn)
        if line["status"] == "ok"
        for text in _answers(line)
    ]
    write_atomic(rows, "".join(line + "\n" for line in lines))
    for left in (path, path.with_name(path.name + ".meta.json")):  # of other answers, or another judge
        left.unlink(missing_ok=True)
    judge = build_config(
        InferConfig,
        {"val_dataset": [str(rows)], "result_path": str(path), **_model_or_adapter(config.sample.orm_model)},
    )
    report = resumable_infer(replace(judge, infer=replace(judge.infer, device=config.infer.device)))
    if report.interrupted:
        raise KeyboardInterrupt
    found = [line.get("reward") for line in _lines(path)]
    rewards = [math.nan if value is None else float(value) for value in found]  # empty or too long: not judged
    if all(value is None for value in found):
        raise UsageError(
            f"{config.sample.orm_model} gave no rewards",
            where="--orm_model",
            fix="train one: swift rlhf --rlhf_type rm",
        )
    return rewards


def _model_or_adapter(folder: str) -> dict[str, Any]:
    path = Path(folder).expanduser()
    return {"adapters": [folder]} if (path / "adapter_config.json").is_file() else {"model": folder}


def _write(
    config: SampleConfig, drawn: Path, targets: dict[OutputFormat, Path], reward: Any, judged: list[float] | None
) -> dict[str, Any]:
    """Score, choose, and write every file in one rename; returns the report."""
    from swift.methods.rejection import Drawn, Summary, rows_of

    summary, run = Summary(), config.sample
    report_path = _beside(Path(run.output_file).expanduser(), "report").with_suffix(".json")
    verdicts = iter(judged or ())
    parts = {kind: _beside(path, "part") for kind, path in targets.items()}
    files = {kind: path.open("w", encoding="utf-8") for kind, path in parts.items()}
    try:
        for line in _lines(drawn):
            if line["status"] != "ok":
                summary.failed += 1
                continue
            extra = line.get("extra") or {}
            reference = extra.get("solution", line.get("labels"))
            row = {
                "reference": None if reference is None else str(reference),
                "extra": extra,
                "messages": _asked(line),
            }
            answers = _answers(line)
            rewards = [reward(text, row) + (next(verdicts) if judged is not None else 0.0) for text in answers]
            scored = [pair for pair in zip(answers, rewards, strict=True) if not math.isnan(pair[1])]
            if not scored:
                summary.failed += 1
                continue
            found = Drawn(_asked(line), [text for text, _ in scored], [worth for _, worth in scored])
            summary.add(found, run.reward_threshold)
            for kind, file in files.items():
                rows, why = rows_of(found, kind, run)
                summary.kept[kind] += len(rows)
                if why is not None:
                    summary.dropped[f"{kind}: {why}"] += 1
                more = {"tools": line["tools"]} if line.get("tools") else {}
                file.writelines(json.dumps({**each, **more}, ensure_ascii=False) + "\n" for each in rows)
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    finally:
        for file in files.values():
            file.close()
    for kind, path in targets.items():
        parts[kind].replace(path)
        log.info("%s: %d rows -> %s", kind, summary.kept[kind], path)
    numbers = summary.numbers()
    write_atomic(report_path, json.dumps(numbers, indent=1) + "\n")
    shown = [f"{name} {value:.3g}" for name, value in numbers.items() if isinstance(value, float)]
    log.info("%d prompts, %s", summary.prompts, ", ".join(shown))
    for reason, count in summary.dropped.items():
        log.info("no row from %d prompts: %s", count, reason)
    if summary.failed:
        log.info("%d prompts had no answer; %s says why", summary.failed, drawn)
    return numbers


def _targets(output: Path, formats: list[OutputFormat]) -> dict[OutputFormat, Path]:
    """The file of each format: the one that was named, or several beside it."""
    if len(formats) == 1:
        return {formats[0]: output}
    return {kind: _beside(output, kind) for kind in formats}


def _beside(path: Path, word: str) -> Path:
    return path.with_name(f"{path.stem}.{word}{path.suffix or '.jsonl'}")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def _asked(line: dict[str, Any]) -> list[dict[str, Any]]:
    """The conversation up to the answer that was drawn."""
    messages: list[dict[str, Any]] = line.get("messages") or [{"role": "user", "content": line.get("text") or ""}]
    return messages[:-1] if messages[-1]["role"] == "assistant" else messages


def _answers(line: dict[str, Any]) -> list[str]:
    return [each["response"] for each in line.get("responses") or [line]]
