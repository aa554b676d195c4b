"""The conversation: history, commands, several lines, Ctrl-C, refusals; on a pipe, as people script it."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from fixtures import build_tiny_model

from swift.config.inference import GenerationConfig
from swift.inference.chat import Chat
from swift.inference.terminal import Terminal


def talk(engine, text, *, system=None, **settings):
    """Run a conversation; returns the chat, its answers and its notes."""
    answers, notes = io.StringIO(), io.StringIO()
    terminal = Terminal(io.StringIO(text), answers, notes)
    chat = Chat(engine, GenerationConfig(**{"max_new_tokens": 8, **settings}), terminal, system=system)
    assert chat.run() == 0
    return chat, answers.getvalue(), notes.getvalue()


def expected(engine, messages, **settings):
    prompt = engine.encoder.encode_prompt(messages)
    return engine.generate([prompt], GenerationConfig(**{"max_new_tokens": 8, **settings}))[0].text


def test_answers_follow_the_whole_history(tiny_engine):
    chat, answers, _ = talk(tiny_engine, "hello\nand now?\n")
    first = expected(tiny_engine, [{"role": "user", "content": "hello"}])
    turns = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "and now?"},
    ]
    second = expected(tiny_engine, turns)
    assert answers == f"{first}\n{second}\n"
    assert chat.messages == [*turns, {"role": "assistant", "content": second}]


@pytest.mark.parametrize("settings", [{"stream": False}, {"num_beams": 2}])
def test_without_streaming_the_answers_are_the_same(tiny_engine, settings):
    _, answers, _ = talk(tiny_engine, "hello\n", **settings)
    assert answers == expected(tiny_engine, [{"role": "user", "content": "hello"}], **settings) + "\n"


def test_a_repeated_question_is_drawn_anew_and_a_rerun_repeats_it(tiny_engine):
    text = "hello\n/reset\nhello\n"
    _, answers, _ = talk(tiny_engine, text, temperature=1.5)
    first, second = answers.rstrip("\n").split("\n")[:2]
    assert first != second
    assert talk(tiny_engine, text, temperature=1.5)[1] == answers


@pytest.mark.parametrize("opening", ['"""', "/multi", ' """ '])
@pytest.mark.parametrize("closing", ['"""\n', ""])
def test_several_lines_are_one_message(tiny_engine, opening, closing):
    chat, _, _ = talk(tiny_engine, f"{opening}\nfirst\n\n/reset is text here\n{closing}")
    assert chat.messages[0] == {"role": "user", "content": "first\n\n/reset is text here"}
    assert len(chat.messages) == 2


def test_system_prompt_is_set_shown_and_removed(tiny_engine):
    chat, _, notes = talk(tiny_engine, "hello\n/system Be brief.\n/system\nhi\n", system="Old.")
    assert chat.messages[0] == {"role": "system", "content": "Be brief."}
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant"], "a new system prompt starts anew"
    assert "system prompt: Be brief." in notes
    chat, _, notes = talk(tiny_engine, '/system ""\nhi\n', system="Old.")
    assert [m["role"] for m in chat.messages] == ["user", "assistant"]
    assert "no system prompt" in talk(tiny_engine, "/system\n")[2]


def test_reset_keeps_the_system_prompt(tiny_engine):
    chat, _, _ = talk(tiny_engine, "hello\n/reset\n", system="S")
    assert chat.messages == [{"role": "system", "content": "S"}]


def test_save_appends_a_training_row(tiny_engine, tmp_path):
    file = tmp_path / "new folder" / "talks.jsonl"
    chat, _, notes = talk(tiny_engine, f"/save {file}\nhällo\n/save {file}\nmore\n/save {file}\n/save\n", system="S")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [len(row["messages"]) for row in rows] == [3, 5]
    assert rows[1]["messages"] == chat.messages
    assert "nothing to save" in notes and "say where" in notes


def test_save_that_fails_is_told_and_the_conversation_goes_on(tiny_engine, tmp_path):
    chat, _, notes = talk(tiny_engine, f"hello\n/save {tmp_path}\nmore\n")
    assert f"could not write {tmp_path}" in notes
    assert len(chat.messages) == 4


def test_unknown_commands_are_not_sent_to_the_model(tiny_engine):
    chat, answers, notes = talk(tiny_engine, "/rest\n/help\n/nothing-like-it\n")
    assert answers == "" and chat.messages == []
    assert "did you mean /reset?" in notes
    assert "/save FILE" in notes
    chat, _, _ = talk(tiny_engine, "/etc/passwd is what?\n")
    assert chat.messages[0]["content"] == "/etc/passwd is what?"


