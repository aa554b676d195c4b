"""A state that some layout wrote is read by any other, bit for bit; a process that can't write stops them all."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed.pool import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from swift.checkpoint.sharded import describe_sharded, is_sharded, load_sharded, save_sharded
from swift.checkpoint.store import begin_checkpoint, finish_checkpoint, verify
from swift.core.errors import CheckpointError
from swift.distributed.pieces import pieces_of

SHAPES = {
    "layers.0.q.weight": (8, 6),
    "layers.0.gate_up": (4, 8, 6),
    "layers.1.q.weight": (8, 6),
    "layers.1.norm.weight": (7,),
    "embed.weight": (13, 4),
    "optimizer.embed.weight.exp_avg": (13, 4),
    "optimizer.embed.weight.step": (),
}


def whole(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(name) + SHAPES[name].__len__())
    values = torch.randn(math.prod(SHAPES[name]), generator=generator).view(SHAPES[name])
    return values.bfloat16() if name == "layers.0.gate_up" else values


def placements(layout: str, name: str) -> list:
    """How a tensor lies on the mesh (fsdp, tp)."""
    tp = Replicate()
    if "q.weight" in name or "embed" in name:
        tp = Shard(0)
    if "gate_up" in name:
        tp = Shard(0) if "ep" in layout else _StridedShard(1, split_factor=2)
    if layout == "fsdp_tp":
        over = _StridedShard(0, split_factor=2) if isinstance(tp, Shard) and tp.dim == 0 else Shard(0)
        return [over, tp]
    return [Shard(0), Replicate()] if layout == "fsdp" else [Replicate(), tp]


def make(layout: str) -> dict[str, torch.Tensor]:
    """This process's part of the state, in zeros."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1
    names = list(SHAPES)
    if layout == "pp":
        names = [name for name in names if f"layers.{1 - rank}." not in name and (rank == 0 or "embed" not in name)]
    if layout in ("plain", "pp"):
        return {name: torch.zeros_like(whole(name)) for name in names}
    sizes = {"fsdp": (world, 1), "fsdp_tp": (world // 2, 2)}.get(layout, (1, world))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("fsdp", "tp"))
    state: dict[str, torch.Tensor] = {}
    for name in names:
        empty = torch.zeros_like(whole(name))
        state[name] = spread(empty, mesh, placements(layout, name)) if SHAPES[name] else empty
    return state


def spread(tensor: torch.Tensor, mesh, wanted: list) -> torch.Tensor:
    if all(isinstance(p, (Shard, Replicate)) for p in wanted):
        return distribute_tensor(tensor, mesh, wanted)
    local = tensor
    for axis in (1, 0):  # tensor parallelism cuts first, then sharding
        placement, count, index = wanted[axis], mesh.size(axis), mesh.get_coordinate()[axis]
        if isinstance(placement, Shard):
            local = local.chunk(count, placement.dim)[index]
        elif isinstance(placement, _StridedShard):
            parts = 1 if axis == 0 else placement.split_factor
            chunks = [part.chunk(count, placement.dim) for part in local.chunk(parts, placement.dim)]
            local = torch.cat([c[index] if index < len(c) else c[0][:0] for c in chunks], placement.dim)
    return DTensor.from_local(
        local.contiguous(), mesh, wanted, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def parts(state: dict[str, torch.Tensor]):
    for name, tensor in state.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for piece in pieces_of(tensor):
            box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))
            yield name, piece.view(local), whole(name)[box]


def read_check_write(layout: str, source: Path | None, target: Path) -> None:
    state = make(layout)
    if source is None:
        for _, mine, expected in parts(state):
            mine.copy_(expected)
    else:
        load_sharded(source, state)
    for name, mine, expected in parts(state):
        assert torch.equal(mine, expected), name
    if not dist.is_initialized() or dist.get_rank() == 0:
        target.mkdir()
    if dist.is_initialized():
        dist.barrier()
    save_sharded(target, state)


def test_any_layout_reads_any_other(tmp_path):
    source = None
    chain = [("fsdp_tp", 4), ("fsdp", 4), ("pp", 2), ("plain", 1), ("tp", 2), ("ep", 2), ("fsdp", 3), ("plain", 1)]
    for number, (layout, world) in enumerate(chain):
        target = tmp_path / f"{number}-{layout}"
        if world == 1:
            read_check_write(layout, source, target)
        else:
            on_ranks(world, read_check_write, layout, source, target)
        assert is_sharded(target)
        assert describe_sharded(target) == {name: (shape, whole(name).dtype) for name, shape in SHAPES.items()}
        source = target


def test_equal_parts_are_written_once(tmp_path):
    on_ranks(2, read_check_write, "pp", None, tmp_path / "pp")
    on_ranks(4, read_check_write, "fsdp_tp", None, tmp_path / "spread")
    for folder in ("pp", "spread"):
        stored = sum(path.stat().st_size for path in (tmp_path / folder).rglob("*.distcp"))
        assert stored < 2000 * len(SHAPES) * (4 if folder == "spread" else 1)
    state = {"w": torch.zeros(1 << 16)}
    on_ranks(2, write_same, tmp_path / "same")
    assert sum(path.stat().st_size for path in (tmp_path / "same").rglob("*.distcp")) < 1.1 * 4 * state["w"].numel()


def write_same(folder: Path) -> None:
    save_sharded(folder, {"w": torch.zeros(1 << 16)})


def test_other_shapes_and_missing_tensors_are_named(tmp_path):
    save_sharded(tmp_path, {"a": torch.zeros(3), "b": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"don't match this model: b, c"):
        load_sharded(tmp_path, {"a": torch.zeros(3), "b": torch.zeros(4), "c": torch.zeros(1)})
    (tmp_path / "spread_state" / ".metadata").write_bytes(b"")
    with pytest.raises(CheckpointError, match="can't read"):
        load_sharded(tmp_path, {"a": torch.zeros(3)})


def save_where_one_cannot(run_dir: Path) -> tuple[str, bool]:
    folder = run_dir / "x"
    if dist.get_rank() == 0:
        (folder / "spread_state").mkdir(parents=True)
        (folder / "spread_state" / "__1_0.distcp").mkdir()  # rank 1 can't open its file
    dist.barrier()
    try:
        save_sharded(folder, make("fsdp"))
    except CheckpointError as error:
        return error.message, is_sharded(folder)
    return "saved", True


def test_a_rank_that_cannot_write_stops_all(tmp_path):
    for message, left in on_ranks(2, save_where_one_cannot, tmp_path):
        assert message.startswith("rank 1: could not write"), message
        assert not left


def write_checkpoint(run_dir: Path) -> None:
    aside = begin_checkpoint(run_dir, 3) if dist.get_rank() == 0 else run_dir / ".checkpoint-3.writing"
    dist.barrier()
    files: list = [None] * dist.get_world_size()
    dist.all_gather_object(files, save_sharded(aside, make("fsdp")))
    if dist.get_rank() == 0:
        finish_checkpoint(aside, {name: entry for one in files for name, entry in one.items()})


def test_the_manifest_covers_the_files_of_all_ranks(tmp_path):
    on_ranks(2, write_checkpoint, tmp_path)
    folder = tmp_path / "checkpoint-3"
    verify(folder)
    file = folder / "spread_state" / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp was changed"):
        verify(folder)


def test_a_file_that_cannot_be_seen_is_told(tmp_path):
    aside = begin_checkpoint(tmp_path, 1)
    with pytest.raises(CheckpointError, match="which another process wrote") as caught:
        finish_checkpoint(aside, {"spread_state/__1_0.distcp": {"bytes": 5, "crc32": 1}})
    assert "--output_dir" in (caught.value.fix or "")
