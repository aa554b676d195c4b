"""What models say of drawn answers: reward models of whole answers and of steps, and a language model at an endpoint.

Each verdict is a file beside the data set, named by what was judged by whom, so that a killed run goes on and a second
one finds it. Reward models judge in all processes; an endpoint is asked by the first one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swift.commands.infer import resumable_infer
from swift.commands.samples import answers_of, asked, beside, lines_of, reference_of
from swift.config import InferConfig, SampleConfig, build_config
from swift.core.errors import UsageError
from swift.core.files import write_atomic
from swift.core.logging import get_logger, rank
from swift.methods.verdicts import JUDGE_PROMPT, ask_marks, judge_question, steps_of, together

log = get_logger("sample")


@dataclass(frozen=True)
class Verdicts:
    """What judges said of all answers, in order.

    Attributes:
        lists: of each judge; NaN: it gave none.
        steps: of the judge of steps, if there is one.
        threshold: of the steps.
    """

    lists: tuple[list[float], ...] = ()
    steps: list[float] | None = None
    threshold: float | None = None

    def worth(self, place: int) -> float:
        """The sum of all judges."""
        return sum(each[place] for each in self.lists)

    def refuses(self, place: int) -> bool:
        """Whether the steps of an answer are worth too little."""
        return self.threshold is not None and self.steps is not None and not self.steps[place] >= self.threshold


def judge(config: SampleConfig, drawn: Path, output: Path) -> Verdicts:
    """Ask all judges; every process calls this, the first one gets the verdicts.

    Raises:
        UsageError: a judge can't be used. KeyboardInterrupt: Ctrl-C; the same start goes on.
    """
    run = config.sample
    lists: list[list[float]] = []
    steps = None
    if run.orm_model is not None:
        lists.append(_by_model(config, drawn, output, "orm", run.orm_model))
    if run.prm_model is not None:
        steps = _by_model(config, drawn, output, "prm", run.prm_model)
        lists.append(steps)
    if run.judge_url is not None and rank() == 0:
        lists.append(_by_endpoint(config, drawn, output))
    return Verdicts(tuple(lists), steps, run.prm_threshold)


def _by_model(config: SampleConfig, drawn: Path, output: Path, kind: str, folder: str) -> list[float]:
    """What a reward model says: of whole answers (orm), or of their steps together (prm)."""
    run = config.sample
    counts: list[int] = []  # rows of each answer
    lines = []
    for line in lines_of(drawn):
        for text in answers_of(line):
            parts = [text] if kind == "orm" else steps_of(text, run.prm_steps)
            counts.append(len(parts))
            said = ([*asked(line), {"role": "assistant", "content": part}] for part in parts)
            lines += [json.dumps({"messages": each}, ensure_ascii=False) + "\n" for each in said]
    content = "".join(lines)
    name = hashlib.sha256(f"{folder}\n{content}".encode()).hexdigest()[:12]
    # each process writes its own: they are the same, and nobody has to wait
    rows, path = beside(output, f"{kind}-{name}.rows{rank() or ''}"), beside(output, f"{kind}-{name}")
    write_atomic(rows, content)
    job = build_config(InferConfig, {"val_dataset": [str(rows)], "result_path": str(path), **_model_or_adapter(folder)})
    report = resumable_infer(replace(job, infer=replace(job.infer, device=config.infer.device)))
    rows.unlink(missing_ok=True)
    if report.interrupted:
        raise KeyboardInterrupt
    if rank() > 0:
        return []
    # a model with one output that wasn't trained here says a value
    values = [line.get("reward", line.get("value")) for line in _lines(path)]
    if all(value is None for value in values):
        raise UsageError(
            f"{folder} gave no rewards", where=f"--{kind}_model", fix="train one: swift rlhf --rlhf_type rm"
        )
    marks = iter(math.nan if value is None else float(value) for value in values)  # empty or too long: not judged
    return [together([next(marks) for _ in range(count)], run.prm_aggregate) for count in counts]


def _by_endpoint(config: SampleConfig, drawn: Path, output: Path) -> list[float]:
    """What a language model says, from 0 to 1; what it has said is kept line by line."""
    from swift.core.chat_client import ChatClient

    run = config.sample
    assert run.judge_url is not None and run.judge_model is not None
    prompt = JUDGE_PROMPT if run.judge_prompt is None else _prompt(Path(run.judge_prompt).expanduser())
    questions = [
        judge_question(prompt, asked(line), reference_of(line), text)
        for line in lines_of(drawn)
        for text in answers_of(line)
    ]
    about = json.dumps([run.judge_url, run.judge_model, questions], ensure_ascii=False)
    path = beside(output, f"judge-{hashlib.sha256(about.encode()).hexdigest()[:12]}")
    marks = [json.loads(line)["mark"] for line in _whole_lines(path)]
    if len(marks) < len(questions):
        client = ChatClient(run.judge_url, key_env=run.endpoint_key_env, where="--judge_url")
        log.info("%d answers are judged by %s", len(questions) - len(marks), run.judge_model)
        with path.open("a", encoding="utf-8") as file:
            left = questions[len(marks) :]
            for mark in ask_marks(client, run.judge_model, left, concurrency=run.endpoint_concurrency):
                file.write(json.dumps({"mark": mark}) + "\n")
                file.flush()
                marks.append(mark)
    if questions and all(mark is None for mark in marks):
        path.unlink()
        raise UsageError(
            f"{run.judge_model} gave no mark in {len(questions)} answers",
            where="--judge_url",
            fix='its answer has to end with {"score": NUMBER}, from 0 to 10; see --judge_prompt',
        )
    return [math.nan if mark is None else float(mark) for mark in marks]


def _prompt(path: Path) -> str:
    """A judge's question from a file, tried out."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the judge's question can't be read: {error}", where=f"--judge_prompt {path}") from error
    if "{answer}" not in text:
        raise UsageError("the judge's question has no {answer}", where=f"--judge_prompt {path}")
    try:
        judge_question(text, [], None, "")
    except (KeyError, ValueError, IndexError) as error:
        raise UsageError(
            f"the judge's question has braces that mean nothing: {error}",
            where=f"--judge_prompt {path}",
            fix="double braces that stay: {{ and }}",
        ) from error
    return text


def _whole_lines(path: Path) -> list[str]:
    """The complete lines of a file that may have been cut off; the rest of a line is taken away."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        write_atomic(path, whole)
    return whole.splitlines()


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def _model_or_adapter(folder: str) -> dict[str, Any]:
    path = Path(folder).expanduser()
    return {"adapters": [folder]} if (path / "adapter_config.json").is_file() else {"model": folder}
