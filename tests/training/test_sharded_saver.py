"""Checkpoints of spread runs: any layout goes on where any other stopped, and the public part is for everyone."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from distributed.equality import build
from distributed.pool import on_ranks
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from swift.checkpoint import list_checkpoints, verify
from swift.checkpoint.state import RunState
from swift.config.model import ModelConfig
from swift.core.errors import SwiftError
from swift.distributed.pieces import pieces_of
from swift.distributed.process_group import ProcessGroup
from swift.models.adapters import Swift
from swift.models.gathered import write_adapter, write_model
from swift.models.loading import load_model
from swift.optim.local import local_parameters
from swift.training.sharded_saver import ShardedSaver

CUTS = {
    "q_proj.weight": Shard(0),
    "q_proj.base_layer.weight": Shard(0),
    "o_proj.weight": Shard(1),
    "gate_up_proj": _StridedShard(1, split_factor=2),
}


class Run:
    """A tiny model in some layout with a stepped optimizer, and what a saver needs of a trainer."""

    def __init__(self, kind: str, tuner: str, layout: str, run_dir: Path, **options) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        world = dist.get_world_size() if dist.is_initialized() else 1
        self.group = ProcessGroup(rank, world, rank)
        tiny = build(kind, tuner)
        self.whole, self.causal_lm = tiny.whole, tiny.causal_lm
        self.aliases = spread(tiny.whole, tiny.causal_lm, layout, rank, world)
        self.local = local_parameters(self.whole.named_parameters())
        groups = [{"params": [p], "names": [n], "lr": 1e-2} for n, p in self.local.named()]
        self.optimizer = torch.optim.AdamW(groups, eps=1e-6)
        public = options.pop("public", self.write_public)
        self.saver = ShardedSaver(
            self.local, [self.whole], run_dir, public, lambda folder: None, False, self.aliases, **options
        )
        self.trainer = SimpleNamespace(
            parts=SimpleNamespace(
                group=self.group,
                optimizer=self.optimizer,
                monitor=SimpleNamespace(event=lambda *a, **k: None),
                loader=SimpleNamespace(state=lambda: {"position": 3}, global_units=4),
                length=SimpleNamespace(total_steps=10),
                rank_states={},
            ),
            state=RunState(step=2),
            scaler=None,
            status="running",
            device=torch.device("cpu"),
        )

    def write_public(self, folder: Path) -> None:
        if self.whole is self.causal_lm:
            write_model([self.causal_lm], folder, self.group, dtype=torch.float32, max_file_bytes=60_000)
        else:
            write_adapter([self.whole], folder, self.group)

    def step(self) -> None:
        for (name, part), (_, whole) in zip(self.local.named(), self.local.named_whole(), strict=True):
            part.grad = torch.zeros_like(part)
            for mine, full in parts(whole, gradient(self.aliases.get(name, name), whole), part.grad):
                mine.copy_(full)
        self.optimizer.step()

    def assert_equals(self, other: "Run") -> None:
        """This layout's parts of weights and optimizer are those of a whole run, to the last bit."""
        theirs = {n: (p, other.optimizer.state[p]) for n, p in other.local.named()}
        for (name, part), (_, whole) in zip(self.local.named(), self.local.named_whole(), strict=True):
            expected, state = theirs[self.aliases.get(name, name)]
            for mine, full in parts(whole, expected.detach(), part.detach()):
                assert torch.equal(mine, full), name
            assert self.optimizer.state[part].keys() == state.keys()
            for key, value in state.items():
                own = self.optimizer.state[part][key]
                for mine, full in parts(whole, value, own) if value.ndim else [(own, value)]:
                    assert torch.equal(mine, full), (name, key)


def parts(whole: torch.Tensor, full: torch.Tensor, local: torch.Tensor):
    for piece in pieces_of(whole):
        yield piece.view(local), full[tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))]


def gradient(name: str, like: torch.Tensor) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(len(name) + like.numel()))


def spread(whole: nn.Module, causal_lm: nn.Module, layout: str, rank: int, world: int) -> dict[str, str]:
    if layout == "plain":
        return {}
    if layout == "pp":
        for number in range(4):
            if number // 2 != rank:
                causal_lm.model.layers[number] = nn.Identity()
        if rank == 0:
            causal_lm.lm_head = causal_lm.model.norm = nn.Identity()
            return {}
        causal_lm.model.embed_tokens = nn.Identity()
        tied = causal_lm.config.tie_word_embeddings and whole is causal_lm
        return {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
    tp = 2 if "tp" in layout else 1
    grid = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("fsdp", "tp"))
    if tp > 1:
        for part in causal_lm.modules():
            for name, parameter in list(part._parameters.items()):
                full = next((n for n, p in causal_lm.named_parameters() if p is parameter), "")
                cut = next((p for ending, p in CUTS.items() if full.endswith(ending)), None)
                if cut is not None and parameter is not None:
                    new = nn.Parameter(distribute_tensor(parameter.data, grid["tp"], [cut]))
                    part._parameters[name] = new.requires_grad_(parameter.requires_grad)
    if "fsdp" in layout:
        for layer in causal_lm.model.layers:
            fully_shard(layer, mesh=grid["fsdp"])
        fully_shard(whole, mesh=grid["fsdp"])
    return {}


def stepped(kind: str, tuner: str, layout: str, run_dir: Path) -> Run:
    run = Run(kind, tuner, layout, run_dir)
    run.step()
    run.step()
    return run


def save(kind: str, tuner: str, layout: str, run_dir: Path) -> None:
    run = stepped(kind, tuner, layout, run_dir)
    run.saver.save(run.trainer)


