"""Floor 2: processes and how they talk."""

from swift.distributed.process_group import ProcessGroup, start_process_group

__all__ = ["ProcessGroup", "start_process_group"]
