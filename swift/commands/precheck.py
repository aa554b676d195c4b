"""All that can be found wrong with a request before torch is imported: the settings, the model's files, the data's.

Every room that reads files checks their names itself, without loading anything; here the answers are collected, so
that a user sees all faults at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from swift.config.checks import find_problems
from swift.config.cluster import read_cluster
from swift.config.commands import AppConfig, DeployConfig, MergeLoraConfig
from swift.config.data import DataConfig, RowsConfig
from swift.config.degrees import degree_problems, needs_shape, read_model_shape
from swift.config.nodes import find_nodes, world_size_expected
from swift.config.resolve import Problem, raise_problems
from swift.config.sample import SampleConfig
from swift.config.serving import named_adapters
from swift.core.errors import SwiftError, nearest
from swift.core.extras import check_installed
from swift.core.network import follow_flags
from swift.data.rows import TRAIN, VALIDATION
from swift.data.sources import parse_source, resolve_rows, resolve_sources
from swift.models.gguf import find_gguf
from swift.models.hub import check_model_source, is_adapter_folder
from swift.models.openvino import find_openvino


def precheck(config: Any, *, places: Mapping[str, str] | None = None) -> None:
    """Check a command's configuration, its model, adapters and data files.

    Args:
        config: the configuration of any command.
        places: where settings were given, for messages.

    Raises:
        UsageError: naming all faults at once.
        DependencyError: a package that the settings need isn't installed.
    """
    where = places or {}
    follow_flags(offline=config.model.offline, use_hf=config.model.use_hf)
    problems = find_problems(config, places=where)
    folders = config.model.adapters
    if isinstance(config, DeployConfig):
        own, by_name = named_adapters(folders)
        folders = [*own, *by_name.values()]
    adapters = [_at(where, "adapters", fault) for name in folders if (fault := _adapter_fault(name))]
    problems += adapters
    dry = hasattr(config, "parallelism") and config.parallelism.dry_run  # needs config.json only, and no rows
    missing_adapter = isinstance(config, MergeLoraConfig) and not config.model.adapters
    named = config.model.model or not (adapters or missing_adapter)  # without a model, an adapter names its own
    elsewhere = isinstance(config, AppConfig) and (config.page.base_url or config.page.share)  # no model is needed
    elsewhere = elsewhere or (isinstance(config, DeployConfig) and bool(config.scale.replica_urls))
    elsewhere = elsewhere or (
        isinstance(config, SampleConfig) and bool(config.sample.sampler_url or config.sample.samples_file)
    )
    if named and not dry and not elsewhere:
        problems += _raised(where, "model", _check_of(config), config.model)
    if hasattr(config, "data") and not dry:
        problems += _data_faults(where, config.data)
    if "RANK" not in os.environ and (hasattr(config, "training") or hasattr(config, "infer")):
        problems += _raised(where, "nnodes", partial(find_nodes, environ=os.environ), config)
    if hasattr(config, "parallelism") and config.parallelism.cluster_file:
        problems += _raised(where, "cluster_file", read_cluster, config.parallelism.cluster_file)
    if hasattr(config, "parallelism") and not problems:
        problems += _size_faults(where, config)
    raise_problems(problems, subject="the request")
    if hasattr(config, "parallelism") and config.parallelism.deepspeed:
        check_installed("deepspeed", extra="deepspeed", purpose="train with --deepspeed")


def _size_faults(places: Mapping[str, str], config: Any) -> list[Problem]:
    """What is impossible about the sizes of parallelism, as far as model and number of processes are known.

    A hub's model is known once it is downloaded. Launchers of several machines don't know how many processes the others
    start: the processes themselves do, and come here too.
    """
    folder = Path(config.model.model or "").expanduser()
    shape = None
    if needs_shape(config.parallelism) and config.model.model and (folder / "config.json").is_file():
        try:
            shape = read_model_shape(folder)
        except SwiftError as error:
            return [_at(places, "model", Problem(error.message, error.where, error.fix))]
    if config.parallelism.parallel == "auto" or ("RANK" not in os.environ and find_nodes(config, os.environ).count > 1):
        return []
    world_size = world_size_expected(config, os.environ)
    return [
        Problem(problem.message, _places(places, problem.where), problem.fix)
        for problem in degree_problems(config.parallelism, world_size, shape)
    ]


def _places(places: Mapping[str, str], where: str | None) -> str | None:
    """The flags' places in a file, for those that came from one."""
    names = [name.removeprefix("--") for name in (where or "").split(" and ")]
    return " and ".join(places.get(name, f"--{name}") for name in names)


def _check_of(config: Any) -> Callable[[Any], Any]:
    """What looks at the model's files: engines of other projects read other ones."""
    engine = getattr(config, "engine", None)
    if engine is not None and engine.infer_backend == "llamacpp" and not engine.engine_url:
        return find_gguf
    return find_openvino if engine is not None and engine.infer_backend == "openvino" else check_model_source


def _data_faults(places: Mapping[str, str], data: RowsConfig) -> list[Problem]:
    """Every dataset argument that can't be meant; if there is none, what is wrong with them as a whole."""
    problems = [
        problem
        for setting in ("dataset", "val_dataset")
        for text in getattr(data, setting)
        for problem in _raised(places, setting, partial(parse_source, fetch=False), text)
    ]
    if problems or max(len(data.model_name), len(data.model_author)) > 2:  # the settings' own check has said so
        return problems
    if isinstance(data, DataConfig) and (data.cached_dataset or data.cached_val_dataset):
        from swift.data.token_files.cached import locate_cached  # maps arrays: a tenth of a second of NumPy

        for setting, split in (("cached_dataset", TRAIN), ("cached_val_dataset", VALIDATION)):
            for text in getattr(data, setting):
                problems += _raised(places, setting, partial(locate_cached, split=split, flag=f"--{setting}"), text)
        if problems:
            return problems
    if isinstance(data, DataConfig) and (data.dataset or data.cached_dataset):
        return _raised(places, "dataset", partial(resolve_sources, fetch=False), data)
    return _raised(places, "dataset", partial(resolve_rows, fetch=False), data)


def _raised(places: Mapping[str, str], setting: str, ask: Any, subject: Any) -> list[Problem]:
    try:
        ask(subject)
    except SwiftError as error:
        return [_at(places, setting, Problem(error.message, error.where, error.fix))]
    return []


def _at(places: Mapping[str, str], setting: str, fault: Problem) -> Problem:
    """The fault with the place in a file, when the setting came from one."""
    place = places.get(setting, f"--{setting}")
    where = fault.where or place
    return Problem(
        fault.message, where if place.startswith("--") or place == where else f"{place} ({where})", fault.fix
    )


def _adapter_fault(name: str) -> Problem | None:
    folder = Path(name).expanduser()
    if folder.is_dir() and is_adapter_folder(folder):
        return None
    if not folder.is_dir():
        parent = folder.parent
        close = nearest(folder.name, [p.name for p in parent.iterdir()]) if parent.is_dir() else []
        fix = f"did you mean {parent / close[0]}?" if close else "check the path"
        return Problem(f"there is no adapter folder {folder}", "--adapters", fix)
    inside = sorted(folder.glob("**/adapter_config.json"), key=lambda p: p.stat().st_mtime)
    fix = f"its newest: --adapters {inside[-1].parent}" if inside else "point at a folder with adapter_config.json"
    if (folder / "config.json").is_file():
        fix = f"this is a whole model: --model {folder}"
    return Problem(f"{folder} is not an adapter folder (it has no adapter_config.json)", "--adapters", fix)
