"""What a run must remember beside its tensors: a few numbers, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from swift.core.errors import CheckpointError

FILE_NAME = "trainer_state.json"


@dataclass
class RunState:
    """The position of a run.

    Attributes:
        step: optimizer steps done.
        epoch: epoch of the next step, from 0; consumed: units of that epoch already used.
        tokens: real tokens trained on so far; skipped_steps: steps left out for a non-finite loss.
        best_metric, best_step: of the best evaluation so far; evals_since_best: evaluations since then.
        data_fingerprint: identifies rows, encoding and order; a resumed run must have the same.
        layout: settings that decide which units share a step, to tell an exact resume from another one.
        world_size: number of processes that wrote the checkpoint.
        global_units: units in one of its optimizer steps; total_steps: steps the run was to have.
        optimizer: name of its optimizer; consecutive_skips: steps left out in a row up to now.
        window: sums since the last logged line.
    """

    step: int = 0
    epoch: int = 0
    consumed: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    best_metric: float | None = None
    best_step: int | None = None
    evals_since_best: int = 0
    data_fingerprint: str = ""
    layout: str = ""
    world_size: int = 1
    global_units: int = 0
    total_steps: int = 0
    optimizer: str = ""
    consecutive_skips: int = 0
    window: dict[str, list[float]] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def read(cls, folder: Path) -> RunState:
        """The state saved in a checkpoint folder."""
        path = folder / FILE_NAME
        try:
            raw = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint has no readable {FILE_NAME}: {error}",
                where=str(folder),
                fix="resume from a checkpoint that this program wrote with its training state",
            ) from error
        known = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in raw.items() if name in known})
