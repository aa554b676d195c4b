"""`swift sample`: several answers to each prompt, ranked by rewards; the best become a new data set.

Drawing is a batch job of `swift infer` (resumable, one line for each row, shared by several processes), by a model here
or at an endpoint; what was drawn stays beside the data set, so that other rewards or formats need no new answers.
Judging by models is in `judging`.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from swift.commands.infer import INTERRUPTED, resumable_infer
from swift.commands.judging import Verdicts, judge
from swift.commands.precheck import precheck
from swift.commands.samples import answers_of, asked, beside, lines_of, reference_of
from swift.config import InferConfig, SampleConfig, build_config
from swift.config.sample import OutputFormat
from swift.core.errors import UsageError
from swift.core.files import require_writable, write_atomic
from swift.core.logging import get_logger, rank, world_size

log = get_logger("sample")

_POLL_S = 0.2
_ONLY_HERE = (
    "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_new_tokens", "num_beams",
    "logprobs",
    "structured_outputs_json", "structured_outputs_regex", "structured_outputs_choice", "structured_outputs_grammar",
)  # fmt: skip


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
    drawn = _draw(config, beside(output, "samples"))
    verdicts = judge(config, drawn, output)
    if rank() > 0:
        return {}
    return _write(config, drawn, targets, reward, verdicts)


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
    if run.samples_file is not None:
        if not Path(run.samples_file).expanduser().is_file():
            raise UsageError(f"there is no file {run.samples_file}", where="--samples_file")
        if run.sampler_url is not None:
            raise UsageError("answers are either drawn or there", where="--samples_file", fix="leave out sampler_url")
    elif not (config.data.dataset or config.data.val_dataset):
        raise UsageError("there are no prompts", where="--dataset", fix="--dataset FILE")
    for address, name in (("sampler_url", "sampler_model"), ("judge_url", "judge_model")):
        if (getattr(run, address) is None) != (getattr(run, name) is None):
            raise UsageError(f"{address} and {name} belong together", where=f"--{address}", fix="give both")
    if run.endpoint_concurrency < 1:
        raise UsageError("endpoint_concurrency is 1 at least", where="--endpoint_concurrency", fix="give 1 or more")
    judges = run.reward, run.orm_model, run.prm_model, run.judge_url
    if not any(judges) and run.output_format != ["all"]:
        raise UsageError(
            "nothing judges the answers",
            where="--reward",
            fix="--reward match (or number, json, schema:…, regex:…, length:…, FILE.py:FUNCTION), --orm_model, "
            "--prm_model, or --judge_url; or --output_format all",
        )
    if run.prm_threshold is not None and run.prm_model is None:
        raise UsageError(
            "prm_threshold does nothing without prm_model", where="--prm_threshold", fix="--prm_model FOLDER"
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
    for name in () if config.sample.sampler_url is None else _ONLY_HERE:
        if getattr(config.generation, name) != getattr(SampleConfig().generation, name):
            raise UsageError(f"an endpoint can't be asked for {name}", where=f"--{name}", fix="leave it out")
    return InferConfig(
        model=config.model,
        data=config.data,
        template=config.template,
        generation=config.generation,
        engine=config.engine,
        infer=replace(config.infer, result_path=str(path)),
    )


def _draw(config: SampleConfig, path: Path) -> Path:
    """The file with the answers, drawn where they aren't there; every process returns when it is complete.

    Raises:
        KeyboardInterrupt: Ctrl-C ended the drawing.
    """
    from swift.inference.results import read_meta

    if config.sample.samples_file is not None:
        return Path(config.sample.samples_file).expanduser()
    job = _as_infer(config, path)
    report = resumable_infer(job) if config.sample.sampler_url is None else _draw_elsewhere(config, job, path)
    if report.interrupted:
        raise KeyboardInterrupt
    while not ((meta := read_meta(path)) and meta["complete"]):  # the first process joins the parts
        time.sleep(_POLL_S)
    return path


def _draw_elsewhere(config: SampleConfig, job: InferConfig, path: Path) -> Any:
    """The same from an endpoint."""
    from swift.core.chat_client import ChatClient
    from swift.data.encoding.conversation import read_system
    from swift.inference.batch import BatchJob
    from swift.inference.inputs import Inputs
    from swift.inference.results import Share
    from swift.methods.endpoint_drawing import EndpointDrawing

    run, generation = config.sample, config.generation
    assert run.sampler_url is not None and run.sampler_model is not None
    if generation.num_return_sequences > 1 and generation.temperature == 0:
        raise UsageError(
            f"{generation.num_return_sequences} answers at temperature 0 would be the same",
            where="--num_return_sequences",
            fix="--temperature 1",
        )
    system = read_system(config.template.system)
    client = ChatClient(run.sampler_url, key_env=run.endpoint_key_env, where="--sampler_url")
    inputs = Inputs(config.data.val_dataset or config.data.dataset, config.data, generation.seed)
    settings = {**inputs.fingerprint, **asdict(generation), "endpoint": run.sampler_url, "model": run.sampler_model}
    settings |= {"system": system}
    if rank() == 0:
        log.info("%d rows -> %s", inputs.num_rows, path)
    drawing = EndpointDrawing(client, run.sampler_model, generation, system, run.endpoint_concurrency)
    share = Share(rank(), world_size())
    return BatchJob(lambda: drawing, inputs, settings, path, resume=job.infer.resume, share=share).run()


def _write(
    config: SampleConfig, drawn: Path, targets: dict[OutputFormat, Path], reward: Any, verdicts: Verdicts
) -> dict[str, Any]:
    """Score, choose, and write every file in one rename; returns the report."""
    from swift.methods.rejection import Drawn, Summary, rows_of

    summary, run = Summary(), config.sample
    report_path = beside(Path(run.output_file).expanduser(), "report").with_suffix(".json")
    place = 0  # of the next answer among all of them
    parts = {kind: beside(path, "part") for kind, path in targets.items()}
    files = {kind: path.open("w", encoding="utf-8") for kind, path in parts.items()}
    try:
        for line in lines_of(drawn):
            answers = answers_of(line)
            if not answers:
                summary.failed += 1
                continue
            row = {"reference": reference_of(line), "extra": line.get("extra") or {}, "messages": asked(line)}
            rewards = [reward(text, row) + verdicts.worth(place + k) for k, text in enumerate(answers)]
            scored = [k for k, worth in enumerate(rewards) if not math.isnan(worth)]
            refused = frozenset(at for at, k in enumerate(scored) if verdicts.refuses(place + k))
            place += len(answers)
            summary.unjudged += len(answers) - len(scored)
            if not scored:
                summary.failed += 1
                continue
            found = Drawn(asked(line), [answers[k] for k in scored], [rewards[k] for k in scored], refused)
            summary.add(found, run.reward_threshold)
            for kind, file in files.items():
                rows, why = rows_of(found, kind, run)
                summary.kept[kind] += len(rows)
                if why is not None:
                    summary.dropped[f"{kind}: {why}"] += 1
                kept = ("tools", "extra", "labels") if kind == "all" else ("tools",)
                more = {name: line[name] for name in kept if line.get(name)}
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
    if summary.unjudged:
        log.info("%d answers got no verdict, and are left out", summary.unjudged)
    if summary.failed:
        log.info("%d prompts had no answer; %s says why", summary.failed, drawn)
    return numbers


def _targets(output: Path, formats: list[OutputFormat]) -> dict[OutputFormat, Path]:
    """The file of each format: the one that was named, or several beside it."""
    if len(formats) == 1:
        return {formats[0]: output}
    return {kind: beside(output, kind) for kind in formats}
