"""Text augmentation: `build_augmenter({"text": {...}})` gives a function of text, seed and row id."""

from swift.data.augment import lexical, llm, noise, structure, translation  # noqa: F401 - each registers its transforms
from swift.data.augment.augmenter import Augmented, Augmenter, build_augmenter
from swift.data.augment.transform import TRANSFORMS, Request, Transform, Unchanged

__all__ = ["TRANSFORMS", "Augmented", "Augmenter", "Request", "Transform", "Unchanged", "build_augmenter"]
