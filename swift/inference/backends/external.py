"""Engines of other projects by their names in `--infer_backend`.

None of them is driven yet: each is refused by name, with the way to use it that works.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from swift.core.errors import UsageError

if TYPE_CHECKING:
    from swift.inference.loading import Prepared

_OWN_SERVERS = {
    "vllm": "vllm serve FOLDER",
    "sglang": "python -m sglang.launch_server --model-path FOLDER",
    "lmdeploy": "lmdeploy serve api_server FOLDER",
    "llamacpp": "llama-server -m FILE.gguf",
}


def external(prepared: Prepared) -> NoReturn:
    """The engine that `--infer_backend` names.

    Raises:
        UsageError: always, until one of them is driven from here.
    """
    name = prepared.config.engine.infer_backend
    if name == "auto":  # chosen where vLLM is installed and there is a GPU
        name = "vllm"
    own = f", or run the model by `{_OWN_SERVERS[name]}` in its own environment" if name in _OWN_SERVERS else ""
    raise UsageError(
        f"swift doesn't drive {name} yet",
        where=f"--infer_backend {name}",
        fix=f"--infer_backend swift or transformers{own}",
    )
