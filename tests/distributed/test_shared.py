"""A folder that all ranks share is told from two of the same name."""

import threading
from pathlib import Path

from ranks import on_two_ranks

from swift.distributed import ProcessGroup, check_shared_folder, shared, shared_folder

BODY = """
from swift.distributed import check_shared_folder, shared_folder

group = start_process_group("cpu")
common, own = here / "new" / "common", here / f"own-{rank}"
answers = [shared_folder(group, common, patience_s=30), shared_folder(group, own, patience_s=0.3)]
check_shared_folder(group, own, patience_s=0.3)  # one machine: nothing to prove
os.environ["LOCAL_WORLD_SIZE"] = "1"
check_shared_folder(group, common, patience_s=30)
try:
    check_shared_folder(group, own, patience_s=0.3)
except UsageError as error:
    answers.append(error.where == f"--output_dir {own}" and "--output_dir" in error.fix)
(here / "file").touch()
try:
    shared_folder(group, here / "file" / "run")
except SwiftError as error:
    answers.append("could not write" in error.message)
print(json.dumps(answers))
group.close()
"""


def test_two_ranks_tell_a_common_folder_from_two_of_the_same_name(tmp_path):
    answers = on_two_ranks(BODY, tmp_path, LOCAL_WORLD_SIZE="2")
    assert answers == [[True, False, True, True]] * 2
    assert not list(tmp_path.rglob(".shared-*"))


def test_a_file_that_comes_late_is_waited_for(tmp_path: Path):
    """As on a network file system, whose clients remember for a while what was not there."""
    late = threading.Timer(0.3, lambda: (tmp_path / "token").write_text("abc"))
    late.start()
    assert shared._appears(tmp_path / "token", "abc", 60)
    late.join()
    assert not shared._appears(tmp_path / "token", "other", 0)


def test_one_process_shares_with_itself(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    group = ProcessGroup(0, 1, 0)
    check_shared_folder(group, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert shared_folder(group, tmp_path / "run")


def test_several_machines_by_the_launchers_numbers(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert not shared.several_machines(ProcessGroup(0, 8, 0))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert not shared.several_machines(ProcessGroup(0, 8, 0))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert shared.several_machines(ProcessGroup(0, 8, 0))
