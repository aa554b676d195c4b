"""`swift rlhf --rlhf_type gkd`: against formulas written out, however a step is cut, whoever teaches, and resumed."""

from __future__ import annotations

import json
import shutil
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from preference_rows import pair_rows
from runs import assert_same_bits, trained
from torch.nn.functional import kl_div

from swift.checkpoint import list_checkpoints
from swift.cli import main
from swift.commands.rlhf import rlhf
from swift.core.errors import DataError, ModelError, SwiftError
from swift.data.loading.batch import Layout
from swift.distributed import ProcessGroup
from swift.inference.requests import SamplingParams
from swift.methods.rollouts import Writing, write_anew, write_cached
from swift.models.head import find_decoder, find_head
from swift.objectives.causal_lm import CausalLM
from swift.training.module import Objectives, TrainModule
from swift.training.precision import Precision
from swift.training.strategy import DataParallel

BASE: dict[str, Any] = {
    "rlhf_type": "gkd",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 3,
    "logging_steps": 1,
    "learning_rate": 1e-3,
    "max_length": 128,
    "torch_dtype": "float32",
    "max_completion_length": 6,
    "add_version": False,
    "report_to": ["none"],
    "lmbda": 0.0,
}


@pytest.fixture(scope="module")
def teacher_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with other numbers."""
    folder = tmp_path_factory.mktemp("teacher") / "teacher"
    shutil.copytree(tiny_model_dir, folder)
    model = tf.AutoModelForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


def talks(count: int) -> list[dict[str, Any]]:
    return [{"messages": row["messages"]} for row in pair_rows(count)]


@pytest.fixture
def run(tiny_model_dir: Path, teacher_dir: Path, write_rows: Any, tmp_path: Path) -> Any:
    data = write_rows(tmp_path / "rows.jsonl", talks(12))

    def one(name: str, **flags: Any) -> Any:
        given = {**BASE, "model": str(tiny_model_dir), "dataset": [str(data)], "output_dir": str(tmp_path / name)}
        if not {"teacher_self", "teacher_model", "teacher_logits", "teacher_model_server"} & flags.keys():
            given["teacher_model"] = str(teacher_dir)
        return rlhf(**{**given, **flags})

    return one


def lines(result: Any) -> list[dict[str, float]]:
    found = [json.loads(line) for line in (result.run_dir / "logging.jsonl").read_text().splitlines()]
    return [line for line in found if "grad_norm" in line]


def jsd(student: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    """Of log-probabilities [tokens, vocab], summed over the vocabulary."""
    if beta == 0:
        return kl_div(student, teacher, reduction="none", log_target=True).sum(1)
    if beta == 1:
        return kl_div(teacher, student, reduction="none", log_target=True).sum(1)
    mixed = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
    first, second = (kl_div(mixed, p, reduction="none", log_target=True).sum(1) for p in (teacher, student))
    return beta * first + (1 - beta) * second


@pytest.mark.parametrize(("beta", "temperature", "alpha"), [(0.5, 1.0, 0.0), (0.0, 2.0, 0.0), (1.0, 1.0, 0.3)])
def test_a_step_is_the_formula(run, tiny_model_dir, teacher_dir, tmp_path, beta, temperature, alpha) -> None:
    """All rows in one step, by plain forwards in float64."""
    flags = {"beta": beta, "distill_temperature": temperature, "sft_alpha": alpha}
    result = run("one", **flags, gradient_accumulation_steps=6, max_steps=1, tuner_type="full")
    tokenizer = tf.AutoTokenizer.from_pretrained(tiny_model_dir)
    student, teacher = (
        tf.AutoModelForCausalLM.from_pretrained(d, dtype=torch.float64) for d in (tiny_model_dir, teacher_dir)
    )
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in talks(12):
        prompt = tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True, tokenize=False)
        before, after = (
            tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in (prompt, prompt + row["messages"][-1]["content"] + "<|im_end|>")
        )
        ids, size = torch.tensor([after]), tokenizer.get_vocab().__len__()
        places = slice(len(before) - 1, len(after) - 1)
        ours = student(ids).logits[0, places]
        with torch.no_grad():
            theirs = teacher(ids).logits[0, places]
        found = ((logits[:, :size] / temperature).log_softmax(1) for logits in (ours, theirs))
        nll = -ours.log_softmax(1).gather(1, ids[0, len(before) :, None]).sum()
        total = total + jsd(*found, beta).sum() + alpha * nll
        count += len(after) - len(before)
    loss = total / count
    loss.backward()
    loss = loss.detach()
    norm = torch.sqrt(sum((p.grad**2).sum() for p in student.parameters() if p.grad is not None))
    (line,) = lines(result)
    assert line["loss"] == pytest.approx(float(loss), rel=2e-5)
    assert line["grad_norm"] == pytest.approx(float(norm), rel=2e-4)


TEACHERS: dict[str, dict[str, Any]] = {
    "off policy": {},
    "mixed": {"lmbda": 0.5},
    "policy gradient": {"lmbda": 1.0, "on_policy_objective": "policy_gradient"},
    "its words": {"seq_kd": True},
    "top 8": {"gkd_logits_topk": 8},
    "itself": {"teacher_self": True, "teacher_prompt": "Think first.", "lmbda": 0.5},
}


@pytest.mark.parametrize("name", TEACHERS)
def test_how_a_step_is_cut_changes_nothing(run, name: str) -> None:
    first, *others = (
        run(f"cut{size}", **TEACHERS[name], per_device_train_batch_size=size, gradient_accumulation_steps=4 // size)
        for size in (1, 2, 4)
    )
    weights = trained(first.last_checkpoint)
    for other in others:
        for ours, theirs in zip(lines(other), lines(first), strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3, abs=1e-7)
        for key, tensor in trained(other.last_checkpoint).items():
            assert torch.allclose(tensor, weights[key], rtol=2e-3, atol=2e-4), key


def test_who_writes_is_drawn_by_step(run) -> None:
    """With lmbda 0.5 some steps are on the rows' answers and some aren't."""
    mixed, off, on = (run(f"l{share}", lmbda=share, max_steps=6, learning_rate=1e-9) for share in (0.5, 0.0, 1.0))
    tokens = [[line["num_tokens"] for line in lines(result)] for result in (mixed, off, on)]
    steps = [np.diff(each, prepend=0).tolist() for each in tokens]
    sources = [[m == o for m, o in zip(steps[0], other, strict=True)] for other in steps[1:]]
    assert any(sources[0]) and any(sources[1]) and all(a or b for a, b in zip(*sources, strict=True))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_both_ways_write_the_same(tiny_model_dir: Path, temperature: float) -> None:
    model = tf.AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()
    objective = CausalLM()
    module = TrainModule(
        model, decoder=find_decoder(model), head=find_head(model), objectives=Objectives(objective, objective)
    )
    group, precision = ProcessGroup(0, 1, 0), Precision(torch.float32, "cpu")
    strategy = DataParallel(module, group, precision)
    sampling = SamplingParams(max_new_tokens=9, temperature=temperature, top_p=0.9, top_k=50)
    writing = Writing(sampling, (2,), model.config.vocab_size - 3, 40)
    prompts, seeds = [[5, 6, 7], [9] * 12, [11, 3], [4] * 35], ["a", "b", "c", "d"]
    fast = write_cached(model, prompts, seeds, writing, precision.autocast)
    slow = write_anew(strategy, prompts, seeds, writing, (Layout(padding_free=False), group))
    assert fast == slow and len(fast[3]) <= 5 and all(fast)
    alone = write_cached(model, prompts[:1], seeds[:1], writing, precision.autocast)
    assert alone == fast[:1]
    if temperature:
        assert write_cached(model, prompts, ["e", "f", "g", "h"], writing, precision.autocast) != fast


@pytest.mark.parametrize("name", ["mixed", "itself"])
def test_resumed_equals_uninterrupted(run, name: str, tmp_path: Path) -> None:
    flags = {**TEACHERS[name], "max_steps": 4, "save_steps": 2}
    whole = run("whole", **flags)
    copied = tmp_path / "copied"
    shutil.copytree(whole.run_dir, copied)
    for checkpoint in list_checkpoints(copied):
        if checkpoint.step > 2:
            shutil.rmtree(checkpoint.path)
    again = run("copied", **flags, resume_from_checkpoint=str(copied))
    assert again.steps == 4
    assert_same_bits(trained(again.last_checkpoint), trained(whole.last_checkpoint))


def test_best_tokens_are_kept_and_taken_again(run, teacher_dir: Path, write_rows: Any, tmp_path: Path) -> None:
    kept = {"gkd_logits_topk": 8, "teacher_logits": str(tmp_path / "kept")}
    asked = run("asked", gkd_logits_topk=8)
    first = run("first", **kept, teacher_model=str(teacher_dir))
    second = run("second", **kept)
    for result in (first, second):
        for ours, theirs in zip(lines(result), lines(asked), strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-2)  # float16 on disk
    assert_same_bits(trained(second.last_checkpoint), trained(first.last_checkpoint))
    others = write_rows(tmp_path / "others.jsonl", talks(14)[12:])
    with pytest.raises(DataError, match="2 of 2 examples"):
        run("third", **kept, dataset=[str(others)])


def test_a_teacher_may_carry_an_adapter(run) -> None:
    """And it isn't the teacher without it. What the student writes has no likelihood of its own in the loss."""
    adapted = run("adapted", learning_rate=0.05, max_steps=4)
    plain = run("plain", max_steps=1)
    taught = run("taught", max_steps=1, teacher_adapters=[str(adapted.last_checkpoint)])
    assert lines(plain)[0]["loss"] != pytest.approx(lines(taught)[0]["loss"], rel=1e-3)
    own = [run(f"own{alpha}", lmbda=1.0, sft_alpha=alpha, max_steps=1) for alpha in (0.0, 5.0)]
    assert lines(own[0])[0]["loss"] == lines(own[1])[0]["loss"]


