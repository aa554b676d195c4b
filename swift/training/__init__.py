"""Floor 4: the training loop and what stands directly around it."""

from swift.training.precision import Precision, choose_precision
from swift.training.trainer import FitResult, Trainer
from swift.training.trainer_parts import TrainerParts

__all__ = ["FitResult", "Precision", "Trainer", "TrainerParts", "choose_precision"]
