"""What a run shows and leaves behind: console, logging.jsonl, TensorBoard, loss.png and report.html."""

from swift.monitor.history import History, read_history
from swift.monitor.monitor import Monitor, build_monitor
from swift.monitor.tensorboard import EventWriter

__all__ = ["EventWriter", "History", "Monitor", "build_monitor", "read_history"]
