"""Running a recipe: plan, stages one after the other, output, report. The composition of everything beside it.

Whatever runs the tasks, and however often it was killed before, the output is the same to the byte.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from swift.core.addresses import values_without_secrets, without_secrets
from swift.core.errors import DataError, SwiftError, UsageError
from swift.core.files import disk_errors, human_bytes, write_atomic
from swift.core.network import set_offline
from swift.core.version import __version__
from swift.data.engine import summary
from swift.data.engine.blocks import read_index
from swift.data.engine.inputs import changed_input, refuse_too_many
from swift.data.engine.pool import Call, Executor, InProcess, LocalPool, StopRequest
from swift.data.engine.progress import Progress, duration
from swift.data.engine.ranks import Ranks, rank_and_size
from swift.data.engine.recipe import Recipe, read_recipe, recipe_from
from swift.data.engine.report import write_report
from swift.data.engine.shards import Shard, list_shards, pieces_of
from swift.data.engine.stages import Stage, plan_stages
from swift.data.engine.task import Job, Pieces, done_marker

RANK_TIMEOUT_S = 600.0
_SAME_PLAN_S = 60.0  # in which rank 0, which may start later, has to replace an older plan


@dataclass
class RunResult:
    """A finished run.

    Attributes:
        output: the folder. manifest: what `_manifest.json` in it says (rows, files with sha256, recipe, inputs).
        tasks_run: tasks that this process ran; tasks_done_before: those it found done.
        already_complete: whether there was nothing to do.
    """

    output: Path
    manifest: dict[str, Any]
    tasks_run: int = 0
    tasks_done_before: int = 0
    already_complete: bool = False


@dataclass(frozen=True)
class RunOptions:
    """How a recipe is run, beyond what it says itself.

    Attributes:
        rank, world_size: which of how many processes this is; `auto` asks the launcher's variables.
        rank_timeout_s: after how long without a sign of life another rank counts as gone.
        restart: forget what is done, and a finished output.
        quiet: print nothing.
    """

    rank: int | None = None
    world_size: str | None = None
    rank_timeout_s: float = RANK_TIMEOUT_S
    restart: bool = False
    quiet: bool = False


def run_recipe(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    overrides: Mapping[str, Any] | None = None,
    options: RunOptions | None = None,
) -> RunResult:
    """Run a recipe to its end, going on with what an interrupted run has left.

    Args:
        recipe: a file, or the same as a mapping.
        overrides: keys of the recipe that win over it, dotted for inner ones: ``{"output.path": "clean"}``.
        options: how to run it.

    Raises:
        UsageError: faults of the recipe, all at once; nothing was started.
        SwiftError: a task failed. Running it again goes on from there.
    """
    options = options or RunOptions()
    if not isinstance(recipe, Recipe):
        recipe = recipe_from(recipe, overrides) if isinstance(recipe, Mapping) else read_recipe(recipe, overrides)
    rank, size = rank_and_size(options.rank, options.world_size, os.environ)
    stop = StopRequest()
    progress = Progress(quiet=options.quiet or rank > 0)
    with stop.watching():
        try:
            return _Run(recipe, options, rank, size, stop, progress).run()
        finally:
            progress.end()


def plan_text(recipe: Recipe) -> str:
    """What a run would do: stages and tasks."""
    if recipe.offline:
        set_offline()
    shards = list_shards(recipe)
    files = {piece.file.location: piece.size for piece in pieces_of(shards)}
    lines = [f"input   {len(files)} file(s), {human_bytes(sum(files.values()))}, in {len(shards)} shard(s)"]
    for stage in plan_stages(recipe, shards):
        tasks = "as many tasks as output files" if stage.num_tasks is None else f"{stage.num_tasks} task(s)"
        lines.append(f"stage   {stage.title(recipe)}: {tasks}")
    lines.append(f"output  {recipe.output.path} ({recipe.format})")
    return "\n".join(lines)


@dataclass
class _Run:
    recipe: Recipe
    options: RunOptions
    rank: int
    size: int
    stop: StopRequest
    progress: Progress
    tasks_run: int = 0
    tasks_before: int = 0
    _plans: dict[str, list[Pieces]] = field(default_factory=dict)

    def run(self) -> RunResult:
        start = time.monotonic()
        if self.recipe.offline:
            set_offline()
        self.output = Path(self.recipe.output.path).expanduser().absolute()
        with self.stop.interrupting():  # data sets are fetched and rows counted here, which takes its time
            shards = list_shards(self.recipe)
        self._refuse_own_output(shards)
        self.job = Job(self.recipe, shards, self.output / summary.WORK)
        self.stages = plan_stages(self.recipe, shards)
        if self.options.restart and self.size > 1:
            raise UsageError(
                "--restart would remove what other ranks have begun",
                where="--restart",
                fix="remove the output folder, then start the ranks without --restart",
            )
        self._claim_output()
        if self.options.restart:
            if self.job.work.exists():
                with Ranks(self.job.work, 0, 1, self.options.rank_timeout_s):
                    pass  # refuses while another process is at work there
            summary.remove_output(self.output)
        complete = self._complete()
        if complete is not None:
            return complete
        with disk_errors(self.output):
            self.job.work.mkdir(parents=True, exist_ok=True)
        with Ranks(self.job.work, self.rank, self.size, self.options.rank_timeout_s) as ranks:
            self._agree(ranks)
            executor = self._executor()
            try:
                markers = {stage.name: self._stage(stage, executor, ranks) for stage in self.stages}
            finally:
                executor.close()
            if self.rank > 0:
                ranks.tell_finished()
                return self._wait_for_manifest(ranks)
            manifest, ledger = self._finish(markers)
            ranks.wait_until_finished(self.stop.check)
        if not self.recipe.keep_work:
            shutil.rmtree(self.job.work, ignore_errors=True)
        read = next((entry["tally"]["read"] for entry in ledger["operators"]), 0)
        took = duration(time.monotonic() - start)
        self.progress.line(f"done: {read} rows read, {manifest['rows']} written in {took} -> {self.output}")
        for line in summary.closing_lines(ledger, manifest, self.output):
            self.progress.line(line)
        return RunResult(self.output, manifest, self.tasks_run, self.tasks_before)

    # --- before the first task ---

    @property
    def fingerprint(self) -> str:
        """Of everything that the output depends on."""
        return self.stages[-1].fingerprint

    def _complete(self) -> RunResult | None:
        """The result that is there already; refuses one that isn't this recipe's, or was changed."""
        manifest = summary.read_manifest(self.output)
        if manifest is None:
            return None
        if manifest.get("fingerprint") == self.fingerprint:
            wrong = summary.missing_files(self.output, manifest)
            if wrong:
                raise SwiftError(
                    f"the output is complete, but {', '.join(wrong[:3])} has changed since",
                    where=str(self.output),
                    fix="--restart makes it anew",
                )
            if self.rank == 0 and not self.recipe.keep_work:  # a run that was killed while it tidied up
                shutil.rmtree(self.job.work, ignore_errors=True)
            self.progress.line(f"{self.output} is complete: {manifest['rows']} rows; nothing to do")
            return RunResult(self.output, manifest, 0, 0, already_complete=True)
        if (self.job.work / "plan").exists():  # kept for this: what hasn't changed is used again
            return None
        raise UsageError(
            "the output folder holds the result of another recipe, or of this one with other settings or input",
            where=str(self.output),
            fix="choose another --output, or --restart to make it anew",
        )

    def _refuse_own_output(self, shards: list[Shard]) -> None:
        """The output isn't read as input: neither what an earlier run has left there, nor what a restart removes."""
        output = os.path.realpath(self.output)
        for piece in pieces_of(shards):
            if "://" in piece.file.location:
                continue
            path = os.path.realpath(piece.file.location)
            if os.path.commonpath([path, output]) == output:
                raise UsageError(
                    f"the input {piece.file.address} lies in the output folder",
                    where=self.recipe.input[piece.input].path,
                    fix="choose an output folder outside of what is read",
                )

    def _claim_output(self) -> None:
        """The output folder is new, or ours: nobody's files are mixed with the result."""
        if self.output.exists() and not self.output.is_dir():
            raise UsageError("the output is a file, a folder is wanted", where=str(self.output))
        ours = (summary.WORK, summary.MANIFEST)
        if self.output.is_dir() and not any((self.output / name).exists() for name in ours):
            other = next((path for path in self.output.iterdir() if not path.name.startswith(".")), None)
            if other is not None:
                raise UsageError(
                    f"the output folder holds other files, such as {other.name}",
                    where=str(self.output),
                    fix="choose an empty or new folder",
                )

    def _agree(self, ranks: Ranks) -> None:
        """Rank 0 writes the plan down and the others compare theirs; an input that has changed since is refused."""
        path = self.job.work / "plan"
        plan = {
            "fingerprint": self.fingerprint,
            "inputs": [[without_secrets(item.path), item.text_column] for item in self.recipe.input],
            "files": {piece.file.address: piece.stamp for piece in pieces_of(self.job.shards)},
        }
        if self.rank > 0:

            def differs() -> list[int]:
                theirs = _read(path).get("fingerprint")
                if theirs not in (None, plan["fingerprint"]) and ranks.age_s > _SAME_PLAN_S:
                    raise UsageError(
                        "rank 0 runs another recipe, sees other input, or has another version of the program",
                        where=str(self.output),
                        fix="give all ranks the same recipe and flags",
                    )
                return [] if theirs == plan["fingerprint"] else [0]

            ranks.wait_for(differs, "the plan", self.stop.check)
            return
        old = _read(path)
        if old:
            _refuse_changed_inputs(old, plan)
        write_atomic(path, orjson.dumps(plan))

    def _executor(self) -> Executor:
        wanted = self.recipe.executor
        if wanted.kind == "ray":
            from swift.data.engine.ray_executor import RayExecutor

            return RayExecutor(self.job, wanted.num_proc, wanted.address, self.stop)
        most = [stage.num_tasks for stage in self.stages if stage.num_tasks is not None]
        most_tasks = max(most) if len(most) == len(self.stages) else None  # output files aren't known yet
        num_proc = wanted.num_proc or _cores()
        num_proc = num_proc if most_tasks is None else max(1, min(num_proc, most_tasks))
        return InProcess(self.job, self.stop) if num_proc == 1 else LocalPool(self.job, num_proc, self.stop)

    # --- stages ---

    def _stage(self, stage: Stage, executor: Executor, ranks: Ranks) -> list[dict[str, Any]]:
        """Run what is missing of a stage, wait for the other ranks, and return all markers."""
        pieces: list[Pieces] = self._pieces(stage) if stage.kind == "collect" else [()] * (stage.num_tasks or 0)
        markers: dict[int, dict[str, Any]] = {}
        for index, parts in enumerate(pieces):
            marker = done_marker(self.job, stage, index, output=self.output, pieces=parts)
            if marker is not None:
                markers[index] = marker
        mine = [index for index in range(len(pieces)) if ranks.mine(index)]
        missing = [index for index in mine if index not in markers]
        self.tasks_before += len(mine) - len(missing)
        if missing:
            self.progress.begin(stage.title(self.recipe), len(mine) - len(missing), len(mine))
            calls = [Call(stage.name, index, pieces[index]) for index in missing]
            executor.run(calls, self._taker(stage, markers))
            self.progress.end()
        self._wait_for_others(stage, pieces, markers, ranks)
        everything = [markers[index] for index in range(len(pieces))]
        if stage.kind == "read":
            bad, read = _bad_rows(everything)
            refuse_too_many(self.recipe, bad, read)
        return everything

    def _taker(self, stage: Stage, markers: dict[int, dict[str, Any]]) -> Callable[[Call, dict[str, Any]], None]:
        bad = sum(_bad_rows([marker])[0] for marker in markers.values()) if stage.kind == "read" else 0

        def take(call: Call, marker: dict[str, Any]) -> None:
            nonlocal bad
            markers[call.index] = marker
            self.tasks_run += 1
            self.progress.advance()
            for note in marker["notes"]:
                self.progress.line(note)
            if stage.kind == "read":
                bad += _bad_rows([marker])[0]
                refuse_too_many(self.recipe, bad, None)

        return take

    def _wait_for_others(
        self, stage: Stage, pieces: list[Pieces], markers: dict[int, dict[str, Any]], ranks: Ranks
    ) -> None:
        if self.size == 1:
            return

        def missing() -> list[int]:
            late: set[int] = set()
            for index in range(len(pieces)):
                if index not in markers and index % self.size not in late:
                    marker = done_marker(self.job, stage, index, output=self.output, pieces=pieces[index])
                    if marker is None:
                        late.add(index % self.size)
                    else:
                        markers[index] = marker
            return sorted(late)

        ranks.wait_for(missing, stage.title(self.recipe), self.stop.check)

    def _pieces(self, stage: Stage) -> list[Pieces]:
        """What each output file is put together from: neighbouring blocks, until they are of the wanted size."""
        wanted = self.recipe.output_shard_bytes or 0
        files: list[Pieces] = []
        parts: list[tuple[int, int, int]] = []
        size = 0
        for shard in range(len(self.job.shards)):
            first = 0
            blocks = read_index(self.job.results(stage.source, shard))
            for number, block in enumerate(blocks):
                size += block.bytes
                if size >= wanted:
                    files.append((*parts, (shard, first, number + 1)))
                    parts, size, first = [], 0, number + 1
            if first < len(blocks):
                parts.append((shard, first, len(blocks)))
        return [*files, tuple(parts)] if parts else files

    # --- the end ---

    def _finish(self, markers: dict[str, list[dict[str, Any]]]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Publish the output; returns the manifest and the ledger."""
        final = self.stages[-1].name
        manifest: dict[str, Any] = {
            "format": 1,
            "swift": __version__,
            "fingerprint": self.fingerprint,
            "output_format": self.recipe.format,
            "seed": self.recipe.seed,
        }
        summary.publish(self.job, self.output, final, markers[final], manifest)
        everything = [marker for stage in self.stages for marker in markers[stage.name]]
        tasks = [(stage.name, index) for stage in self.stages for index in range(len(markers[stage.name]))]
        notes = [note for marker in everything for note in marker["notes"]]
        ledger = summary.ledger_of(self.recipe, summary.merged_records(self.job, tasks), notes)
        ledger["cpu_s"] = round(sum(marker["cpu_s"] for marker in everything), 3)
        ledger["stages"] = [
            {
                "title": stage.title(self.recipe),
                "tasks": len(markers[stage.name]),
                "cpu_s": round(sum(marker["cpu_s"] for marker in markers[stage.name]), 3),
            }
            for stage in self.stages
        ]
        write_atomic(self.output / summary.LEDGER, orjson.dumps(ledger, option=orjson.OPT_INDENT_2))
        if self.recipe.keep_dropped:
            summary.write_dropped([self.job.folder(*task) for task in tasks], self.output)
        manifest["recipe"] = values_without_secrets(self.recipe.as_json())
        manifest["inputs"] = [piece.as_json() for piece in pieces_of(self.job.shards)]
        write_report(self.output, ledger, manifest)
        as_json = orjson.dumps(manifest, option=orjson.OPT_INDENT_2, default=str)
        write_atomic(self.output / summary.MANIFEST, as_json)
        (self.job.work / "finish").unlink(missing_ok=True)
        return orjson.loads(as_json), ledger

    def _wait_for_manifest(self, ranks: Ranks) -> RunResult:
        """Ranks after the first are done when the first has published."""

        def published() -> bool:
            manifest = summary.read_manifest(self.output)
            return manifest is not None and manifest.get("fingerprint") == self.fingerprint

        ranks.wait_for(lambda: [] if published() else [0], "the output", self.stop.check)
        manifest = summary.read_manifest(self.output)
        assert manifest is not None
        return RunResult(self.output, manifest, self.tasks_run, self.tasks_before)


def _bad_rows(markers: list[dict[str, Any]]) -> tuple[int, int]:
    """Bad rows, and rows."""
    return sum(marker["bad_rows"][0] for marker in markers), sum(marker["bad_rows"][1] for marker in markers)


def _refuse_changed_inputs(old: dict[str, Any], new: dict[str, Any]) -> None:
    before, now = old["files"], new["files"]
    for location, stamp in now.items():
        if before.get(location, stamp) != stamp:
            raise changed_input(location)
    if old["inputs"] == new["inputs"] and set(before) != set(now):
        other = sorted(set(before) ^ set(now))[0]
        raise DataError(
            f"the input has {'lost' if other in before else 'got'} a file since this run began",
            where=other,
            fix="--restart forgets what is done and reads everything again; or put things back",
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        return orjson.loads(path.read_bytes())
    except (FileNotFoundError, orjson.JSONDecodeError):
        return {}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
