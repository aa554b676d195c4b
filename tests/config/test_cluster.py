"""The file that describes a cluster."""

from __future__ import annotations

import pytest

from swift.config.cluster import ClusterNode, expand_hosts, read_cluster
from swift.core.errors import UsageError

FILE = """
nodes:
  - {host: gpu01, devices: 8, switch: rack-a}
  - {host: "gpu[02-03].cluster", devices: 4, switch: 7}
  - {host: alone}
"""


def test_read(tmp_path):
    (tmp_path / "cluster.yaml").write_text(FILE)
    cluster = read_cluster(tmp_path / "cluster.yaml")
    assert cluster.nodes == (
        ClusterNode("gpu01", 8, "rack-a"),
        ClusterNode("gpu02.cluster", 4, "7"),
        ClusterNode("gpu03.cluster", 4, "7"),
        ClusterNode("alone", 1),
    )
    assert cluster.node("gpu02") is cluster.nodes[1] and cluster.node("gpu01.lan") is cluster.nodes[0]
    assert cluster.node("other") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "can't be read"),
        ("hosts: []", "has no list `nodes`"),
        ("nodes: []", "has no list `nodes`"),
        ("nodes: [{devices: 8}]", r"nodes\[0\] has no `host`"),
        ("nodes: [{host: a, gpus: 8}]", "unknown key 'gpus'"),
        ("nodes: [{host: a, devices: none}]", "not a number above 0"),
        ("nodes: [{host: a}, {host: a}]", "names a twice"),
    ],
)
def test_faults(tmp_path, text, words):
    (tmp_path / "cluster.yaml").write_text(text)
    with pytest.raises(UsageError, match=words) as caught:
        read_cluster(tmp_path / "cluster.yaml")
    assert "--cluster_file" in caught.value.where


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="can't be read"):
        read_cluster(tmp_path / "no.yaml")


def test_expand_hosts():
    assert expand_hosts("n[08-10,3]x[1-2]") == ["n08x1", "n08x2", "n09x1", "n09x2", "n10x1", "n10x2", "n3x1", "n3x2"]
    assert expand_hosts("plain") == ["plain"]
