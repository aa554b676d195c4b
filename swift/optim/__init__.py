"""Floor 3: optimizers and learning-rate schedules."""

from swift.optim.local import LocalParameters, local_parameters
from swift.optim.optimizers import build_optimizer, default_learning_rate
from swift.optim.schedules import Schedule, build_schedule

__all__ = [
    "LocalParameters",
    "Schedule",
    "build_optimizer",
    "build_schedule",
    "default_learning_rate",
    "local_parameters",
]