def resume_and_save(kind: str, tuner: str, layout: str, source: Path, run_dir: Path) -> None:
    run = Run(kind, tuner, layout, run_dir)
    with torch.no_grad():
        for _, part in run.local.named():
            part.zero_()
    run.trainer.state = RunState.read(source)
    run.saver.load_trained(source)
    run.saver.resume(source, run.trainer)
    reference = stepped(kind, tuner, "plain", run_dir)
    run.assert_equals(reference)
    run.step()
    reference.step()
    run.assert_equals(reference)
    again = stepped(kind, tuner, layout, run_dir)
    again.saver.save(again.trainer)


class OwnNumber:
    """Something that each rank remembers for itself."""

    without_it = "it counts from nought"

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def save_and_resume_own(run_dir: Path) -> tuple[int, int, list[str]]:
    run = stepped("tied", "full", "fsdp", run_dir)
    run.trainer.parts.rank_states = {"number": OwnNumber(7 + run.group.rank)}
    run.saver.save(run.trainer)
    again, said = Run("tied", "full", "fsdp", run_dir), []
    again.trainer.parts.monitor.event = lambda kind, words, **more: said.append(words)
    again.trainer.parts.rank_states = {"number": OwnNumber(), "another": OwnNumber()}
    again.trainer.state = RunState.read(run_dir / "checkpoint-2")
    again.saver.resume(run_dir / "checkpoint-2", again.trainer)
    states = again.trainer.parts.rank_states
    return states["number"].value, states["another"].value, said


def test_what_each_rank_remembers_comes_back(tmp_path):
    missing = "the checkpoint has no state of another: it counts from nought"
    assert on_ranks(2, save_and_resume_own, tmp_path) == [(7, 0, [missing]), (8, 0, [missing])]
    verify(tmp_path / "checkpoint-2")


CHAIN = [("fsdp_tp", 4), ("fsdp", 4), ("pp", 2), ("plain", 1), ("tp", 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tuner"), [("tied", "full"), ("moe", "full"), ("qk_norm", "lora")])
def test_any_layout_resumes_any_other(kind, tuner, tmp_path):
    source = None
    for number, (layout, world) in enumerate(CHAIN):
        run_dir = tmp_path / str(number)
        arguments = (save, kind, tuner, layout, run_dir)
        if source is not None:
            arguments = (resume_and_save, kind, tuner, layout, source, run_dir)
        if world == 1:
            arguments[0](*arguments[1:])
        else:
            on_ranks(world, *arguments)
        source = run_dir / "checkpoint-2"
        verify(source)
        check_public(kind, tuner, source)


def check_public(kind: str, tuner: str, folder: Path) -> None:
    reference = stepped(kind, tuner, "plain", folder.parent / "reference")
    if tuner == "full":
        assert (folder / "model.safetensors.index.json").is_file()
        if kind == "moe":
            names = {n for file in folder.glob("*.safetensors") for n in load_file(file)}
            assert "model.layers.0.mlp.experts.0.gate_proj.weight" in names
        loaded = load_model(folder, ModelConfig(model=str(folder)), dtype=torch.float32)
        ours, theirs = dict(loaded.named_parameters()), dict(reference.whole.named_parameters())
    else:
        ours = dict(Swift.from_pretrained(build(kind).causal_lm, folder).named_parameters())
        theirs = {n: p for n, p in reference.whole.named_parameters() if "lora_" in n}
        ours = {n: p for n, p in ours.items() if "lora_" in n}
    assert ours.keys() == theirs.keys()
    for name, parameter in theirs.items():
        assert torch.equal(ours[name], parameter), name


def save_where_one_fails(run_dir: Path, failing: int) -> str:
    run = stepped("untied", "full", "fsdp", run_dir)
    run.saver.save(run.trainer)
    run.trainer.state.step = 3
    if failing == 0:  # rank 0's own writing

        def public(folder: Path) -> None:
            if dist.get_rank() == 0:
                raise OSError(28, "No space left on device")

        run.saver.write_public = public
    else:

        def public(folder: Path) -> None:
            if dist.get_rank() == 0:
                (folder / "spread_state" / "__1_0.distcp").mkdir(parents=True)

        run.saver.write_public = public
    try:
        run.saver.save(run.trainer)
    except SwiftError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_rank_reaches_all_and_leaves_nothing(failing, tmp_path):
    for told in on_ranks(2, save_where_one_fails, tmp_path, failing):
        assert "could not write" in told or "No space left" in told, told
    assert [c.step for c in list_checkpoints(tmp_path)] == [2]
    verify(tmp_path / "checkpoint-2")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


def save_three(run_dir: Path) -> list[str]:
    run = Run("untied", "lora", "fsdp", run_dir, keep=1, only_model=True, links=True)
    run.step()
    for step in (2, 4, 6):
        run.trainer.state.step = step
        run.trainer.status = "interrupted" if step == 6 else "running"
        if step == 2:
            run.trainer.state.best_step = 2
        run.saver.save(run.trainer)
        run.step()
    before = {n: p.detach().clone() for n, p in run.local.named()}
    run.saver.load_public = lambda folder: [p.data.zero_() for _, p in run.local.named()]
    run.saver.load_best(run.trainer)
    assert all(not torch.equal(before[n], p) for n, p in run.local.named() if p.numel())
    return sorted(path.name for path in run_dir.iterdir())


def test_limits_links_and_weights_only(tmp_path):
    for names in on_ranks(2, save_three, tmp_path):
        assert names == ["best", "checkpoint-2", "checkpoint-6", "last"]
    assert not (tmp_path / "checkpoint-2" / "spread_state").exists()
    assert (tmp_path / "checkpoint-6" / "spread_state" / ".metadata").is_file()
