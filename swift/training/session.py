"""The surroundings of a run: processes, device, seeds, the checkpoint it continues, its folder, its monitor."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from swift.checkpoint import Checkpoint, RunLock, RunState, clear, find_checkpoint, list_checkpoints, remove_unfinished
from swift.config.cluster import read_cluster
from swift.config.commands import TrainConfig
from swift.config.files import to_flat
from swift.core.devices import Device, detect_device
from swift.core.errors import UsageError
from swift.core.files import disk_errors
from swift.core.logging import local_rank
from swift.distributed import ProcessGroup, start_process_group
from swift.distributed.handshake import shared_settings
from swift.distributed.mesh import Mesh, build_mesh
from swift.distributed.shared import check_shared_folder
from swift.models.prepare import seed_everything
from swift.monitor import Monitor, build_monitor
from swift.training.layout import Layout, settle_layout
from swift.training.method import Method
from swift.training.plan import run_folder
from swift.training.precision import Precision, choose_precision


@dataclass
class Session:
    """What every part of a run needs to know of its surroundings.

    Attributes:
        method: what the run trains for.
        layout: how the processes share the work; mesh: their groups along each axis.
        resumed: the checkpoint that is continued (or whose weights are taken), if any.
        ask_thinking: how every row was asked, if the template can think and all were asked alike; inference then asks
            the same way.
        locks: held on the run folder; at_close: what rank 0 does when the run is over.
        notes: what was decided on the user's behalf; shown when the run starts.
    """

    method: Method
    group: ProcessGroup
    layout: Layout
    mesh: Mesh
    device: Device
    precision: Precision
    run_dir: Path
    monitor: Monitor
    resumed: Checkpoint | None
    state: RunState
    notes: list[str] = field(default_factory=list)
    ask_thinking: bool | None = None
    locks: list[RunLock] = field(default_factory=list)
    at_close: list[Callable[[], None]] = field(default_factory=list)

    @property
    def command(self) -> str:
        """The command's name, for messages."""
        return self.method.command

    @property
    def continues(self) -> bool:
        """Whether steps and data go on from the checkpoint (and not only its weights are taken)."""
        return self.state.step > 0

    def close(self) -> None:
        try:
            self.monitor.close()
        finally:
            self.group.close()
            for clean_up in self.at_close if self.group.main else []:
                clean_up()
            for lock in self.locks:
                lock.close()


def model_label(config: TrainConfig) -> str:
    """A short name for folders and headers."""
    return Path(config.model.model or "model").name


def start_session(config: TrainConfig, method: Method) -> Session:
    """Join the process group, choose device and precision, find what to resume, make the run folder."""
    device = detect_device(local_rank())
    precision, notes = choose_precision(config.model.torch_dtype, device)
    precision = replace(precision, managed=bool(config.parallelism.deepspeed))
    group = start_process_group(
        device.type,
        join_timeout_s=config.parallelism.join_timeout_s,
        settings=shared_settings(to_flat(config)),
        cluster=read_cluster(config.parallelism.cluster_file) if config.parallelism.cluster_file else None,
    )
    if config.training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    seed_everything(config.training.seed)
    locks: list[RunLock] = []
    try:
        resumed, state, run_dir = group.from_main(lambda: _open_run(config, locks))
        check_shared_folder(group, run_dir)
        layout = settle_layout(config, group, device)
        mesh = build_mesh(layout.degrees, device.type)
        monitor = build_monitor(config.monitor, run_dir, rank=group.rank)
    except BaseException:  # a later call in this process may want the folder
        for lock in locks:
            lock.close()
        group.close()
        raise
    if state.step:
        monitor.resume_at(state.step)
    notes += [*layout.notes, *method.notes]
    return Session(method, group, layout, mesh, device, precision, run_dir, monitor, resumed, state, notes, locks=locks)


def _open_run(config: TrainConfig, locks: list[RunLock]) -> tuple[Checkpoint | None, RunState, Path]:
    """Find what is continued and take the run's folder; `locks` gets the lock on it."""
    label = model_label(config)
    resumed, state = None, RunState()
    if config.training.resume_from_checkpoint:
        root = Path(config.checkpoint.output_dir or Path("output") / label)
        resumed = find_checkpoint(config.training.resume_from_checkpoint, root)
        if not config.training.resume_only_model:
            state = RunState.read(resumed.path)
    continued = resumed.path.parent if resumed is not None and state.step else None
    run_dir = run_folder(config, label, continued)
    with disk_errors(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
    locks.append(RunLock(run_dir))
    remove_unfinished(run_dir)
    if not state.step and list_checkpoints(run_dir):
        if not config.checkpoint.overwrite_output_dir:
            raise UsageError(
                "the folder holds checkpoints of another run",
                where=str(run_dir),
                fix="continue it with --resume_from_checkpoint latest, choose another --output_dir, "
                "or replace it with --overwrite_output_dir true",
            )
        if resumed is not None and resumed.path.parent.resolve() == run_dir.resolve():
            raise UsageError(
                "the checkpoint whose weights are taken lies in the folder that is to be overwritten",
                where=str(resumed.path),
                fix="choose another --output_dir",
            )
        clear(run_dir)
    return resumed, state, run_dir
