"""Folders with a model in OpenVINO's format."""

from __future__ import annotations

from pathlib import Path

from swift.config.model import ModelConfig
from swift.core.errors import ModelError

MODEL_FILE = "openvino_model.xml"


def find_openvino(config: ModelConfig) -> Path:
    """The folder that `model` names, if it holds a model in OpenVINO's format.

    Raises:
        ModelError: it doesn't; the message says what is missing.
    """
    folder = Path(config.model or "").expanduser()
    wanted = (MODEL_FILE, MODEL_FILE.replace(".xml", ".bin"), "config.json")
    missing = [name for name in wanted if not (folder / name).is_file()]
    if config.model is None or not folder.is_dir() or missing:
        raise ModelError(
            f"{config.model} is no folder with a model for OpenVINO"
            + (f"; missing: {', '.join(missing)}" if folder.is_dir() and config.model else ""),
            where="--model",
            fix="convert one: optimum-cli export openvino --model FOLDER --task text-generation-with-past OUT",
        )
    return folder
