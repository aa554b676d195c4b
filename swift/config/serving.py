"""How a model is offered over HTTP: where, to whom, how much at a time, and how long anything may take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from swift.config.data import PromptConfig
from swift.config.engine import EngineConfig
from swift.config.fields import setting
from swift.config.model import ModelConfig
from swift.config.replicas import ReplicasConfig
from swift.config.task import AnsweredTaskConfig


@dataclass
class AnswerDefaultsConfig:
    """Answers, where a request says nothing"""

    max_new_tokens: int | None = setting(None, help="default: what the context leaves", aliases=("max_tokens",))
    temperature: float | None = setting(None, help="0: greedy; default: the model's generation_config")
    top_p: float | None = setting(None, help="nucleus sampling")
    top_k: int | None = setting(None, help="sample from the k likeliest")
    min_p: float | None = setting(None, help="leave out tokens below this share of the likeliest one's probability")
    repetition_penalty: float | None = setting(None, help="above 1: fewer repetitions")
    stop_words: list[str] = setting(help="texts that end an answer", factory=list, aliases=("stop",))


@dataclass
class ServeConfig:
    """Server"""

    device: Literal["auto", "cpu", "cuda", "mps"] = setting("auto", help="where to run")
    merge_lora: bool = setting(False, help="merge the adapter before serving (checked against the unmerged logits)")
    load_args: bool = setting(True, help="take model, template and system from the checkpoint's own configuration")
    host: str = setting("127.0.0.1", help="address to listen on; 0.0.0.0: every network of this machine")
    port: int = setting(8000, help="port to listen on; 0: any that is free")
    served_model_name: list[str] = setting(
        help="names that requests call the model by; default: its folder's name", factory=list
    )
    owned_by: str = setting("swift", help="shown in /v1/models")
    api_key: list[str] = setting(
        help="keys, one of which every request must bring (Authorization: Bearer KEY); default: none is needed",
        factory=list,
    )
    api_key_file: str | None = setting(
        None,
        help="file with a key in each line: KEY or sha256:HEX, then what it may do: name=ID requests_per_minute=N "
        "tokens_per_minute=N concurrency=N admin",
    )
    admin_api_key: str | None = setting(None, help="key that may load and unload adapters too")
    requests_per_minute: int | None = setting(None, help="of each key; default: no limit")
    tokens_per_minute: int | None = setting(None, help="of each key, prompts and answers; default: no limit")
    key_concurrency: int | None = setting(None, help="requests of one key at a time; default: no limit")
    max_queue: int = setting(512, help="answers that may wait for a place in the batch; more are refused (429)")
    max_request_bytes: int = setting(8 << 20, help="size of a request's body; larger ones are refused (413)")
    max_logprobs: int = setting(20, help="most likely tokens that a request may ask for")
    request_timeout_s: float = setting(600.0, help="seconds for an answer, waiting included; then it is cancelled")
    header_timeout_s: float = setting(10.0, help="seconds for a request's headers")
    body_timeout_s: float = setting(60.0, help="seconds for a request's body")
    keep_alive_s: int = setting(30, help="seconds that an idle connection is kept")
    drain_s: int = setting(30, help="seconds that running answers have to end after SIGTERM or Ctrl-C")
    ssl_certfile: str | None = setting(None, help="certificate (PEM) for TLS")
    ssl_keyfile: str | None = setting(None, help="private key (PEM) of ssl_certfile")
    allowed_origins: list[str] = setting(help="web pages whose scripts may call the server (CORS)", factory=list)
    access_log: bool = setting(True, help="a line for each request: what, how long, how many tokens, no contents")
    log_contents: bool = setting(False, help="write prompts and answers into the access log", aliases=("verbose",))
    log_interval: float = setting(20.0, help="seconds between two lines on the engine's load; 0: none")


@dataclass
class DeployConfig:
    """Serve a model over HTTP, as OpenAI's clients expect it."""

    model: ModelConfig = field(default_factory=ModelConfig)
    template: PromptConfig = field(default_factory=PromptConfig)
    generation: AnswerDefaultsConfig = field(default_factory=AnswerDefaultsConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    scale: ReplicasConfig = field(default_factory=ReplicasConfig)
    task: AnsweredTaskConfig = field(default_factory=AnsweredTaskConfig)


def named_adapters(adapters: list[str]) -> tuple[list[str], dict[str, str]]:
    """`--adapters` of a server: folders that belong to the model, and `name=folder` that requests choose by name."""
    plain, named = [], {}
    for text in adapters:
        name, equals, folder = text.partition("=")
        if equals and name and "/" not in name:
            named[name] = folder
        else:
            plain.append(text)
    return plain, named
