"""Which replica gets a request, by simulation: how often caches are hit, and how evenly work is shared."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence

import pytest

from swift.serving.router.balance import BLOCK_BYTES, Balancer, prefix_chain


def test_chains_are_equal_as_far_as_prompts_are() -> None:
    common = bytes(range(256)) * 4
    first, second = prefix_chain(common + b"a" * 500), prefix_chain(common + b"b" * 500)
    blocks = len(common) // BLOCK_BYTES
    assert first[:blocks] == second[:blocks]
    assert not set(first[blocks:]) & set(second[blocks:])
    assert prefix_chain(common)[:3] == prefix_chain(common[: 3 * BLOCK_BYTES + 7])
    assert prefix_chain(b"short") == ()
    # a block in another place is another block
    assert len(set(prefix_chain(b"x" * BLOCK_BYTES * 10))) == 10


def test_conversations_go_on_where_they_began() -> None:
    balancer = Balancer()
    names = ["a", "b", "c"]
    talks = {number: random.Random(number).randbytes(1000) for number in range(30)}
    homes = {}
    for number, text in talks.items():
        homes[number] = balancer.choose(prefix_chain(text), names)
        balancer.begin(homes[number], prefix_chain(text))
        balancer.end(homes[number])
    assert {list(homes.values()).count(name) for name in names} == {10}
    for number in random.Random(0).sample(sorted(talks), 30):
        longer = prefix_chain(talks[number] + bytes(400))
        assert balancer.choose(longer, names) == homes[number]


def test_without_a_common_beginning_the_least_loaded_one_is_chosen() -> None:
    balancer = Balancer()
    for _ in range(3):
        balancer.begin("a", ())
    balancer.begin("b", ())
    assert balancer.choose((), ["a", "b"]) == "b"
    assert balancer.choose((), ["a"]) == "a"
    balancer.begin("b", ())
    balancer.begin("b", ())
    balancer.begin("b", ())
    assert balancer.choose((), ["a", "b"]) == "a"


def test_one_popular_prompt_cannot_overload_a_replica() -> None:
    balancer, names, chain = Balancer(slack=1.25), ["a", "b", "c", "d"], prefix_chain(bytes(4000))
    for count in range(1, 101):
        name = balancer.choose(chain, names)
        balancer.begin(name, chain)
        loads = [balancer.active(each) for each in names]
        assert max(loads) <= -(-1.25 * count // 4), (count, loads)


def test_an_empty_cache_and_old_blocks_are_forgotten() -> None:
    chain, other = prefix_chain(b"a" * 2000), prefix_chain(b"b" * 2000)
    balancer = Balancer(max_blocks=len(chain))
    balancer.begin("a", chain)
    balancer.end("a")
    balancer.begin("b", ())
    balancer.end("b")
    balancer.begin("b", ())
    balancer.end("b")
    balancer.begin("a", ())  # busier than b
    assert balancer.choose(chain, ["a", "b"]) == "a"
    balancer.forget("a")
    assert balancer.choose(chain, ["a", "b"]) == "b"
    balancer.begin("a", chain)
    balancer.begin("a", other)  # pushes the first ones out
    balancer.end("a")
    balancer.end("a")
    assert balancer.choose(chain, ["a", "b"]) == "b"
    assert balancer.choose(other, ["a", "b"]) == "a"


Policy = Callable[[Balancer, Sequence[int], list[str]], str]


def _simulate(policy: Policy, speeds: dict[str, float], seed: int = 0) -> tuple[float, dict[str, int], float]:
    """2000 requests of 120 groups with common beginnings, more of them than a replica's cache holds.

    Returns:
        (share of blocks found in the cache of the replica that was chosen, requests of each, mean of the largest load
        over the mean load).
    """
    random_ = random.Random(seed)
    groups = [random_.randbytes(BLOCK_BYTES * 20) for _ in range(120)]
    balancer, names = Balancer(max_blocks=1000), list(speeds)
    ends: list[tuple[float, str]] = []
    now, counts, imbalance = 0.0, dict.fromkeys(names, 0), []
    for _ in range(2000):
        now += random_.expovariate(8 * sum(speeds.values()) / 4)  # about 8 running on each
        while ends and ends[0][0] <= now:
            balancer.end(heapq.heappop(ends)[1])
        group = groups[min(int(random_.expovariate(1 / 30)), 119)]  # few are popular
        chain = prefix_chain(group + random_.randbytes(BLOCK_BYTES * 4))
        name = policy(balancer, chain, names)
        balancer.begin(name, chain)
        counts[name] += 1
        loads = [balancer.active(each) for each in names]
        if sum(loads) >= 4 * len(names):
            imbalance.append(max(loads) * len(names) / sum(loads))
        heapq.heappush(ends, (now + random_.expovariate(1) * 4 / speeds[name], name))
    return balancer.blocks_matched / balancer.blocks_asked, counts, sum(imbalance) / max(1, len(imbalance))


def _ours(balancer: Balancer, chain: Sequence[int], names: list[str]) -> str:
    return balancer.choose(chain, names)


def _least_loaded(balancer: Balancer, chain: Sequence[int], names: list[str]) -> str:
    return balancer.choose((), names)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_caches_are_hit_and_work_is_shared(seed: int) -> None:
    equal = dict.fromkeys("abcd", 1.0)
    hits, counts, imbalance = _simulate(_ours, equal, seed)
    hits_blind, _, _ = _simulate(_least_loaded, equal, seed)
    assert hits > 0.7 and hits_blind < 0.5  # of 24 blocks 20 are common: 0.83 at best
    assert imbalance < 1.25
    assert max(counts.values()) < 1.25 * min(counts.values())


def test_a_slow_replica_gets_less() -> None:
    _, counts, _ = _simulate(_ours, {"a": 1.0, "b": 1.0, "c": 1.0, "slow": 0.25})
    assert counts["slow"] < 0.6 * min(counts[name] for name in "abc")
