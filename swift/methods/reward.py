"""`swift rlhf --rlhf_type rm`: a reward model of pairs."""

from __future__ import annotations

from functools import partial

from swift.config.commands import RlhfConfig, TrainConfig
from swift.data.encoding.encode import ChatEncoder
from swift.data.encoding.units import UnitEncoder
from swift.distributed.mesh import Mesh
from swift.methods.preference import preference_options
from swift.models.kinds import Task
from swift.objectives.preference import RewardObjective
from swift.objectives.preference_options import PreferenceOptions
from swift.training.method import Method
from swift.training.module import Objectives

REWARD = Task("seq_cls", num_labels=1, problem_type="regression", pooling="last", extra={"task_type": "reward"})


def reward_method(config: RlhfConfig, command: str) -> Method:
    """A model with one number for a whole answer, trained so that chosen answers get larger ones."""
    return Method(
        command,
        make_encoder=lambda tokenizer, settings: UnitEncoder(ChatEncoder(tokenizer, settings.template), "pairs"),
        make_objectives=partial(_objectives, preference_options(config)),
        task=REWARD,
        row_layout="pairs",
        batches={"units": True, "targets": "last"},
        wants_dropout=not config.preference.disable_dropout,
        share_prompts=config.preference.share_prompts,
    )


def _objectives(options: PreferenceOptions, config: TrainConfig, mesh: Mesh) -> Objectives:
    objective = RewardObjective(options, axis=mesh["cp"] or None)
    return Objectives(objective, objective)
