"""`swift infer` as a whole: batch jobs that lose nothing, checkpoints read back, refusals that help."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shlex
import signal
import time

import pytest

from swift.cli import main as cli
from swift.commands.infer import main, resume_command
from swift.config import InferConfig, build_config
from swift.core.errors import DataError, ModelError, SwiftError, UsageError
from swift.inference.results import meta_path, read_meta

FAST = {"max_new_tokens": 6, "device": "cpu"}


def infer(**flags):
    from swift import infer as public

    return public(**{**FAST, **flags})


def results_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def rows(tmp_path, chat_rows, write_rows):
    """30 rows on disk."""
    return write_rows(tmp_path / "rows.jsonl", chat_rows(30))


@pytest.fixture
def job(tiny_model_dir, rows, tmp_path):
    """Flags of a batch job over the 30 rows."""
    return {
        "model": str(tiny_model_dir),
        "val_dataset": [str(rows)],
        "result_path": str(tmp_path / "out" / "results.jsonl"),
        "max_batch_size": 2,
    }


def test_one_line_per_row_in_order_whatever_the_row(tiny_model_dir, tmp_path):
    long = {"query": "word " * 1200}
    lines = [
        '{"messages": [{"role": "user", "content": "What is red?"}, {"role": "assistant", "content": "A colour"}]}',
        "not json",
        json.dumps(long),
        '{"messages": [{"role": "user", "content": null}]}',
        '{"query": "Say hi", "response": "hi", "id": 17}',
        '{"messages": [{"role": "assistant", "content": "nothing before"}]}',
        '{"messages": [{"role": "wizard", "content": "x"}]}',
        '{"messages": [{"role": "user", "content": "two\\nlines 🤖"}]}',
        '{"text": "Once upon a time"}',
        '{"query": "cut off',
    ]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(lines), encoding="utf-8")
    results = infer(model=str(tiny_model_dir), val_dataset=[str(rows)], result_path=str(tmp_path / "r.jsonl"))
    assert [r["index"] for r in results] == list(range(10))
    assert [r["source"] for r in results] == [f"{rows}:{n}" for n in range(1, 11)]
    wanted = ["ok", "error", "error", "error", "ok", "error", "error", "ok", "ok", "error"]
    assert [r["status"] for r in results] == wanted
    reasons = [r.get("reason") for r in results if r["status"] == "error"]
    assert reasons == ["not_json", "not_answerable", "no_content", "no_prompt", "unknown_role", "not_json"]
    assert "1024" in results[2]["error"]
    assert results[0]["labels"] == "A colour" and results[4]["labels"] == "hi" and results[7]["labels"] is None
    assert results[0]["messages"][1]["content"] == "A colour", "the row is kept as it was"
    assert results[4]["extra"] == {"id": 17}
    assert results[8]["text"] == "Once upon a time"
    for r in results:
        assert (r["response"] is None) == (r["status"] == "error")
        assert r["num_tokens"] == 0 or r["finish_reason"] in ("stop", "length")
    assert results_of(tmp_path / "r.jsonl") == results


def test_answers_are_those_of_the_engine_on_the_prompt_without_the_reference(job, rows, tiny_model_dir):
    from swift.config.inference import GenerationConfig
    from swift.inference.loading import load_engine

    config = build_config(InferConfig, {"model": str(tiny_model_dir), "device": "cpu"})
    engine = load_engine(config)
    for result, row in zip(infer(**job), map(json.loads, rows.read_text().splitlines()), strict=True):
        prompt = engine.encoder.encode_prompt(row["messages"][:-1])
        alone = engine.generate([prompt], GenerationConfig(max_new_tokens=6))[0]
        assert result["response"] == alone.text
        assert result["num_prompt_tokens"] == len(prompt)


def test_results_belong_to_how_the_rows_were_drawn_and_filled_in(rows):
    from swift.config.data import RowsConfig
    from swift.inference.inputs import Inputs

    def fingerprint(**settings):
        return Inputs([f"{rows}#5", "self-cognition#2"], RowsConfig(**{**names, **settings}), 1).fingerprint

    names = {"model_name": ["Ada"], "model_author": ["Lin"]}
    assert fingerprint() == fingerprint()
    for other in ({"data_seed": 7}, {"model_name": ["Bob"]}, {"dataset_shuffle": False}):
        assert fingerprint(**other) != fingerprint()


def test_a_whole_template_config_does_as_well(tiny_model_dir):
    """Its settings of training are left alone."""
    from swift.config.commands import InferConfig
    from swift.config.data import TemplateConfig
    from swift.inference.loading import prepare

    config = InferConfig(template=TemplateConfig(system="be brief", max_length=9))
    config.model.model = str(tiny_model_dir)
    assert prepare(config).encoder.system == "be brief"
    assert resume_command(config, tiny_model_dir).count("max_length") == 0


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
def test_killed_and_resumed_equals_uninterrupted(job, tmp_path, sampling):
    slow = {**job, "max_new_tokens": 60, **sampling}
    whole = infer(**{**slow, "result_path": str(tmp_path / "whole.jsonl")})
    path = tmp_path / "out" / "results.jsonl"
    child = multiprocessing.get_context("fork").Process(target=infer, kwargs=slow)
    child.start()
    wait_for_lines(path, 3)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    kept = path.read_bytes()
    assert 0 < kept.count(b"\n") < 30, "the kill came too late for this test to mean anything"
    with path.open("ab") as file:
        file.write(b'{"index": 29, "torn')
    assert infer(**slow) == whole
    assert path.read_bytes().startswith(kept[: kept.rindex(b"\n") + 1]), "answered rows aren't answered again"
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def wait_for_lines(path, count, timeout_s=60):
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if path.exists() and path.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.005)
    raise AssertionError(f"{path} never had {count} lines")


def test_a_finished_job_is_not_run_again(job, monkeypatch):
    first = infer(**job)

    def no_model(self):
        raise AssertionError("the model was loaded for nothing")

    monkeypatch.setattr("swift.inference.loading.Prepared.load", no_model)
    assert infer(**job) == first


def test_other_rows_or_settings_are_refused_unless_told(job, rows):
    infer(**job)
    with pytest.raises(UsageError, match="temperature"):
        infer(**job, temperature=0.5)
    rows.write_text(rows.read_text().replace("Question 3", "Question three"))
    with pytest.raises(UsageError, match="other rows"):
        infer(**job)
    assert len(infer(**job, resume=False)) == 30


def test_without_a_path_an_unfinished_file_is_found_and_a_finished_one_left(job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    del job["result_path"]
    infer(**job)
    [first] = (tmp_path / "infer_result").glob("*.jsonl")
    lines = first.read_bytes().splitlines(keepends=True)
    meta = read_meta(first)
    meta_path(first).write_text(json.dumps({**meta, "complete": False}))
    first.write_bytes(b"".join(lines[:10]))
    infer(**job)
    assert first.read_bytes() == b"".join(lines)
    assert list((tmp_path / "infer_result").glob("*.jsonl")) == [first]
    time.sleep(1.1)  # the name is the time, in seconds
    infer(**job)
    assert len(list((tmp_path / "infer_result").glob("*.jsonl"))) == 2


def test_ctrl_c_leaves_a_file_that_the_printed_command_continues(job, tmp_path):
    path = tmp_path / "out" / "results.jsonl"
    words = ["infer"]
    for name, value in {**FAST, **job, "max_new_tokens": 100}.items():
        words += [f"--{name}", *([str(value)] if not isinstance(value, list) else value)]
    child = multiprocessing.get_context("fork").Process(target=cli_with_notes, args=(words, tmp_path / "notes.txt"))
    child.start()
    wait_for_lines(path, 2)
    os.kill(child.pid, signal.SIGINT)
    child.join()
    notes = (tmp_path / "notes.txt").read_text()
    assert child.exitcode == 130
    assert "Traceback" not in notes
    kept = path.read_bytes()
    assert 0 < kept.count(b"\n") < 30
    command = next(line for line in notes.splitlines() if line.strip().startswith("swift infer"))
    assert cli(shlex.split(command)[1:]) == 0
    assert path.read_bytes().startswith(kept)
    assert len(results_of(path)) == 30


def cli_with_notes(words, file):
    logging.getLogger("swift").handlers = [logging.StreamHandler(file.open("w"))]
    logging.getLogger("swift").setLevel("INFO")
    raise SystemExit(cli(words))


def test_the_printed_command_gives_the_same_configuration(tmp_path):
    from swift.config import parse_command_line

    flags = {
        "model": "some/model",
        "val_dataset": ["a b.jsonl", "c.jsonl#5"],
        "columns": {"ask": "query"},
        "stop_words": ["END", "\n\n"],
        "temperature": 0.0,
        "merge_lora": True,
        "dataset_shuffle": False,
    }
    config = build_config(InferConfig, flags)
    words = shlex.split(resume_command(config, tmp_path / "r.jsonl"))[2:]
    parsed = parse_command_line(InferConfig, words, command="infer").config
    config.infer.result_path = str(tmp_path / "r.jsonl")
    assert parsed == config


def test_two_processes_answer_as_one(job, tmp_path, monkeypatch):
    alone = infer(**{**job, "result_path": str(tmp_path / "alone.jsonl")})
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=as_rank, args=(rank, job)) for rank in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0]
    path = tmp_path / "out" / "results.jsonl"
    assert results_of(path) == alone
    assert sorted(p.name for p in path.parent.iterdir()) == ["results.jsonl", "results.jsonl.meta.json"]


def as_rank(rank, flags):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0")
    raise SystemExit(main(build_config(InferConfig, {**FAST, **flags})))


def test_a_conversation_needs_one_process(tiny_model_dir, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="one process"):
        infer(model=str(tiny_model_dir))


def test_several_answers_to_each_row_are_drawn_apart(job, tmp_path):
    sampled = {**job, "temperature": 1.0, "num_return_sequences": 3}
    results = infer(**sampled)
    one = infer(**{**job, "temperature": 1.0, "result_path": str(tmp_path / "one.jsonl")})
    assert len(results) == 30
    for result, single in zip(results, one, strict=True):
        assert len(result["responses"]) == 3
        assert len({each["response"] for each in result["responses"]}) == 3
        for name, value in single.items():
            assert result[name] == value, "the first one is the one that is drawn alone"
            assert result["responses"][0].get(name, value) == value
        assert "responses" not in single
    with pytest.raises(UsageError, match="same"):
        infer(**{**sampled, "temperature": None, "result_path": str(tmp_path / "greedy.jsonl")})


def test_log_probabilities_are_in_the_results(job, tmp_path, tiny_model_dir):
    import torch
    from transformers import AutoModelForCausalLM

    from swift.inference.loading import prepare

    results = infer(**job, logprobs=True, top_logprobs=2)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    encoder = prepare(build_config(InferConfig, {"model": str(tiny_model_dir), "device": "cpu"})).encoder
    for result in results[:3]:
        prompt = encoder.encode_prompt(result["messages"][:-1])
        answer = [entry["id"] for entry in result["logprobs"]]
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
        for entry, row in zip(result["logprobs"], logprobs, strict=True):
            assert entry["logprob"] == pytest.approx(float(row[entry["id"]]), abs=1e-5)
            assert [each["id"] for each in entry["top_logprobs"]] == row.topk(2).indices.tolist()
        assert "".join(entry["token"] for entry in result["logprobs"]).startswith(result["response"][:1])
    assert "logprobs" not in infer(**{**job, "result_path": str(tmp_path / "plain.jsonl")})[0]


@pytest.mark.parametrize("backend", ["swift", "transformers"])
def test_answers_keep_to_a_form(job, tmp_path, backend):
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["red", "blue"]}')
    forms = (
        ({"structured_outputs_json": str(schema)}, {'"red"', '"blue"'}),
        ({"structured_outputs_regex": "[ab]"}, {"a", "b"}),
        ({"structured_outputs_choice": ["yes", "no"]}, {"yes", "no"}),
    )
    for form, allowed in forms:
        results = infer(**{**job, "max_new_tokens": 20}, **form, infer_backend=backend, resume=False)
        assert {result["response"] for result in results} <= allowed
        assert {result["finish_reason"] for result in results} == {"stop"}


@pytest.mark.parametrize("flag", [{"num_return_sequences": 2, "temperature": 1.0}, {"logprobs": True}])
def test_what_a_conversation_cannot_show_is_refused(tiny_model_dir, flag):
    with pytest.raises(UsageError, match="conversation"):
        infer(model=str(tiny_model_dir), **flag)


def test_every_setting_of_generation_reaches_the_engine(tiny_model_dir):
    """The answer changes, or ends, as each of them says."""
    from swift.config.inference import GenerationConfig
    from swift.inference.loading import load_engine

    with load_engine(build_config(InferConfig, {"model": str(tiny_model_dir), "device": "cpu"})) as engine:
        prompt = engine.encoder.encode_prompt([{"role": "user", "content": "What is red?"}])

        def tokens(**settings):
            return engine.generate([prompt], GenerationConfig(**{"max_new_tokens": 20, **settings}))[0].tokens

        plain = tokens()
        end = plain[3]
        first = plain.index(end)
        assert tokens(stop_token_ids=[end]) == plain[: first + 1]
        assert len(tokens(stop_token_ids=[end], min_new_tokens=first + 3)) > first + 1
        assert len(set(tokens(presence_penalty=2.0))) >= len(set(plain))
        assert tokens(frequency_penalty=2.0) != plain or len(set(plain)) == 20
        assert tokens(temperature=1.0, min_p=1.0) == plain, "only the likeliest is left"
        sampling = engine.sampling(GenerationConfig(num_beams=3, length_penalty=2.0, ignore_eos=True))
        assert (sampling.length_penalty, sampling.ignore_eos) == (2.0, True)


def test_a_failing_engine_writes_no_errors_for_rows_it_did_not_answer(job, tmp_path, tiny_model_dir):
    """NaN is the model's fault, not the row's: the job stops, and can go on with better weights."""
    import shutil

    from safetensors.torch import load_file, save_file

    broken = shutil.copytree(tiny_model_dir, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][:] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SwiftError, match="NaN"):
        infer(**{**job, "model": str(broken), "infer_backend": "transformers"})
    assert results_of(tmp_path / "out" / "results.jsonl") == []


def test_exit_codes(job, tmp_path):
    assert main(build_config(InferConfig, {**FAST, **job})) == 0
    bad = tmp_path / "bad.jsonl"
    bad.write_text("nope\nnope\n")
    flags = {**FAST, **job, "val_dataset": [str(bad)], "result_path": str(tmp_path / "bad-results.jsonl")}
    assert main(build_config(InferConfig, flags)) == 1
    assert [r["status"] for r in results_of(tmp_path / "bad-results.jsonl")] == ["error"] * 2


def test_a_place_that_cant_be_written_is_named_before_a_model_is_looked_for(job, tmp_path):
    (tmp_path / "file").write_text("")
    flags = {**FAST, **job, "model": "no/such-model", "result_path": str(tmp_path / "file" / "results.jsonl")}
    with pytest.raises(SwiftError, match="could not write"):
        infer(**flags)


# --- checkpoints ---


@pytest.fixture
def checkpoint(tiny_model_dir, tmp_path, write_rows, chat_rows):
    """A LoRA checkpoint as training leaves it: adapter, tokenizer with a template of its own, settings."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from swift import LoRAConfig, Swift
    from swift.config import SftConfig, save_config

    folder = tmp_path / "run" / "checkpoint-5"
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    model = Swift.prepare_model(model, LoRAConfig(r=4, target_modules=["q_proj", "v_proj"]))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    Swift.save(model, folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    template = tmp_path / "mine.jinja"
    template.write_text(
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    tokenizer.chat_template = template.read_text()
    tokenizer.save_pretrained(folder)
    data = write_rows(tmp_path / "train.jsonl", chat_rows(20))
    config = build_config(
        SftConfig,
        {
            "model": str(tiny_model_dir),
            "dataset": [str(data)],
            "template": str(template),
            "system": "You are brief.",
            "split_dataset_ratio": 0.2,
        },
    )
    save_config(config, folder)
    (folder / "complete.json").write_text("{}")
    template.unlink()  # the checkpoint carries it
    return folder


def test_a_checkpoint_brings_its_model_template_and_system_prompt(checkpoint, rows, tmp_path):
    from swift.inference.loading import load_engine

    config = build_config(InferConfig, {"adapters": [str(checkpoint)], "device": "cpu"})
    engine = load_engine(config)
    prompt = engine.encoder.encode_prompt([{"role": "user", "content": "hi"}])
    text = engine.tokenizer.decode(prompt)
    assert text == "[system] You are brief.<|im_end|>\n[user] hi<|im_end|>\n[assistant] "
    by_hand = InferConfig()
    by_hand.model.adapters = [str(checkpoint)]
    by_hand.infer.device = "cpu"
    assert load_engine(by_hand).encoder.encode_prompt([{"role": "user", "content": "hi"}]) == prompt


def test_results_go_beside_the_checkpoint(checkpoint, rows):
    from swift import infer as public

    config = InferConfig()
    config.model.adapters = [str(checkpoint)]
    config.data.val_dataset = [str(rows)]
    config.generation.max_new_tokens = FAST["max_new_tokens"]
    config.infer.device = "cpu"
    first = public(config)
    [path] = (checkpoint / "infer_result").glob("*.jsonl")
    assert results_of(path) == first
    path.unlink()
    infer(adapters=[str(checkpoint)], val_dataset=[str(rows)])
    [path] = (checkpoint / "infer_result").glob("*.jsonl")
    assert len(results_of(path)) == 30


def test_load_data_args_answers_the_rows_that_training_set_aside(checkpoint, tmp_path):
    from transformers import AutoTokenizer

    from swift.config import SftConfig, load_config
    from swift.data.dataset import prepare_datasets
    from swift.data.encoding.encode import ChatEncoder

    results = infer(adapters=[str(checkpoint)], load_data_args=True, result_path=str(tmp_path / "r.jsonl"))
    trained = load_config(SftConfig, checkpoint)
    trained.template.template = None
    encoder = ChatEncoder(AutoTokenizer.from_pretrained(checkpoint), trained.template)
    held = prepare_datasets(trained.data, trained.template, encoder, seed=42).val
    assert len(results) == len(held) == 4
    assert {r["source"] for r in results} == {str(held.ref(i)) for i in range(4)}
    assert all(r["labels"].startswith("Answer") for r in results)


@pytest.mark.parametrize("data_seed", [None, 3])
def test_load_data_args_draws_the_sample_that_training_evaluated_on(
    data_seed, tiny_model_copy, chat_rows, write_rows, tmp_path
):
    from swift.config import SftConfig, build_config, save_config
    from swift.data.dataset import prepare_datasets
    from swift.data.encoding.encode import ChatEncoder
    from swift.models.loading import load_tokenizer

    train, val = write_rows(tmp_path / "train.jsonl", chat_rows(4)), write_rows(tmp_path / "val.jsonl", chat_rows(60))
    given = {"dataset": [str(train)], "val_dataset": [f"{val}#5", f"{val}#4"], "seed": 11, "data_seed": data_seed}
    trained = build_config(SftConfig, {"model": str(tiny_model_copy), "tuner_type": "full", **given})
    save_config(trained, tiny_model_copy)
    encoder = ChatEncoder(load_tokenizer(tiny_model_copy, trained.model), trained.template)
    held = prepare_datasets(trained.data, trained.template, encoder, seed=trained.training.seed).val
    results = infer(
        model=str(tiny_model_copy), load_data_args=True, max_new_tokens=2, result_path=str(tmp_path / "r.jsonl")
    )
    assert [r["source"] for r in results] == [str(held.ref(i)) for i in range(9)]


# --- refusals ---


def refusal(**flags):
    with pytest.raises(SwiftError) as caught:
        infer(**flags)
    return str(caught.value)


def test_missing_things_are_named(tiny_model_dir, rows, tmp_path):
    missing = str(tmp_path / "no-such-model")
    assert missing in refusal(model=missing, val_dataset=[str(rows)])
    gone = str(tmp_path / "rowz.jsonl")
    text = refusal(model=str(tiny_model_dir), val_dataset=[gone])
    assert gone in text and "rows.jsonl" in text
    assert "no-adapter" in refusal(model=str(tiny_model_dir), adapters=[str(tmp_path / "no-adapter")])
    assert "--model" in refusal(val_dataset=[str(rows)])
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(DataError, match="empty"):
        infer(model=str(tiny_model_dir), val_dataset=[str(empty)])


def test_what_cannot_be_combined_is_refused(tiny_model_dir, rows, checkpoint, job):
    both = [str(checkpoint), str(checkpoint)]
    assert "2 adapters" in refusal(adapters=both, val_dataset=[str(rows)])
    assert "--merge_lora" in refusal(**job, merge_lora=True)
    assert "--stream" in refusal(**job, stream=True)
    assert "varlen" in refusal(**job, attn_impl="varlen")


def test_an_adapter_of_another_model_is_refused_by_name(checkpoint, tmp_path, rows):
    from fixtures import build_tiny_model

    other = build_tiny_model(tmp_path / "other-model", hidden_size=32, num_attention_heads=2, num_key_value_heads=2)
    with pytest.raises(ModelError) as caught:
        infer(model=str(other), adapters=[str(checkpoint)], val_dataset=[str(rows)])
    assert str(checkpoint) in str(caught.value) or "adapter" in str(caught.value)


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="there is a GPU")
def test_a_device_that_is_not_there(tiny_model_dir, rows):
    assert "--device cuda" in refusal(model=str(tiny_model_dir), val_dataset=[str(rows)], device="cuda")