def test_rows_may_tell_the_teacher_more(run, teacher_dir: Path, write_rows: Any, tmp_path: Path) -> None:
    """Kept on disk as well; and evaluation is measured batch by batch."""
    rows = [
        {**row, "teacher_prompt": [{"role": "user", "content": "Say it " + "again " * (i % 3 + 1)}]}
        for i, row in enumerate(talks(8))
    ]
    data = [str(write_rows(tmp_path / "told.jsonl", rows))]
    flags = {"dataset": data, "val_dataset": data, "gkd_logits_topk": 8, "max_steps": 2}
    asked = run("asked", **flags)
    kept = run("kept", **flags, teacher_model=str(teacher_dir), teacher_logits=str(tmp_path / "logits"))
    assert kept.metrics["eval_loss"] == pytest.approx(asked.metrics["eval_loss"], rel=1e-2)
    untold = run("untold", **{**flags, "dataset": [str(write_rows(tmp_path / "untold.jsonl", talks(8)))]})
    assert lines(untold)[0]["loss"] != pytest.approx(lines(asked)[0]["loss"], rel=1e-2)


def test_a_teacher_behind_an_address(run, teacher_dir: Path) -> None:
    """The same model as a server: the run is that of a local teacher's best tokens."""
    model = tf.AutoModelForCausalLM.from_pretrained(teacher_dir)
    size = len(tf.AutoTokenizer.from_pretrained(teacher_dir).get_vocab())

    class Handler(BaseHTTPRequestHandler):
        def reply(self, value: Any) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.reply({"data": [{"id": "the-teacher"}]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert asked["model"] == "the-teacher"
            ids = asked["prompt"]
            ids = ids[0] if isinstance(ids[0], list) else ids
            with torch.no_grad():
                table = model(torch.tensor([ids])).logits[0, :-1, :size].log_softmax(1)
            tables: list[Any] = [None]
            for row, said in zip(table, ids[1:], strict=True):  # the best ones, and the one that is there
                named = {*row.topk(8).indices.tolist(), said}
                tables.append({str(number): {"logprob": row[number].item()} for number in named})
            self.reply({"choices": [{"prompt_logprobs": tables, "text": ""}]})

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        far = run("far", gkd_logits_topk=8, teacher_model_server=url)
    finally:
        server.shutdown()
        server.server_close()
    near = run("near", gkd_logits_topk=8)
    for ours, theirs in zip(lines(far), lines(near), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    with pytest.raises(SwiftError, match="which model it serves"):
        run("gone", gkd_logits_topk=8, teacher_model_server=url)


def test_refusals(run, teacher_dir: Path, write_rows: Any, tmp_path: Path) -> None:
    questions = [{"messages": row["messages"][:-1]} for row in talks(4)]
    asked = write_rows(tmp_path / "questions.jsonl", questions)
    with pytest.raises(SwiftError, match="no answer, and nobody writes one"):
        run("a", dataset=[str(asked)])
    assert run("b", dataset=[str(asked)], lmbda=1.0, max_steps=1).steps == 1
    with pytest.raises(SwiftError, match="asked the same"):
        run("c", teacher_self=True, tuner_type="full")
    other = tmp_path / "other"
    shutil.copytree(teacher_dir, other)
    table = json.loads((other / "tokenizer.json").read_text())
    pairs = sorted(table["model"]["vocab"].items(), key=lambda pair: pair[1])
    (first, a), (second, b) = pairs[-2:]
    table["model"]["vocab"][first], table["model"]["vocab"][second] = b, a
    (other / "tokenizer.json").write_text(json.dumps(table))
    with pytest.raises(ModelError, match="different tokenizers"):
        run("d", teacher_model=str(other))


def test_wrong_settings_are_named(tiny_model_dir: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["rlhf", "--rlhf_type", "gkd", "--model", str(tiny_model_dir), "--dataset", "x.jsonl"]
    for flags, said in (
        ([], "gkd needs a teacher"),
        (["--teacher_model", "a", "--teacher_self", "true"], "several teachers"),
        (["--teacher_model", "a", "--teacher_logits", "b", "--lmbda", "0"], "--gkd_logits_topk 64"),
        ([*["--teacher_model_server", "http://x/v1", "--on_policy_objective", "policy_gradient"]], "runs here"),
    ):
        assert main([*words, *flags]) == 2
        assert said in capsys.readouterr().err
