"""Folders with a model in OpenVINO's format, and the library without what it reports of its users."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from swift.config.model import ModelConfig
from swift.core.errors import ModelError
from swift.core.extras import require

MODEL_FILE = "openvino_model.xml"


def without_telemetry() -> None:
    """Keep OpenVINO from telling a statistics server that it was imported; call it before the first import.

    The library has a stub of its own for where the package that reports isn't installed. Nothing changes where somebody
    else imported that package already.
    """
    modules: dict[str, Any] = sys.modules
    modules.setdefault("openvino_telemetry", None)  # None: importing it raises ImportError


def load_genai() -> Any:
    """openvino-genai, whose import tells nobody.

    Raises:
        DependencyError: it isn't installed.
    """
    without_telemetry()
    return require("openvino_genai", extra="openvino", purpose="run a model in OpenVINO's format")


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
