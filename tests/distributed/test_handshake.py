"""How ranks meet: a missing, different or unreachable one is named on every rank that came, in time."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from pool import free_port

from swift.config import SftConfig
from swift.config.files import to_flat
from swift.core import interfaces
from swift.core.errors import SwiftError
from swift.distributed import handshake
from swift.distributed.handshake import Member, describe_self, meet, node_names, shared_settings

VERSIONS = {"python": "3.11", "torch": "2.13.0"}


def member(rank: int, world: int = 3, **changes) -> Member:
    return dataclasses.replace(
        Member(rank, world, rank, world, f"host{rank}", str(rank), "cpu", "192.0.2.1", "sum", VERSIONS), **changes
    )


def meeting(members: list[Member], settings: dict | None = None, timeout_s: float = 20.0) -> list:
    """What each of these got from `meet`: the members, or the error. Ranks are threads around one store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results: list = [None] * len(members)

    def come(place: int, own: Member) -> None:
        client = store if own.rank == 0 else dist.TCPStore("127.0.0.1", store.port, is_master=False)
        try:
            results[place] = meet(client, own, (settings or {}).get(own.rank, {}), timeout_s)
        except SwiftError as error:
            results[place] = error

    threads = [threading.Thread(target=come, args=item) for item in enumerate(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_everybody_gets_everybody():
    members = [member(rank) for rank in range(3)]
    assert meeting(members) == [tuple(members)] * 3


@pytest.mark.parametrize(
    ("wrong", "words", "fix"),
    [
        ({"versions": {**VERSIONS, "torch": "2.12.1"}}, r"rank 1 \(host1\) has torch 2\.12\.1, 2 .* 2", "same torch"),
        ({"versions": {**VERSIONS, "python": "3.12"}}, r"rank 1 \(host1\) has python 3\.12", "same python"),
        ({"versions": {"python": "3.11"}}, r"rank 1 \(host1\) has torch none", "same torch"),
        ({"device": "cuda"}, r"rank 1 \(host1\) computes on cuda, 2 other\(s\) computes on cpu", "swift doctor"),
        ({"world_size": 4}, r"rank 1 \(host1\) was started for 4 ranks, 2 .* 3 ranks", "--nnodes"),
        ({"address": "127.0.0.1"}, r"rank 1 \(host1\) would be reached at 127\.0\.0\.1", "GLOO_SOCKET_IFNAME"),
    ],
)  # fmt: skip
def test_a_different_rank_is_named_on_all(wrong, words, fix, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    results = meeting([member(0), member(1, **wrong), member(2)])
    for error in results:
        assert isinstance(error, SwiftError)
        with pytest.raises(SwiftError, match=words):
            raise error
        assert fix in error.fix


def test_the_odd_one_out_may_be_rank_0():
    results = meeting([member(0, versions={**VERSIONS, "torch": "2.9"}), member(1), member(2)])
    assert all(error.message.startswith("rank 0 (host0) has torch 2.9, 2 other(s)") for error in results)


def test_settings_that_differ_are_named_with_both_values():
    settings = {rank: {"learning_rate": 1e-4, "seed": 42} for rank in range(3)}
    settings[2] = {"learning_rate": 1e-3, "seed": 42}
    results = meeting([member(0), member(1), member(2, settings="other")], settings)
    for error in results:
        assert error.message == ("rank 2 (host2) has other settings: learning_rate is 0.001 there and 0.0001 on rank 0")
        assert error.where == "--learning_rate" and "same command" in error.fix


def test_a_missing_rank_is_named_on_those_that_came():
    began = time.monotonic()
    first, third = meeting([member(0, 4), member(2, 4)], timeout_s=1.0)
    assert time.monotonic() - began < 10
    for error in (first, third):
        assert error.message == "2 of 4 ranks came within 1 s; missing: ranks 1, 3" and "--join_timeout_s" in error.fix


def test_two_processes_of_one_rank():
    results = meeting([member(0), member(1), member(1, host="twin")], timeout_s=1.0)
    twins = [error for error in results if error.message.startswith("two processes call themselves rank 1")]
    assert len(twins) == 1 and "host1" in twins[0].message and "twin" in twins[0].message


def _late(port: int) -> None:
    os.environ.update(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    store = handshake.reach_store(20.0)
    meet(store, member(1, 2), {}, 20.0)


def test_rank_0_may_come_late(monkeypatch):
    """The other one looks for it until its time is over."""
    port = free_port()
    other = multiprocessing.get_context("fork").Process(target=_late, args=(port,))
    other.start()
    time.sleep(1.5)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    store = handshake.reach_store(20.0)
    assert len(meet(store, member(0, 2), {}, 20.0)) == 2
    other.join(20)
    assert other.exitcode == 0


@pytest.mark.parametrize(
    ("address", "words"),
    [("127.0.0.1", "nothing listens on the port"), ("no-such-host.invalid", "is not known here")],
)
def test_an_unreachable_rank_0(monkeypatch, address, words):
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(free_port()),
    }.items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    with pytest.raises(SwiftError, match=words) as caught:
        handshake.reach_store(1.0)
    assert time.monotonic() - began < 20
    assert "rank 0 can't be reached at" in caught.value.message and "rank 1" in caught.value.where


def test_a_taken_port(monkeypatch):
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SwiftError, match="another program uses it"):
            handshake.reach_store(2.0)


def test_no_launcher_said_where_rank_0_is(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(SwiftError, match="isn't told where rank 0 is"):
        handshake.reach_store(1.0)


@pytest.mark.parametrize("variable", interfaces.VARIABLES)
def test_an_interface_that_does_not_exist(monkeypatch, variable):
    monkeypatch.setenv(variable, "eth77")
    with pytest.raises(SwiftError, match="names 'eth77'") as caught:
        interfaces.check_interfaces()
    assert "lo (127.0.0.1)" in caught.value.fix and caught.value.where == variable


def test_interfaces_that_do(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^docker,veth")
    interfaces.check_interfaces()
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "l")  # NCCL takes beginnings of names
    interfaces.check_interfaces()
    assert interfaces.interface_towards("127.0.0.1", 1) == "lo"


def test_what_this_process_says_of_itself(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("GROUP_RANK", "3")
    own = describe_self("cpu", {"a": 1})
    assert own.address == "127.0.0.1" and own.node == "3" and {"torch", "peft", "python", "swift"} <= set(own.versions)
    assert own.settings == describe_self("cpu", {"a": 1}).settings != describe_self("cpu", {"a": 2}).settings
    assert Member(**json.loads(json.dumps(dataclasses.asdict(own)))) == own


def test_only_settings_of_the_run_must_agree():
    flat = to_flat(SftConfig())
    assert flat.keys() - shared_settings(flat).keys() == {
        "node_rank", "nproc_per_node", "nnodes", "master_addr", "master_port", "join_timeout_s", "log_level",
        "disable_tqdm",
    }  # fmt: skip


def test_machines_of_one_name_are_told_apart():
    same = [member(0, host="box"), member(1, host="box"), member(2, host="other")]
    assert node_names(same) == ["box (machine 0)", "box (machine 1)", "other"]
    assert node_names([member(0, host="a", node="0"), member(1, host="a", node="0")]) == ["a", "a"]


def test_a_store_that_goes_away(monkeypatch):
    """Rank 0 dies after the others have come."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=5))
    with pytest.raises(SwiftError, match="rank 0 didn't come"):
        monkeypatch.setattr(handshake, "_FAREWELL_S", 0.1)
        meet(client, member(1), {}, 0.3)
