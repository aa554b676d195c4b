"""`swift infer`: talk to a model, or answer a file of rows.

With rows (`--val_dataset`) it is a batch job; without, a conversation on standard input.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.commands.precheck import precheck
from swift.config import InferConfig, SftConfig, build_config, load_config, to_flat
from swift.config.inference import GenerationConfig
from swift.core.errors import UsageError
from swift.core.files import require_writable, write_atomic
from swift.core.logging import get_logger, rank, world_size

if TYPE_CHECKING:
    from swift.inference.batch import BatchReport, Work
    from swift.inference.inputs import Inputs
    from swift.inference.loading import Prepared
    from swift.inference.scoring import Scorer

log = get_logger("infer")

INTERRUPTED = 130  # exit code, as shells use it for Ctrl-C


def infer(config: InferConfig | None = None, **flags: Any) -> list[dict[str, Any]]:
    """Answer rows, or talk on the terminal when there are none.

    Args:
        config: the whole configuration; or give settings by name:
            `infer(model="smollm2", val_dataset=["questions.jsonl"])`.

    Returns:
        The result of every row, in order; empty after a conversation.

    Raises:
        SwiftError: with what was wrong, where, and what to do.
        KeyboardInterrupt: Ctrl-C ended a batch job; the same call continues it.
    """
    if config is None:
        config = build_config(InferConfig, flags)
    elif config.model.model is None:
        from swift.inference.loading import filled

        config = filled(config)
    precheck(config)
    if not _has_rows(config):
        _talk(config)
        return []
    report = _answer(config)
    if report.interrupted:
        raise KeyboardInterrupt
    with report.path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def resumable_infer(config: InferConfig) -> BatchReport:
    """A batch job as `swift infer` runs it, begun or continued, and what to say of it said."""
    report = _answer(config)
    if rank() == 0 and not report.interrupted:
        _say(report, config)
    return report


def main(config: InferConfig) -> int:
    """The command's entry: 0; 1 when no row could be answered; 130 when Ctrl-C ended a batch job."""
    if not _has_rows(config):
        return _talk(config)
    report = _answer(config)
    if rank() > 0:
        return INTERRUPTED if report.interrupted else 0
    _say(report, config)
    if report.interrupted:
        return INTERRUPTED
    return 1 if report.num_rows and not report.statuses["ok"] else 0


def _has_rows(config: InferConfig) -> bool:
    return bool(config.data.val_dataset or config.data.dataset)


def _talk(config: InferConfig) -> int:
    """A conversation on standard input."""
    if world_size() > 1:
        raise UsageError(
            f"a conversation needs one process, and there are {world_size()}",
            where="NPROC_PER_NODE",
            fix="unset NPROC_PER_NODE, or answer a file with --val_dataset",
        )
    for name in ("num_return_sequences", "logprobs"):
        if getattr(config.generation, name) != getattr(GenerationConfig(), name):
            raise UsageError(
                f"{name} has no place in a conversation", where=f"--{name}", fix="answer a file with --val_dataset"
            )
    from swift.data.encoding.encode import ChatEncoder
    from swift.inference.chat import Chat
    from swift.inference.loading import prepare
    from swift.inference.score_talk import ScoreTalk
    from swift.inference.terminal import Terminal

    terminal = Terminal()
    prepared = prepare(config)
    _notices(prepared)
    if prepared.judge is not None:
        return ScoreTalk(prepared.judge.name, prepared.load_scorer, terminal).run()
    assert isinstance(prepared.encoder, ChatEncoder)
    system = prepared.encoder.system
    if system:  # the conversation holds it, so that /system can change it
        prepared.encoder.system = None
    return Chat(prepared.load(), config.generation, terminal, system=system).run()


def _answer(config: InferConfig) -> BatchReport:
    """A batch job, begun or continued."""
    from swift.inference.batch import BatchJob
    from swift.inference.loading import prepare
    from swift.inference.results import Share

    if config.generation.stream:
        raise UsageError("a batch job can't stream", where="--stream", fix="leave --stream out with --val_dataset")
    if config.infer.result_path and rank() == 0:
        require_writable(Path(config.infer.result_path).expanduser())
    prepared = prepare(config)
    _notices(prepared)
    inputs = _inputs(prepared)
    settings = {**inputs.fingerprint, **prepared.identity()}
    if prepared.judge is None:
        settings |= asdict(config.generation)
        settings.pop("stream")
    share = Share(rank(), world_size())
    path = _result_path(prepared, settings, share.size)
    if rank() == 0:
        log.info("%d rows -> %s", inputs.num_rows, path)
    scorers: list[Scorer] = []

    def start() -> Work:
        if prepared.judge is None:
            return _generating(prepared)
        scorers.append(prepared.load_scorer())
        return scorers[0]

    job = BatchJob(start=start, inputs=inputs, settings=settings, path=path, resume=config.infer.resume, share=share)
    report = job.run()
    if prepared.judge is not None and not report.interrupted and rank() == 0:
        _metrics(scorers, report)
    return report


