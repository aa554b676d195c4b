"""The processes of a run: what rank 0 makes reaches all, however long it takes."""

import sys

import pytest
from ranks import on_two_ranks

from swift.distributed import ProcessGroup, process_group

SLOW = """
timeout_s = 4
group = start_process_group("cpu", timeout=timedelta(seconds=timeout_s))

def slow():
    time.sleep(timeout_s + 2)
    return {"made": rank}

seen = [group.from_main(slow), group.from_main(lambda: rank + 10)]
print(json.dumps([*seen, group.gather(rank)]))
group.close()
"""

FAILING = """
class Stubborn(Exception):
    def __reduce__(self):
        raise TypeError("never leaves this process")

class Narrow(Exception):
    def __init__(self, one, two):  # pickles, but can't be read back
        super().__init__(one)

group = start_process_group("cpu")
seen = []
for error in (UsageError("bad", where="--flag", fix="repair"), KeyError("name"), Stubborn("stuck"), Narrow("a", "b")):
    def fail():
        raise error
    try:
        group.from_main(fail)
    except Exception as caught:
        seen.append([type(caught).__name__, str(caught)])
seen.append(group.from_main(lambda: "goes on"))
print(json.dumps(seen))
group.close()
"""


def test_rank_0_may_take_longer_than_the_timeout(tmp_path):
    assert on_two_ranks(SLOW, tmp_path) == [[{"made": 0}, 10, [0, 1]]] * 2


def test_an_exception_of_rank_0_reaches_all(tmp_path):
    first, second = on_two_ranks(FAILING, tmp_path)
    told = ["UsageError", "bad\n  where: --flag\n  fix:   repair"]
    assert first == [told, ["KeyError", "'name'"], ["Stubborn", "stuck"], ["Narrow", "a"], "goes on"]
    assert second[:2] == first[:2]
    assert [kind for kind, _ in second[2:4]] == ["SwiftError", "SwiftError"]
    assert "Stubborn: stuck" in second[2][1] and "Narrow: a" in second[3][1]
    assert second[4] == "goes on"


@pytest.mark.parametrize(
    ("platform", "address", "chosen"),
    [("linux", "127.0.0.1", "lo"), ("darwin", "127.0.0.1", None), ("linux", "node0", None)],
)
def test_the_loopback_interface_is_chosen_on_linux_within_one_machine(platform, address, chosen, monkeypatch):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setattr(process_group.os, "environ", dict(process_group.os.environ))
    process_group.os.environ.pop("GLOO_SOCKET_IFNAME", None)
    process_group._choose_gloo_interface()
    assert process_group.os.environ.get("GLOO_SOCKET_IFNAME") == chosen


def test_one_process_needs_no_group():
    group = ProcessGroup(0, 1, 0)
    assert group.from_main(lambda: 3) == 3
    with pytest.raises(KeyError):
        group.from_main(lambda: {}["x"])
