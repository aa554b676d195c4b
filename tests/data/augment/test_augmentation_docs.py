"""docs/augmentation.md stays true: its examples are run, and its tables hold every setting with its default."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import yaml

from swift.data.augment import TRANSFORMS, build_augmenter
from swift.data.operators.augment import Augment

PAGE = (Path(__file__).parents[3] / "docs" / "augmentation.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```text\nconfig: (.*)\nbefore: (.*)\nafter:  (.*)\n```", PAGE)
SECTIONS = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))


def test_every_transform_is_described_and_every_local_one_shown():
    assert set(SECTIONS) == set(TRANSFORMS)
    shown = {next(iter(json.loads(config)["text"])) for config, _, _ in EXAMPLES}
    assert shown == set(TRANSFORMS) - {"paraphrase_llm"}
    assert all(before != after for _, before, after in EXAMPLES)


@pytest.mark.parametrize(("config", "before", "after"), EXAMPLES)
def test_examples(config, before, after):
    if "apertium" in config:
        if shutil.which("apertium") is None:
            pytest.skip("needs the program apertium with eng-spa and fr-es")
        found = build_augmenter(json.loads(config))(before, seed=42, row_id="docs")
        assert found != before and "12" in found  # its words are those of the installed version
        return
    assert build_augmenter(json.loads(config))(before, seed=42, row_id="docs") == after


@pytest.mark.parametrize("name", [name for name in TRANSFORMS if name != "random_insertion"])
def test_tables_of_settings(name):
    page = SECTIONS[name] + PAGE.partition("## Settings of all")[2].partition("## Transforms")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", page, re.MULTILINE))
    settings = {field.name: field for field in fields(TRANSFORMS[name])}
    assert set(rows) == set(settings)
    for key, field in settings.items():
        if field.default is MISSING and field.default_factory is MISSING:
            assert rows[key] == "required"
        elif rows[key].startswith("`"):
            value = field.default if field.default is not MISSING else field.default_factory()
            assert json.loads(rows[key].strip("`")) == value
        assert field.metadata["help"].replace("|", "\\|") in page


def test_configurations_in_the_text_are_accepted():
    for block in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL):
        build_augmenter(json.loads(block))
    recipes = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
    assert len(recipes) == 2
    Augment(**recipes[0]["steps"][0]["augment"]).check()
    build_augmenter({"text": recipes[1]})
