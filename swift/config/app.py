"""The chat page: where it is shown, and which endpoint or model answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from swift.config.data import PromptConfig
from swift.config.engine import EngineConfig
from swift.config.fields import setting
from swift.config.model import ModelConfig
from swift.config.serving import AnswerDefaultsConfig
from swift.config.task import AnsweredTaskConfig


@dataclass
class PageConfig:
    """Chat page"""

    base_url: str | None = setting(None, help="OpenAI endpoint, up to /v1; default: the model is served here")
    api_key: str | None = setting(None, help="the endpoint's key; it stays in this process")
    server_name: str = setting("127.0.0.1", help="address of the page; 0.0.0.0: every network of this machine")
    server_port: int = setting(7860, help="port of the page; 0: any that is free")
    share: bool = setting(False, help="not possible: the page is never shown through another company's servers")
    studio_title: str = setting("swift", help="title of the page")
    lang: Literal["en", "zh"] = setting("en", help="language of the page")
    device: Literal["auto", "cpu", "cuda", "mps"] = setting("auto", help="where to run")
    load_args: bool = setting(True, help="take model, template and system from the checkpoint's own configuration")


@dataclass
class AppConfig:
    """Talk to a model in the browser."""

    model: ModelConfig = field(default_factory=ModelConfig)
    template: PromptConfig = field(default_factory=PromptConfig)
    generation: AnswerDefaultsConfig = field(default_factory=AnswerDefaultsConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    task: AnsweredTaskConfig = field(default_factory=AnsweredTaskConfig)
    page: PageConfig = field(default_factory=PageConfig)