def _generating(prepared: Prepared) -> Work:
    from swift.data.encoding.encode import ChatEncoder
    from swift.inference.batch import Answering

    assert isinstance(prepared.encoder, ChatEncoder)
    return Answering(prepared.load(), prepared.encoder, prepared.config.generation)


def _metrics(scorers: list[Scorer], report: BatchReport) -> None:
    """Say how right the answers are, and keep it beside them."""
    path = report.path.with_name(report.path.name + ".metrics.json")
    if not scorers or scorers[0].num_rows != report.num_rows:
        log.info("no metrics: this start didn't judge all rows by itself (--resume false judges them anew)")
        return
    found = scorers[0].report()
    if found is None:
        return
    write_atomic(path, json.dumps(found.numbers, indent=1, ensure_ascii=False) + "\n")
    for line in found.words.splitlines():
        log.info(line)
    log.info(", ".join(f"{name} {value:.4g}" for name, value in found.numbers.items() if not name.startswith("f1/")))
    log.info("metrics -> %s", path)


def _inputs(prepared: Prepared) -> Inputs:
    """The rows to answer: the evaluation files; else what the checkpoint's run set aside; else all of `--dataset`."""
    from swift.config.saved import find_saved
    from swift.data.selection import VALIDATION
    from swift.inference.inputs import Inputs, evaluation_split

    config = prepared.config
    data, seed, checkpoint = config.data, config.generation.seed, prepared.adapter or prepared.base
    more: dict[str, Any] = {} if prepared.judge is None else {"layout": prepared.judge.row_layout}
    if not config.infer.load_data_args or (data.val_dataset and not find_saved(checkpoint)):
        return Inputs(data.val_dataset or data.dataset, data, seed, **more)
    trained = load_config(SftConfig, checkpoint)
    if data.val_dataset and data.val_dataset == trained.data.val_dataset:  # the very rows that training evaluated on
        return Inputs(data.val_dataset, data, trained.training.seed, split=VALIDATION, **more)
    if data.val_dataset:
        return Inputs(data.val_dataset, data, seed, **more)
    held = evaluation_split(trained, prepared.tokenizer, encoder=prepared.encoder if prepared.judge else None, **more)
    if not held:
        raise UsageError(
            "the checkpoint's run had no evaluation rows",
            where="--load_data_args",
            fix="name the rows with --val_dataset FILE",
        )
    return Inputs(trained.data.dataset, trained.data, trained.training.seed, only=held, **more)


def _result_path(prepared: Prepared, settings: dict[str, Any], num_processes: int) -> Path:
    """The file asked for; else, in the checkpoint or the current folder, an unfinished one of this job or a new one."""
    from swift.config.saved import find_saved
    from swift.inference.results import unfinished_results

    run = prepared.config.infer
    if run.result_path:
        return Path(run.result_path).expanduser()
    checkpoint = prepared.adapter or (prepared.base if find_saved(prepared.base) else None)
    folder = (checkpoint or Path.cwd()) / "infer_result"
    if num_processes > 1:  # all processes have to find the same name by themselves
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        return folder / f"{digest[:16]}.jsonl"
    if run.resume and (unfinished := unfinished_results(folder, settings)):
        return unfinished
    return folder / f"{time.strftime('%Y%m%d-%H%M%S')}.jsonl"


def _notices(prepared: Prepared) -> None:
    """Say once what the chat encoding found out."""
    if rank() == 0:
        for notice in prepared.encoder.notices:
            log.info(notice)


def _say(report: BatchReport, config: InferConfig) -> None:
    """How the job ended, and what to type next."""
    if report.resumed:
        log.info("%d rows were answered by an earlier start", report.resumed)
    answered = ", ".join(f"{count} {status}" for status, count in sorted(report.statuses.items(), reverse=True))
    if report.interrupted:
        log.info("stopped after %d of %d rows; to go on:", sum(report.statuses.values()), report.num_rows)
        log.info("  %s", resume_command(config, report.path))
        return
    log.info("%d rows: %s -> %s", report.num_rows, answered, report.path)
    if report.statuses["error"]:
        log.info('the rows without an answer have "status": "error" and say why')


def resume_command(config: InferConfig, path: Path) -> str:
    """The command line that continues this job."""
    values = to_flat(config)
    flags = {name: values[name] for name, default in to_flat(InferConfig()).items() if values[name] != default}
    flags["result_path"] = str(path)
    flags.pop("resume", None)
    words = ["swift", "infer"]
    for name, value in flags.items():
        words.append(f"--{name}")
        if isinstance(value, list):
            words += [str(item) for item in value]
        elif isinstance(value, dict):
            words.append(json.dumps(value, ensure_ascii=False))
        else:
            words.append(str(value).lower() if isinstance(value, bool) else str(value))
    return shlex.join(words)
