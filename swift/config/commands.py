"""Which groups of settings each command has. A command's configuration is these groups and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field

from swift.config.app import AppConfig as AppConfig
from swift.config.data import BatchingConfig, DataConfig, PromptConfig, RowsConfig, TemplateConfig
from swift.config.engine import EngineConfig
from swift.config.export import ExportConfig as ExportConfig
from swift.config.inference import GenerationConfig, InferRunConfig, MergeConfig
from swift.config.model import ModelConfig
from swift.config.parallel import ParallelConfig
from swift.config.preference import DistillConfig, PreferenceConfig
from swift.config.sample import SampleConfig as SampleConfig
from swift.config.serving import DeployConfig as DeployConfig
from swift.config.task import AnsweredTaskConfig, TaskConfig
from swift.config.training import (
    CheckpointConfig,
    EvalConfig,
    LossConfig,
    MonitorConfig,
    ObjectiveConfig,
    OptimizerConfig,
    TrainingConfig,
)
from swift.config.tuner import TunerConfig


@dataclass
class TrainConfig:
    """What every command that trains has."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    template: TemplateConfig = field(default_factory=TemplateConfig)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    tuner: TunerConfig = field(default_factory=TunerConfig)
    objective: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    parallelism: ParallelConfig = field(default_factory=ParallelConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)


@dataclass
class SftConfig(TrainConfig):
    """Supervised fine-tuning on conversations, or on the rows of another task."""

    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    task: TaskConfig = field(default_factory=TaskConfig)


@dataclass
class PtConfig(SftConfig):
    """Continued pre-training on plain text: no chat template, every token trained, full tuning by default."""

    template: TemplateConfig = field(
        default_factory=lambda: TemplateConfig(use_chat_template=False, loss_scale="all", truncation_strategy="split")
    )
    tuner: TunerConfig = field(default_factory=lambda: TunerConfig(tuner_type="full"))


@dataclass
class MegatronSftConfig(SftConfig):
    """Supervised fine-tuning with the defaults of `megatron sft`: full tuning."""

    tuner: TunerConfig = field(default_factory=lambda: TunerConfig(tuner_type="full"))


@dataclass
class RlhfConfig(TrainConfig):
    """Preference optimisation, reward models and distillation: the last answer of each row is what is trained on."""

    template: TemplateConfig = field(default_factory=lambda: TemplateConfig(loss_scale="last_round"))
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)


@dataclass
class MegatronRlhfConfig(RlhfConfig):
    """Preference optimisation with the defaults of `megatron rlhf`: full tuning."""

    tuner: TunerConfig = field(default_factory=lambda: TunerConfig(tuner_type="full"))


@dataclass
class InferConfig:
    """Talk to a model, or answer a file of prompts."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: RowsConfig = field(default_factory=RowsConfig)
    template: PromptConfig = field(default_factory=PromptConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    infer: InferRunConfig = field(default_factory=InferRunConfig)
    task: AnsweredTaskConfig = field(default_factory=AnsweredTaskConfig)


@dataclass
class MergeLoraConfig:
    """Merge an adapter into its base model and prove that the answers stay the same."""

    model: ModelConfig = field(default_factory=ModelConfig)
    merge: MergeConfig = field(default_factory=MergeConfig)
