"""Text augmentation: `build_augmenter({"text": {...}})` gives a function of text, seed and row id.

The names below are fetched on first use, and the transforms are loaded with them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swift.data.augment.augmenter import Augmented, Augmenter, build_augmenter
    from swift.data.augment.transform import TRANSFORMS, Request, Transform, Unchanged

__all__ = ["TRANSFORMS", "Augmented", "Augmenter", "Request", "Transform", "Unchanged", "build_augmenter"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.augmenter")
    module.load_transforms()
    value = getattr(module, name, None) or getattr(importlib.import_module(f"{__name__}.transform"), name)
    globals()[name] = value
    return value