@pytest.mark.parametrize("end", ["/exit\n", "/quit\n", ""])
def test_the_end(tiny_engine, end):
    chat, _, _ = talk(tiny_engine, "hello\n" + end + ("never read\n" if end else ""))
    assert len(chat.messages) == 2


def test_blank_lines_crlf_bom_and_broken_bytes(tiny_engine):
    source = io.TextIOWrapper(io.BytesIO("\ufeff\n  \nhi\r\n".encode() + b"caf\xe9 \n"), encoding="utf-8")
    chat = Chat(tiny_engine, GenerationConfig(max_new_tokens=4), Terminal(source, io.StringIO(), io.StringIO()))
    chat.run()
    assert [m["content"] for m in chat.messages[::2]] == ["hi", "caf\ufffd "]


def test_a_message_over_the_context_is_refused_and_the_conversation_kept(tiny_engine):
    chat, _, notes = talk(tiny_engine, "hello\n" + "word " * 1100 + "\nstill there?\n")
    assert "1024" in notes and "/reset" in notes
    assert [m["content"] for m in chat.messages[::2]] == ["hello", "still there?"]


def test_a_full_context_is_named(tiny_engine):
    room = 1024 - len(tiny_engine.encoder.encode_prompt([{"role": "user", "content": "x"}]))
    _, _, notes = talk(tiny_engine, "x\n", max_new_tokens=8)
    assert "cut after 8 tokens" in notes and "--max_new_tokens" in notes
    long = "x " * (room - 20)
    _, _, notes = talk(tiny_engine, long + "\n", max_new_tokens=500)
    assert "context of 1024 tokens is full" in notes


def test_a_template_that_refuses_is_told(tiny_engine, tiny_model_dir):
    from transformers import AutoTokenizer

    from swift.config.data import TemplateConfig
    from swift.data.encoding.encode import ChatEncoder
    from swift.inference.engine import Engine

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    tokenizer.chat_template = refusing + tokenizer.chat_template
    engine = Engine(tiny_engine.backend, tokenizer, ChatEncoder(tokenizer, TemplateConfig()))
    chat, answers, notes = talk(engine, "/system Be brief.\nhello\n")
    assert "no system here" in notes
    assert answers == ""
    assert chat.messages == [{"role": "system", "content": "Be brief."}]


# --- the real process ---


class Process:
    """`swift infer` with a pipe for a keyboard."""

    def __init__(self, model, *flags):
        command = [sys.executable, "-m", "swift.cli", "infer", "--model", str(model), *flags]
        self.child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        )
        os.set_blocking(self.child.stdout.fileno(), False)
        self.output = b""

    def type(self, text):
        self.child.stdin.write(text.encode())

    def wait_for_output(self, timeout_s=120.0):
        """Until something more is written."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            chunk = self.child.stdout.read()
            if chunk:
                self.output += chunk
                return
            time.sleep(0.02)
        raise AssertionError(f"no output in {timeout_s} s")

    def finish(self):
        self.child.stdin.close()
        code = self.child.wait(timeout=120)
        os.set_blocking(self.child.stdout.fileno(), True)
        self.output += self.child.stdout.read()
        return code, self.output.decode(), self.child.stderr.read().decode()


@pytest.fixture(scope="module")
def patient_model(tmp_path_factory):
    """A model with a context that takes minutes to fill."""
    return build_tiny_model(tmp_path_factory.mktemp("long") / "model", max_position_embeddings=200_000)


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation_and_twice_leaves(patient_model, tmp_path):
    saved = tmp_path / "talk.jsonl"
    process = Process(patient_model, "--max_new_tokens", "150000", "--device", "cpu")
    process.type("tell me everything\n")
    process.wait_for_output()
    process.child.send_signal(signal.SIGINT)
    time.sleep(1.2)  # longer than two Ctrl-C that mean "leave"
    process.type(f"/save {saved}\ngo on\n")
    before = len(process.output)
    while len(process.output) - before < 50:
        process.wait_for_output()
    process.child.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.child.send_signal(signal.SIGINT)
    assert process.child.wait(timeout=60) == 0, "no end of input was needed"
    _, output, notes = process.finish()
    assert notes.count("(stopped)") == 2
    assert "Traceback" not in notes
    [row] = [json.loads(line) for line in saved.read_text(encoding="utf-8").splitlines()]
    assert [m["role"] for m in row["messages"]] == ["user", "assistant"]
    assert output.startswith(row["messages"][1]["content"]), "what was shown is what is remembered"
