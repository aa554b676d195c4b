"""Which machine this is: flags before variables before Slurm, and what is missing is named."""

from __future__ import annotations

import pytest

from swift.config import InferConfig, SftConfig, build_config
from swift.config.nodes import (
    Nodes,
    adopted_variables,
    find_nodes,
    first_host,
    processes_wanted,
    tasks_per_node,
    world_size_expected,
)
from swift.core.errors import UsageError

SLURM = {
    "SLURM_STEP_NODELIST": "gpu[07-08,12]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "0",
}
PER_GPU = {
    **SLURM,
    "SLURM_STEP_NUM_TASKS": "10",
    "SLURM_PROCID": "9",
    "SLURM_NODEID": "2",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),2",
}


def config(**flags):
    return build_config(SftConfig, flags)


def test_one_machine():
    assert find_nodes(SftConfig(), {}) == Nodes()
    assert find_nodes(InferConfig(), {"NPROC_PER_NODE": "2"}).processes == 2
    assert find_nodes(config(nproc_per_node=3), {"NPROC_PER_NODE": "2"}).processes == 3


def test_variables_and_flags():
    environ = {"NNODES": "4", "NODE_RANK": "3", "MASTER_ADDR": "a", "MASTER_PORT": "12", "NPROC_PER_NODE": "8"}
    assert find_nodes(SftConfig(), environ) == Nodes(4, 3, 8, "a", 12)
    flags = config(nnodes=2, node_rank=0, master_addr="b", master_port=13, nproc_per_node=1, join_timeout_s=7)
    assert find_nodes(flags, environ) == Nodes(2, 0, 1, "b", 13, 7)
    assert find_nodes(config(nnodes=1), environ).count == 1
    assert find_nodes(SftConfig(), {**environ, "MASTER_PORT": ""}).master_port == 29500
    assert world_size_expected(SftConfig(), environ) == 32
    assert world_size_expected(SftConfig(), {**environ, "WORLD_SIZE": "5"}) == 5


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"NNODES": "2"}, r"--node_rank .* and --master_addr .* are missing"),
        ({"NNODES": "2", "NODE_RANK": "0"}, r"--master_addr .* is missing"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "numbered from 0 to 1, and this one is number 2"),
        ({"NNODES": "two"}, "NNODES is 'two'"),
        ({"NNODES": "0"}, "NNODES is 0"),
        ({"NPROC_PER_NODE": "many"}, "NPROC_PER_NODE is 'many'"),
    ],
)
def test_what_is_missing_is_named(environ, words):
    with pytest.raises(UsageError, match=words):
        find_nodes(SftConfig(), environ)


def test_slurm_with_one_task_a_machine():
    found = find_nodes(config(nproc_per_node=8), SLURM)
    assert (found.count, found.rank, found.master_addr, found.processes) == (3, 1, "gpu07", 8)
    assert 1024 < found.master_port < 30000
    assert found.master_port != find_nodes(SftConfig(), {**SLURM, "SLURM_JOB_ID": "4243"}).master_port
    assert not adopted_variables(SftConfig(), SLURM)
    assert processes_wanted(SftConfig(), {**SLURM, "SLURM_GPUS_ON_NODE": "4"}) == 4
    assert find_nodes(SftConfig(), {**SLURM, "NNODES": "1"}).count == 1
    assert find_nodes(SftConfig(), {**SLURM, "MASTER_ADDR": "ib07"}).master_addr == "ib07"


def test_a_batch_script_without_srun_is_one_process():
    environ = {"SLURM_NNODES": "3", "SLURM_NTASKS": "12", "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "a,b,c"}
    assert find_nodes(SftConfig(), environ) == Nodes() and not adopted_variables(SftConfig(), environ)


def test_slurm_with_one_task_a_gpu():
    found = adopted_variables(SftConfig(), PER_GPU)
    port = found.pop("MASTER_PORT")
    assert found == {
        "RANK": "9", "WORLD_SIZE": "10", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "2",
        "MASTER_ADDR": "gpu07",
    }  # fmt: skip
    assert port.isdigit() and not adopted_variables(SftConfig(), {**PER_GPU, "RANK": "0"})
    with pytest.raises(UsageError, match="10 tasks on 3 machine"):
        adopted_variables(config(nproc_per_node=4), PER_GPU)


def test_mpi():
    environ = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert adopted_variables(config(master_addr="h", master_port=5), environ)["MASTER_ADDR"] == "h"
    with pytest.raises(UsageError, match="which host rank 0 is on"):
        adopted_variables(SftConfig(), environ)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu[07-09,12],login1", "gpu07"),
        ("a-1,b-2", "a-1"),
        ("n[3,5-6].cluster", "n3.cluster"),
        ("r[1-2]n[08-11]", "r1n08"),
        ("single", "single"),
        ("", ""),
    ],
)
def test_first_host(nodelist, host):
    assert first_host(nodelist) == host


def test_tasks_per_node():
    assert tasks_per_node("4(x2),3") == [4, 4, 3] and tasks_per_node("") == []
