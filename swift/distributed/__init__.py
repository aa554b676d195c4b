"""Floor 2: processes and how they talk."""

from swift.distributed.process_group import ProcessGroup, start_process_group
from swift.distributed.shared import check_shared_folder, shared_folder

__all__ = ["ProcessGroup", "check_shared_folder", "shared_folder", "start_process_group"]
