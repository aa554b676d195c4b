"""What the program says and how it exits, in a process of its own, before anything heavy is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import yaml

from swift import __version__
from swift.config import COMMANDS, LATER

# a start of our program that shows whether anything heavy was loaded
PROBE = (
    "import sys\n"
    "from swift.cli import main\n"
    "code = main(sys.argv[1:])\n"
    "heavy = [m for m in ('torch', 'transformers', 'peft', 'pyarrow', 'numpy') if m in sys.modules]\n"
    "print('HEAVY', heavy, file=sys.stderr) if heavy else None\n"
    "sys.exit(code)\n"
)


def swift(*words: str, cwd=None, env=None) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "NPROC_PER_NODE", "NNODES")}
    return subprocess.run(
        [sys.executable, "-c", PROBE, *words],
        capture_output=True, text=True, cwd=cwd, env={**environment, **(env or {})}, check=False,
    )  # fmt: skip


def refused(*words: str, cwd=None, env=None) -> str:
    """The message of a refused request: exit code 2, one screen, no traceback, nothing heavy loaded."""
    result = swift(*words, cwd=cwd, env=env)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr and "HEAVY" not in result.stderr, result.stderr
    assert len(result.stderr.splitlines()) <= 25 and result.stdout == ""
    return result.stderr


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",), ("help",)])
def test_overview(words):
    result = swift(*words)
    assert result.returncode == 0 and result.stderr == ""
    assert all(f"  {name}" in result.stdout for name in COMMANDS)


def test_version():
    assert swift("--version").stdout == f"swift {__version__}\n"


@pytest.mark.parametrize("command", ["sft", "pt", "train", "infer", "merge-lora", "export"])
def test_help_of_a_command(command):
    result = swift(command, "--help")
    assert result.returncode == 0 and result.stderr == "" and result.stdout.startswith(f"usage: swift {command}")
    assert "[model]" in result.stdout and swift("help", command).stdout == result.stdout


def test_misspelt_command():
    assert "did you mean `swift sft`?" in refused("sfft")


def test_options_before_the_command():
    assert "the command comes first" in refused("--model", "x")


@pytest.mark.parametrize("command", LATER)
def test_commands_of_later_versions(command):
    assert "not available yet" in refused(command, "--model", "x")


def test_misspelt_flag_and_value(tmp_path):
    assert "did you mean --learning_rate?" in refused("sft", "--lerning_rate", "1")
    assert "'fast' is not a number" in refused("sft", "--learning_rate", "fast")
    assert "did you mean steps?" in refused("sft", "--save_strategy", "step")
    (tmp_path / "run.yaml").write_text("modle: x\n")
    assert "run.yaml:1" in refused("sft", "run.yaml", cwd=tmp_path)


def test_missing_model_and_data_are_named_together(tmp_path):
    (tmp_path / "model-a").mkdir()
    (tmp_path / "rows.jsonl").write_text("{}\n")
    text = refused("sft", "--model", "./model-b", "--dataset", "row.jsonl", cwd=tmp_path)
    assert "model-a" in text and "rows.jsonl" in text


def test_data_that_needs_more_settings_is_refused_before_torch(tiny_model_dir, tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    model = str(tiny_model_dir)
    words = ("--model", model, "--dataset", "self-cognition")
    text = refused("sft", *words, cwd=tmp_path)
    assert "needs --model_name and --model_author" in text and "faults" not in text
    (tmp_path / "run.yaml").write_text(f"model: {model}\ndataset: [self-cognition]\nmodel_name: [Ada]\n")
    text = refused("pt", "run.yaml", cwd=tmp_path)
    assert "needs --model_author" in text and "run.yaml:2" in text
    assert "needs --model_name" in refused("infer", *words, cwd=tmp_path)
    two = ("--val_dataset", "rows.jsonl", "--split_dataset_ratio", "0.1")
    assert "both give evaluation rows" in refused(
        "sft", "--model", model, "--dataset", "rows.jsonl", *two, cwd=tmp_path
    )
    assert "both give" not in refused("sft", "--model", model, "--dataset", "gone.jsonl", *two, cwd=tmp_path)


def test_a_path_that_looks_local_is_never_a_hub_id(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "rows.jsonl").write_text("{}\n")
    assert "there is no model folder" in refused("sft", "--model", "models/x", "--dataset", "rows.jsonl", cwd=tmp_path)


def test_adapters(tmp_path):
    assert "there is no adapter folder gone" in refused("infer", "--adapters", "gone", cwd=tmp_path)
    assert "no adapter given" in refused("merge-lora", "--model", "smollm2", cwd=tmp_path)


def test_bad_environment(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    words = ("sft", "--model", "smollm2", "--dataset", "rows.jsonl")
    assert "NPROC_PER_NODE" in refused(*words, cwd=tmp_path, env={"NPROC_PER_NODE": "two"})
    assert "(or NODE_RANK) and --master_addr" in refused(*words, cwd=tmp_path, env={"NNODES": "2"})


def test_a_reader_that_goes_away():
    command = f"{sys.executable} -m swift.cli sft --help | head -1; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert result.stderr == "" and result.stdout.splitlines()[-1] == "0"


# --- swift config ---------------------------------------------------------------------------------------------------


def test_config_show_says_where_each_value_comes_from(tmp_path):
    (tmp_path / "run.yaml").write_text("model: x\nlora: {rank: 4}\nENV: {LOG_LEVEL: INFO}\n")
    result = swift("config", "show", "run.yaml", "--save_steps", "9", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert "model: x  # run.yaml:1" in lines and "lora_rank: 4  # run.yaml:2" in lines
    assert "save_steps: 9  # command line: --save_steps" in lines and "lora_alpha: 32  # default" in lines
    assert lines[1:3] == ["ENV:", "LOG_LEVEL: INFO"]
    (tmp_path / "again.yaml").write_text(result.stdout)
    again = swift("config", "show", "again.yaml", cwd=tmp_path)
    assert yaml.safe_load(again.stdout) == yaml.safe_load(result.stdout)


def test_config_show_of_other_commands():
    result = swift("config", "show", "--command", "infer", "--max_new_tokens", "5")
    assert yaml.safe_load(result.stdout)["generation"]["max_new_tokens"] == 5
    assert "unknown command" in refused("config", "show", "--command", "sfft")


@pytest.mark.parametrize("command", ["sft", "infer", "merge-lora"])
def test_config_schema_describes_the_files(command):
    schema = json.loads(swift("config", "schema", "--command", command).stdout)
    shown = yaml.safe_load(swift("config", "show", "--command", command).stdout)
    for group, members in shown.items():
        assert set(members) == set(schema["$defs"][group]["properties"])
    assert schema["additionalProperties"] is False and "ENV" in schema["properties"]


def test_config_convert(tmp_path):
    (tmp_path / "theirs.yaml").write_text("base_model: m\nadapter: lora\ndatasets: [{path: ./rows.jsonl}]\nrl: grpo\n")
    result = swift("config", "convert", "theirs.yaml", "--output", "ours.yaml", cwd=tmp_path)
    assert result.returncode == 0 and "no equivalent (1)" in result.stderr and "rl:" in result.stderr
    assert swift("config", "show", "ours.yaml", cwd=tmp_path).returncode == 0
    assert "exists already" in refused("config", "convert", "theirs.yaml", "--output", "ours.yaml", cwd=tmp_path)
    (tmp_path / "unclear.yaml").write_text("seed: 1\n")
    assert "--from" in refused("config", "convert", "unclear.yaml", cwd=tmp_path)
    piped = swift("config", "convert", "theirs.yaml", "--from", "axolotl", cwd=tmp_path)
    assert yaml.safe_load(piped.stdout)["model"] == {"model": "m"}


def test_config_sub_commands():
    assert "did you mean show?" in refused("config", "shwo")
    assert swift("config").returncode == 0 and "convert" in swift("config", "--help").stdout


# --- bugs and interrupts --------------------------------------------------------------------------------------------


def main_with(monkeypatch, raised: BaseException) -> int:
    from swift import cli

    def fail(words):
        raise raised

    monkeypatch.setattr(cli, "_dispatch", fail)
    return cli.main([])


def test_exit_codes_of_exceptions(monkeypatch, capsys):
    from swift.core.errors import DataError, UsageError

    assert main_with(monkeypatch, DataError("bad row", where="a.jsonl:3", fix="mend it")) == 1
    assert capsys.readouterr().err == "error: bad row\n  where: a.jsonl:3\n  fix:   mend it\n"
    assert main_with(monkeypatch, UsageError("wrong")) == 2
    assert main_with(monkeypatch, KeyboardInterrupt()) == 130
    capsys.readouterr()
    assert main_with(monkeypatch, RuntimeError("a bug")) == 1
    assert "Traceback" in capsys.readouterr().err


def test_other_ranks_of_a_machine_report_in_one_line(monkeypatch, capsys):
    from swift.core.errors import DataError

    error = DataError("bad row", where="a.jsonl:3", fix="mend it")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main_with(monkeypatch, error) == 1
    assert capsys.readouterr().err == "[rank 3] error: bad row\n"
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")  # the first of its machine: rank 0's message is on another screen
    assert main_with(monkeypatch, error) == 1
    assert capsys.readouterr().err == "[rank 2] error: bad row\n  where: a.jsonl:3\n  fix:   mend it\n"
