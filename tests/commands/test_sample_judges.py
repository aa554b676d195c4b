"""`swift sample` with models and endpoints that judge or draw, in one process or two, whatever interrupts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from swift import cli

ROWS = [
    {"messages": [{"role": "user", "content": f"Say {k}."}, {"role": "assistant", "content": str(k)}]} for k in range(6)
]


@contextmanager
def endpoint(answer) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server of chat completions; `answer(body)` gives a text, or a status."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append({**body, "authorization": self.headers.get("Authorization")})
            said = answer(body)
            status = said if isinstance(said, int) else 200
            choice = {"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
            data = json.dumps({"choices": [choice], "usage": {"completion_tokens": 3}}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", bodies
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in ROWS))
    return file


@pytest.fixture(scope="module")
def judge_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with random weights."""
    folder = tmp_path_factory.mktemp("judge")
    config = transformers.AutoConfig.from_pretrained(tiny_model_dir, num_labels=1)
    config.problem_type = "regression"
    torch.manual_seed(3)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        model.score.weight.normal_()
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(folder)
    return folder


def words(tiny_model_dir: Path, questions: Path, output: Path, *flags: str) -> list[str]:
    fixed = "--num_return_sequences 3 --max_new_tokens 8 --kv_cache_gib 0.01 --device cpu"
    model = ["--model", str(tiny_model_dir), "--dataset", str(questions), "--output_file", str(output)]
    return ["sample", *model, *fixed.split(), *flags]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_drawn_and_judged_at_endpoints(questions, tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "secret")
    out, system = tmp_path / "new.jsonl", tmp_path / "system.txt"
    system.write_text("Be brief.")

    def answer(body):
        content = body["messages"][-1]["content"]
        if body["model"] == "judge":
            return f'Well. {{"score": {9 if "[Answer]" in content and "even" in content.split("[Answer]")[1] else 2}}}'
        return "even" if body["seed"] % 2 == 0 else "odd"

    with endpoint(answer) as (url, bodies):
        flags = ["sample", "--dataset", str(questions), "--output_file", str(out), "--num_return_sequences", "3"]
        flags += ["--sampler_url", url, "--sampler_model", "big", "--judge_url", url, "--judge_model", "judge"]
        flags += ["--endpoint_key_env", "SOME_KEY", "--output_format", "sft", "all", "--max_new_tokens", "9"]
        flags += ["--system", str(system)]
        assert cli.main(flags) == 0
        drawn = [body for body in bodies if body["model"] == "big"]
        assert len(drawn) == 18 and all(body["authorization"] == "Bearer secret" for body in bodies)
        told, question = drawn[0]["messages"]
        assert told == {"role": "system", "content": "Be brief."} and drawn[0]["max_tokens"] == 9
        assert question in [each["messages"][0] for each in ROWS]
        first = (tmp_path / "new.all.jsonl").read_text()
        # the same again asks nobody: answers and marks are there
        before = len(bodies)
        assert cli.main([*flags, "--override_exist_file", "true"]) == 0
        assert len(bodies) == before and (tmp_path / "new.all.jsonl").read_text() == first
    every = lines(tmp_path / "new.all.jsonl")
    assert len(every) == 6 and {len(each["answers"]) for each in every} == {3}
    for each in every:
        assert [answer["reward"] for answer in each["answers"]] == sorted(
            (0.9 if answer["response"] == "even" else 0.2 for answer in each["answers"]), reverse=True
        )
    assert {each["messages"][-1]["content"] for each in lines(tmp_path / "new.sft.jsonl")} == {"even"}
    # other formats out of what is there, with neither model nor endpoint
    again = tmp_path / "again.jsonl"
    flags = ["sample", "--samples_file", str(tmp_path / "new.all.jsonl"), "--output_file", str(again)]
    assert cli.main([*flags, "--reward", "regex:even", "--output_format", "kto"]) == 0
    assert [each["label"] for each in lines(again)] == [
        answer["response"] == "even" for each in every for answer in each["answers"]
    ]
    assert cli.main(["data", "check", str(again)]) == 0
    assert cli.main(["data", "check", str(tmp_path / "new.sft.jsonl")]) == 0


def test_what_endpoints_do_wrong_is_said(questions, tmp_path, capsys):
    base = ["sample", "--dataset", str(questions), "--num_return_sequences", "2", "--reward", "length:0-99"]

    def draw(name: str, url: str, *flags: str) -> int:
        return cli.main([*base, "--output_file", str(tmp_path / name), "--sampler_url", url, *flags])

    with endpoint(lambda body: 401) as (url, _):
        assert draw("a.jsonl", url, "--sampler_model", "m") == 1
        assert "the endpoint refuses (HTTP 401" in capsys.readouterr().err
    with endpoint(lambda body: 418 if "Say 2" in body["messages"][0]["content"] else "fine") as (url, _):
        assert draw("b.jsonl", url, "--sampler_model", "m") == 0
        report = json.loads((tmp_path / "b.report.json").read_text())
        assert report["prompts"] == 5 and report["prompts_without_answers"] == 1
        judge = ["--judge_url", url, "--judge_model", "m", "--override_exist_file", "true"]
        assert draw("b.jsonl", url, "--sampler_model", "m", *judge) == 2
        assert "gave no mark" in capsys.readouterr().err
    assert draw("c.jsonl", "nowhere", "--sampler_model", "m") == 2
    assert draw("c.jsonl", "http://127.0.0.1:9/v1") == 2
    assert draw("c.jsonl", "http://127.0.0.1:9/v1", "--sampler_model", "m", "--top_k", "3") == 2
    assert "can't be asked for top_k" in capsys.readouterr().err


