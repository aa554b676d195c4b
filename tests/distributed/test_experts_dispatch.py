"""Tokens that travel to their experts give what they give at home, however unevenly they choose."""

import pytest
import torch
from pool import on_ranks

from swift.config.degrees import Degrees
from swift.distributed.experts.dispatch import through_experts
from swift.distributed.mesh import build_mesh
from swift.distributed.traffic import TRAFFIC

EXPERTS, HIDDEN, SLOTS = 8, 6, 2


def weights_of_experts() -> torch.Tensor:
    return torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def tokens_of(rank: int, world: int, case: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, chosen experts, weights; different on each rank, also in number."""
    generator = torch.Generator().manual_seed(10 + rank)
    count = {"empty rank": 0 if rank == 0 else 5, "nobody": 0}.get(case, 4 + 3 * rank)
    hidden = torch.randn(count, HIDDEN, generator=generator, dtype=torch.float64)
    weights = torch.rand(count, SLOTS, generator=generator, dtype=torch.float64)
    if case == "one expert":
        chosen = torch.full((count, SLOTS), EXPERTS - 1)
    elif case == "one rank":  # ranks above 0 get no row
        chosen = torch.stack([torch.randperm(EXPERTS // world, generator=generator)[:SLOTS] for _ in range(count)])
    else:
        rows = [torch.randperm(EXPERTS, generator=generator)[:SLOTS] for _ in range(count)]
        chosen = torch.stack(rows) if rows else torch.empty(0, SLOTS, dtype=torch.int64)
    return hidden, chosen, weights


def at_home(hidden, chosen, weights, matrices):
    """Each token through its experts, one process, no sorting."""
    rows = torch.einsum("nh,nkoh->nko", hidden, matrices[chosen])
    return (rows * weights[..., None]).sum(1)


def run_case(case: str, world: int):
    mesh = build_mesh(Degrees(dp_shard=world, ep=world), "cpu")
    axis = mesh["ep"]
    local = EXPERTS // world
    mine = weights_of_experts()[axis.rank * local : (axis.rank + 1) * local].clone().requires_grad_()
    hidden, chosen, weights = tokens_of(axis.rank, world, case)
    hidden.requires_grad_(), weights.requires_grad_()
    seen = []

    def compute(rows, numbers, ones):
        seen.append((len(rows), numbers.flatten().tolist()))
        return torch.einsum("nh,noh->no", rows, mine[numbers.flatten()]) * ones

    TRAFFIC.reset()
    out = through_experts(hidden, chosen, weights, axis, local, compute)
    forward = dict(TRAFFIC.calls)
    out.sin().sum().backward()
    return (
        out.detach(),
        hidden.grad,
        weights.grad,
        mine.grad,
        seen,
        forward,
        dict(TRAFFIC.calls),
        dict(TRAFFIC.bytes),
    )


@pytest.mark.parametrize(
    ("case", "world"),
    [("mixed", 2), ("mixed", 4), ("one expert", 2), ("one rank", 2), ("empty rank", 2), ("nobody", 2)],
)
def test_every_token_meets_its_experts(case, world):
    results = on_ranks(world, run_case, case, world)
    matrices = weights_of_experts().requires_grad_()
    rows_sent_away = [0] * world
    for rank, (out, hidden_grad, weights_grad, *_) in enumerate(results):
        hidden, chosen, weights = tokens_of(rank, world, case)
        hidden.requires_grad_(), weights.requires_grad_()
        expected = at_home(hidden, chosen, weights, matrices)
        expected.sin().sum().backward()
        torch.testing.assert_close(out, expected.detach())
        torch.testing.assert_close(hidden_grad, hidden.grad)
        torch.testing.assert_close(weights_grad, weights.grad)
        rows_sent_away[rank] = int((chosen // (EXPERTS // world) != rank).sum())
    gradient = torch.cat([result[3] for result in results])  # of each rank a tensor, also without a row
    expected_gradient = matrices.grad if matrices.grad is not None else torch.zeros_like(matrices)
    torch.testing.assert_close(gradient, expected_gradient)

    rows_of_rank = [
        sum(int((tokens_of(sender, world, case)[1] // (EXPERTS // world) == rank).sum()) for sender in range(world))
        for rank in range(world)
    ]
    for rank, (*_, seen, forward, calls, num_bytes) in enumerate(results):
        assert [rows for rows, _ in seen] == [max(1, rows_of_rank[rank])]  # nothing dropped, nothing padded
        assert forward == {("ep", "all_to_all"): 3}  # counts, there, back
        assert calls == {("ep", "all_to_all"): 5}
        row, counts = HIDDEN * 8, (world - 1) * (EXPERTS // world) * 8
        received_away = rows_of_rank[rank] - int((tokens_of(rank, world, case)[1] // (EXPERTS // world) == rank).sum())
        # there and back, forward and backward: rows go out twice, results of others' rows twice
        assert num_bytes["ep", "all_to_all"] == counts + 2 * row * (rows_sent_away[rank] + received_away)
