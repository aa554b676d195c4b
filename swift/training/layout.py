"""How the processes of a run share the work: the sizes of the axes, settled once the model's shape is known."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from swift.config.auto_parallel import choose
from swift.config.cluster import read_cluster
from swift.config.commands import TrainConfig
from swift.config.degrees import Degrees, needs_shape, read_model_shape, resolve_degrees
from swift.config.parallel import ParallelConfig
from swift.core.devices import Device
from swift.distributed import ProcessGroup
from swift.distributed.handshake import node_names
from swift.distributed.placement import place_ranks, placement_table
from swift.models.loading import resolve_model


@dataclass(frozen=True)
class Layout:
    """What was settled.

    Attributes:
        parallelism: the settings in effect: the user's, or what `--parallel auto` chose.
        degrees: the sizes of all axes.
        table: which ranks share what, for the user; empty for plain copies.
        notes: what was decided, and what could be better.
    """

    parallelism: ParallelConfig = field(default_factory=ParallelConfig)
    degrees: Degrees = field(default_factory=Degrees)
    table: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def spread(self) -> bool:
        """Whether the model itself is spread, so that no process holds all of it in one piece."""
        sizes = self.degrees
        return self.parallelism.fsdp != "none" or max(sizes.tp, sizes.pp, sizes.cp, sizes.ep) > 1

    def words(self) -> str:
        """How the model lies on the processes, such as `pp 2 x dp_shard 2, fsdp2`; empty for plain copies."""
        if not self.spread:
            return ""
        settings = self.parallelism
        ways = [f"{settings.fsdp} (stage {settings.zero_stage})"] if settings.fsdp != "none" else []
        ways += ["sequence-parallel norms"] if settings.sequence_parallel else []
        ways += [f"{settings.pipeline_schedule} pipeline"] if self.degrees.pp > 1 else []
        return ", ".join([self.degrees.words(), *ways])


def settle_layout(config: TrainConfig, group: ProcessGroup, device: Device) -> Layout:
    """Work out the sizes of the axes; every rank calls it and gets the same.

    Raises:
        UsageError: what is asked for is impossible with this model and this number of processes.
    """
    parallelism = config.parallelism
    shape = None
    if needs_shape(parallelism):
        shape = group.from_main(lambda: read_model_shape(resolve_model(config.model)))
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", str(group.world_size)))
    notes: list[str] = []
    if parallelism.parallel == "auto" and shape is not None:
        share = device.memory_bytes // (per_node if device.type == "cpu" else 1)
        tokens = config.template.max_length * config.training.per_device_train_batch_size
        parallelism, reasons = choose(config, shape, group.world_size, per_node, min(group.gather(share)), tokens)
        notes = [f"parallel auto: {reason}" for reason in reasons]
    degrees = resolve_degrees(parallelism, group.world_size, shape, ranks_per_node=per_node)
    cluster = read_cluster(parallelism.cluster_file) if parallelism.cluster_file else None
    layout = Layout(parallelism, degrees, "", notes)
    if layout.spread and group.members:
        placement = place_ranks(degrees, node_names(group.members), cluster)
        layout = Layout(parallelism, degrees, placement_table(placement), [*notes, *placement.notes])
    return layout
