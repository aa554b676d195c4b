"""Recipes: types, overrides, and every fault at once with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift.core.errors import UsageError
from swift.data.engine.recipe import Recipe, read_recipe, recipe_from
from swift.data.engine.settings import size_of_words

TOYS = str(Path(__file__).parents[2] / "assets" / "toy_operators.py")
GOOD = f"""\
# a comment
input:
  - rows/*.jsonl
  - {{path: web, text_column: body, source: crawl}}
output: {{path: out, format: parquet, shard_bytes: 1.5MB}}
plugins: [{TOYS}]
seed: 7
max_memory: 2GB
on_bad_row: drop
executor:
  num_proc: 3
steps:
  - toy_length
  - toy_upper: {{suffix: no, share: 5e-1, words: [a, 2], maybe: null}}
  - toy_upper:
"""


def write(tmp_path: Path, text: str, name: str = "recipe.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_recipe_is_typed(tmp_path):
    recipe = read_recipe(write(tmp_path, GOOD))
    assert [item.path for item in recipe.input] == ["rows/*.jsonl", "web"]
    assert (recipe.input[1].text_column, recipe.input[1].source) == ("body", "crawl")
    assert (recipe.output.path, recipe.format, recipe.output_shard_bytes) == ("out", "parquet", 3 << 19)
    assert (recipe.seed, recipe.max_memory_bytes, recipe.on_bad_row) == (7, 2 << 30, "drop")
    assert (recipe.executor.kind, recipe.executor.num_proc) == ("local", 3)
    assert [step.label for step in recipe.steps] == ["toy_length", "toy_upper", "toy_upper-2"]
    # `no` is the text that was written, not false; 5e-1 a number; the alias is the setting
    assert recipe.steps[1].settings == {"suffix": "no", "rate": 0.5, "words": ["a", "2"], "maybe": None}
    assert recipe.steps[2].settings == {}
    assert recipe.name == "recipe"


def test_json_and_python_recipes_are_the_same(tmp_path):
    recipe = read_recipe(write(tmp_path, GOOD))
    again = recipe_from(recipe.as_json(), folder=tmp_path)
    assert again.as_json() == recipe.as_json()
    text = '{"input": "a.jsonl",\n\t"output": "o", "steps": [],\n "sede": 1}'
    with pytest.raises(UsageError) as caught:
        read_recipe(write(tmp_path, text, "r.json"))
    assert caught.value.where == f"{tmp_path}/r.json:3"
    assert "did you mean seed?" in caught.value.fix


def test_every_fault_is_told_at_once_with_its_line(tmp_path):
    text = f"""\
input: [a.jsonl, {{path: b, soruce: web}}]
outptu: x
plugins: [{TOYS}, nowhere.py, no.such.module]
seed: many
steps:
  - toy_uper
  - toy_upper: {{sufix: x}}
  - toy_upper: {{rate: 2}}
  - toy_upper: {{mode: uper}}
  - toy_upper: 3
  - {{toy_upper: {{}}, toy_length: {{}}}}
on_bad_row: stpo
shard_size: huge
executor: {{num_proc: 0}}
"""
    path = write(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        read_recipe(path)
    message = caught.value.message
    for line, words in (
        (1, "an input has no setting 'soruce' -> did you mean source?"),
        (2, "a recipe has no key 'outptu' -> did you mean output?"),
        (3, "'no.such.module' can't be imported"),
        (4, "seed of the recipe is 'many', which is not a whole number"),
        (6, "there is no operator 'toy_uper' -> did you mean toy_upper?"),
        (7, "no setting 'sufix' -> did you mean suffix?"),
        (8, "rate is 2.0: a share lies between 0 and 1 -> rate: 0.5"),
        (9, "'uper', which is not one of its values -> did you mean upper?"),
        (10, "the settings of the operator 'toy_upper' are a mapping, not '3'"),
        (11, "not 2 keys"),
        (12, "'stpo', which is not one of its values -> did you mean stop?"),
        (13, "shard_size is 'huge', which is no size"),
        (14, "num_proc is 0"),
        (1, "no output folder was given"),
    ):
        told = [item for item in message.splitlines() if words in item]
        assert told and told[0].strip().startswith(f"{path}:{line}"), (line, words, message)
    assert "there is no plugin file" in message
    assert len(message.splitlines()) == 16


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("- a\n- b\n", "must hold `key: value` lines"),
        ("input: a\ninput: b\n", "input is written twice"),
        ("input: [a\n", "not valid YAML"),
        ("input: a\noutput: b\nsteps: {x: y}\n", "`steps` is a list"),
        ("output: b\nsteps: []\n", "nothing to read"),
        ("input: a\noutput: {path: b, format: tokens}\nsteps: []\n", "no step writes tokens"),
        ("input: a\noutput: {path: b, format: jsonl}\nsteps: [toy_sink]\nplugins: [P]\n", "toy_sink writes tokens"),
        ("input: a\noutput: b\nsteps: [toy_sink, toy_length]\nplugins: [P]\n", "nothing can follow it"),
        ("input: a\noutput: b\nexecutor: {address: auto}\n", "address belongs to executor ray"),
        ("input: a\noutput: b\njoin_files: many\n", "join_files is 'many', which is no size"),
        (
            "input: a\noutput: b\nsteps: [{sample: {share: abc}}]\n",
            "share of the operator 'sample' is 'abc', which is not a number",
        ),
    ],
)
def test_what_is_no_recipe_is_refused(tmp_path, text, words):
    with pytest.raises(UsageError) as caught:
        read_recipe(write(tmp_path, text.replace("[P]", f"[{TOYS}]")))
    assert words in caught.value.message


def test_overrides_win_and_are_named_by_their_flags(tmp_path):
    path = write(tmp_path, GOOD)
    given = {"output.path": "new", "executor.num_proc": 1, "seed": 9, "input": ["x.jsonl"]}
    recipe = read_recipe(path, given)
    assert (recipe.output.path, recipe.format) == ("new", "parquet")
    assert (recipe.executor.num_proc, recipe.seed, recipe.input[0].path) == (1, 9, "x.jsonl")
    with pytest.raises(UsageError) as caught:
        read_recipe(path, {"executor.num_proc": 0})
    assert "num_proc is 0" in caught.value.message
    short = write(tmp_path, "input: a\noutput: b\nsteps: []\n", "short.yaml")
    assert read_recipe(short, {"output.path": "c"}).output.path == "c"


def test_a_plugin_file_that_fails_is_named(tmp_path):
    write(tmp_path, "import nothing_of_that_name\n", "broken.py")
    with pytest.raises(UsageError) as caught:
        read_recipe(write(tmp_path, "input: a\noutput: b\nplugins: [broken.py]\n"))
    assert "nothing_of_that_name" in caught.value.message
    assert caught.value.where.endswith("broken.py")


@pytest.mark.parametrize(
    ("words", "size"),
    [
        ("64MB", 64 << 20),
        ("1.5 GiB", 3 << 29),
        ("100", 100),
        ("7k", 7168),
        ("2TB", 2 << 40),
        ("x", None),
        ("-1MB", None),
    ],
)
def test_sizes(words, size):
    assert size_of_words(words) == size


def test_a_fresh_recipe_has_the_documented_defaults():
    recipe = Recipe()
    assert (recipe.seed, recipe.on_bad_row, recipe.on_bad_shard, recipe.format) == (42, "stop", "stop", "jsonl.zst")
