"""`swift deploy`: serve a model over HTTP, as OpenAI's clients expect it.

Checks everything that is cheap, takes the port, and listens; the model is loaded while the server already says that it
isn't ready.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.commands.precheck import precheck
from swift.commands.replicas import route
from swift.config import DeployConfig, InferConfig, build_config
from swift.config.inference import GenerationConfig, InferRunConfig
from swift.config.serving import named_adapters
from swift.core.errors import UsageError
from swift.core.extras import check_installed
from swift.core.logging import get_logger, rank

if TYPE_CHECKING:
    from swift.inference.loading import Prepared
    from swift.inference.requests import SamplingParams
    from swift.serving.lifecycle import LiveServer
    from swift.serving.served import ServedModel

log = get_logger("deploy")


def deploy(config: DeployConfig | None = None, **flags: Any) -> None:
    """Serve a model until a signal comes.

    Args:
        config: the whole configuration; or give settings by name: `deploy(model="smollm2", port=8000)`.

    Raises:
        SwiftError: with what was wrong, where, and what to do.
    """
    config = build_config(DeployConfig, flags) if config is None else config
    if config.scale.routed:
        route(config)
    else:
        make_server(config).run()


def make_server(config: DeployConfig) -> LiveServer:
    """A server that listens, with everything but the weights.

    Raises:
        SwiftError: settings that can't be meant, a port that is taken, a package that is missing.
    """
    precheck(config)
    for module in ("fastapi", "uvicorn", "httptools"):
        check_installed(module, extra="serve", purpose="serve a model")
    from swift.serving.lifecycle import LiveServer, check_tls, listen
    from swift.serving.limits import read_keys

    check_tls(config.serve)
    read_keys(config.serve)
    plain, named = named_adapters(config.model.adapters)
    if named and config.serve.merge_lora:
        raise UsageError(
            "an adapter that requests choose can't be merged",
            where="--merge_lora",
            fix="leave it out, or give the adapter without a name",
        )
    listener = listen(config.serve)
    return LiveServer(config.serve, listener, lambda: load_models(config, plain, named))


def load_models(config: DeployConfig, plain: list[str], named: dict[str, str]) -> list[ServedModel]:
    """The model under each of its names, then the adapters under theirs.

    Args:
        plain: adapter folders that belong to the model.
        named: adapter folders by the name that requests use.
    """
    from swift.inference.loading import prepare
    from swift.serving.limits import Queue
    from swift.serving.scores import ScoringQueue
    from swift.serving.served import ServedModel, Talker

    ready = replace(config.engine, enable_lora=config.engine.enable_lora or bool(named))
    prepared = prepare(_as_infer(replace(config, engine=ready), plain))
    names = config.serve.served_model_name or [_usual_name(config, plain)]
    if doubled := [name for name in dict.fromkeys([*names, *named]) if [*names, *named].count(name) > 1]:
        raise UsageError(f"two models can't both be called {doubled[0]}", where="--served_model_name")
    root = Path(config.model.model or prepared.base).name
    queue = Queue(config.engine.max_batch_size, config.serve.max_queue)
    if prepared.judge is not None:
        if named:
            raise UsageError(f"a model for {prepared.judge.name} has no adapters by name", where="--adapters")
        scorer = ScoringQueue(prepared.load_scorer(), prepared.judge.name, prepared.tokenizer, queue)
        return [ServedModel(name, scorer=scorer, root=root) for name in names]
    engine = prepared.load()
    talker = Talker(engine.backend, prepared.tokenizer, engine.encoder, _defaults(config, prepared), queue)
    models = [ServedModel(name, talker, root=root) for name in names]
    for name, folder in named.items():
        engine.backend.load_adapter(name, Path(folder).expanduser())
        models.append(ServedModel(name, talker, adapter=name, parent=names[0], root=root))
    for notice in engine.encoder.notices:
        log.info(notice)
    return models


def _as_infer(config: DeployConfig, adapters: list[str]) -> InferConfig:
    """The settings that say which model it is and how it is run, as `swift infer` has them."""

    return InferConfig(
        model=replace(config.model, adapters=adapters),
        template=config.template,
        engine=config.engine,
        infer=InferRunConfig(
            device=config.serve.device, merge_lora=config.serve.merge_lora, load_args=config.serve.load_args
        ),
        task=config.task,
    )


def _defaults(config: DeployConfig, prepared: Prepared) -> SamplingParams:
    """How answers are generated where a request says nothing: these settings, else the model's own."""

    from swift.inference.sampling import resolve_sampling

    params = resolve_sampling(GenerationConfig(**vars(config.generation)), prepared.model_settings())
    return replace(params, max_new_tokens=config.generation.max_new_tokens)


def _usual_name(config: DeployConfig, plain: list[str]) -> str:
    """The name of the folder or hub id; of an adapter, its checkpoint's and its run's."""
    if plain:
        folder = Path(plain[0]).expanduser().resolve()
        return folder.name if not folder.name.startswith("checkpoint-") else f"{folder.parent.name}/{folder.name}"
    return Path(config.model.model or "model").name


def main(config: DeployConfig) -> int:
    """The command. Returns the exit code."""
    if rank() > 0:
        _follow(config)
        return 0
    if config.scale.routed:
        route(config)
        return 0
    server = make_server(config)
    server.run()
    from swift.serving.lifecycle import end_if_loading

    end_if_loading(server)
    return 0


def _follow(config: DeployConfig) -> None:
    """One of the further processes of a model that is spread over several."""
    from swift.inference.backends.choose import follow
    from swift.inference.loading import prepare

    for number in (signal.SIGINT, signal.SIGTERM):  # the first process lets running answers end, and then this one
        signal.signal(number, signal.SIG_IGN)
    plain, _ = named_adapters(config.model.adapters)
    follow(prepare(_as_infer(config, plain)))
