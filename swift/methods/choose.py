"""Which method a run's settings ask for. The one place that knows all of them."""

from __future__ import annotations

from swift.config.commands import RlhfConfig, SftConfig, TrainConfig
from swift.training.method import Method, next_token_method


def choose_method(config: TrainConfig, command: str) -> Method:
    """The method of a run; it makes everything that depends on the model or the data later."""
    if isinstance(config, RlhfConfig):
        if config.preference.rlhf_type == "gkd":
            from swift.methods.distillation import distillation_method

            return distillation_method(config, command)
        if config.preference.rlhf_type == "rm":
            from swift.methods.reward import reward_method

            return reward_method(config, command)
        from swift.methods.preference import preference_method

        return preference_method(config, command)
    if isinstance(config, SftConfig) and config.task.task_type != "causal_lm":
        from swift.methods.tasks import task_method

        return task_method(config, command)
    return next_token_method(command)