def test_steps_are_judged_and_may_refuse(tiny_model_dir, judge_dir, questions, tmp_path):
    out = tmp_path / "new.jsonl"
    flags = ["--prm_model", str(judge_dir), "--prm_steps", "[aeiou]", "--output_format", "all", "kto"]
    assert cli.main(words(tiny_model_dir, questions, out, *flags, "--reward_threshold", "-1000")) == 0
    rewards = [answer["reward"] for each in lines(tmp_path / "new.all.jsonl") for answer in each["answers"]]
    assert all(each["label"] for each in lines(tmp_path / "new.kto.jsonl"))
    middle = sorted(rewards)[len(rewards) // 2]
    more = ["--prm_threshold", str(middle), "--override_exist_file", "true", "--reward_threshold", "-1000"]
    assert cli.main(words(tiny_model_dir, questions, out, *flags, *more)) == 0
    labels = [each["label"] for each in lines(tmp_path / "new.kto.jsonl")]
    assert sum(labels) == sum(reward >= middle for reward in rewards) and not all(labels)
    judged = next(tmp_path.glob("new.prm-*.jsonl"))
    assert len(lines(judged)) > len(rewards)  # a line for each step


def test_two_processes_are_one(tiny_model_dir, judge_dir, questions, tmp_path):
    flags = ["--reward", "length:0-20", "--orm_model", str(judge_dir), "--output_format", "all"]
    alone, shared = tmp_path / "alone.jsonl", tmp_path / "shared.jsonl"
    assert cli.main(words(tiny_model_dir, questions, alone, *flags)) == 0
    command = [sys.executable, "-m", "swift.cli", *words(tiny_model_dir, questions, shared, *flags)]
    done = subprocess.run([*command, "--nproc_per_node", "2"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    # a judge's numbers depend on what shares the batch, up to rounding
    for one, two in zip(lines(alone), lines(shared), strict=True):
        assert one["messages"] == two["messages"] and one["labels"] == two["labels"]
        for ours, theirs in zip(one["answers"], two["answers"], strict=True):
            assert ours == {**theirs, "reward": pytest.approx(theirs["reward"], rel=1e-5)}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_who_is_stopped_goes_on(number, tiny_model_dir, questions, tmp_path):
    """The same command again; the files are those of a run that nothing stopped."""
    questions.write_text("".join(json.dumps(ROWS[k % 6]) + "\n" for k in range(200)))
    flags = ["--reward", "length:0-20", "--output_format", "sft", "kto", "--max_batch_size", "2"]
    out = tmp_path / "new.jsonl"
    command = [sys.executable, "-m", "swift.cli", *words(tiny_model_dir, questions, out, *flags)]
    child = subprocess.Popen(command, env=dict(os.environ), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    drawn = tmp_path / "new.samples.jsonl"
    deadline = time.monotonic() + 120
    while not (drawn.exists() and drawn.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    child.send_signal(number)
    assert child.wait(60) == (130 if number == signal.SIGINT else -number)
    assert not (tmp_path / "new.sft.jsonl").exists()
    assert cli.main(words(tiny_model_dir, questions, out, *flags)) == 0
    whole = tmp_path / "whole.jsonl"
    assert cli.main(words(tiny_model_dir, questions, whole, *flags)) == 0
    for kind in ("sft", "kto"):
        assert (tmp_path / f"new.{kind}.jsonl").read_text() == (tmp_path / f"whole.{kind}.jsonl").read_text()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--samples_file", "nowhere.jsonl", "--reward", "match"], "there is no file"),
        (["--judge_url", "http://127.0.0.1:9/v1"], "belong together"),
        (["--reward", "match", "--prm_threshold", "1"], "does nothing without prm_model"),
        (["--reward", "schema:nowhere.json"], "with a schema"),
        (["--judge_url", "http://127.0.0.1:9/v1", "--judge_model", "m", "--endpoint_concurrency", "0"], "1 at least"),
    ],
)
def test_what_is_wrong_is_said_first(flags, said, tiny_model_dir, questions, tmp_path, capsys):
    assert cli.main(words(tiny_model_dir, questions, tmp_path / "new.jsonl", *flags)) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "new.samples.jsonl").exists()


def test_a_judges_question_from_a_file_is_tried_out(tiny_model_dir, questions, tmp_path, capsys):
    file = tmp_path / "question.txt"
    flags = ["--judge_url", "http://127.0.0.1:9/v1", "--judge_model", "m", "--judge_prompt", str(file)]
    for text, said in (("no place", "has no {answer}"), ("{answer} {x}", "braces")):
        file.write_text(text)
        out = tmp_path / "new.jsonl"
        assert cli.main(words(tiny_model_dir, questions, out, *flags)) == 2
        assert said in capsys.readouterr().err
