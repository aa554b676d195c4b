"""swift: take a pretrained model and data the whole way, from tuning to serving.

Importing this package loads nothing heavy: every public name below is fetched from its room on first use,
so ``import swift`` needs no torch and stays well under 0.2 s.
"""

from __future__ import annotations

import importlib
from typing import Any

from swift.core.version import __version__

# public name -> module that defines it
_PUBLIC = {
    "SftConfig": "swift.config",
    "PtConfig": "swift.config",
    "RlhfConfig": "swift.config",
    "InferConfig": "swift.config",
    "DeployConfig": "swift.config",
    "MergeLoraConfig": "swift.config",
    "SampleConfig": "swift.config",
    "ExportConfig": "swift.config",
    "SwiftError": "swift.core.errors",
    "sft": "swift.commands.sft",
    "pt": "swift.commands.pt",
    "rlhf": "swift.commands.rlhf",
    "infer": "swift.commands.infer",
    "load_engine": "swift.inference.loading",
    "deploy": "swift.commands.deploy",
    "sample": "swift.commands.sample",
    "merge_lora": "swift.commands.merge_lora",
    "Recipe": "swift.data.engine.recipe",
    "run_recipe": "swift.data.engine.run",
    "build_augmenter": "swift.data.augment",
    "Swift": "swift.models.adapters",
    "LoRAConfig": "swift.models.adapters",
    "AdapterConfig": "swift.models.adapters",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'swift' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
