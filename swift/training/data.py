"""The data side of a run: tokenizer, encoding, and the rows, encoded once and mapped by every process."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from swift.checkpoint.data import read_data_state
from swift.config.commands import TrainConfig
from swift.config.training import EvalConfig
from swift.data.augment.rows import augmenting
from swift.data.dataset import Prepared, TokenDataset, load_prepared, prepare_datasets
from swift.data.loading.batch import Annotate, WrittenOut
from swift.data.loading.streaming import StreamSet, open_stream
from swift.data.loading.train_set import PreparedSet, TrainSet
from swift.data.pipeline import TemplateEncoder
from swift.data.selection import Progress
from swift.data.sources import resolve_sources
from swift.distributed.heartbeat import Heartbeat, Watch
from swift.models.loading import load_tokenizer, resolve_model
from swift.training.session import Session

# Seconds between two lines about reading data.
PROGRESS_EVERY_S = 10.0


@dataclass
class Data:
    """Tokenizer, encoding and encoded rows.

    Attributes:
        annotate_eval: adds facts to batches of evaluation rows.
    """

    model_path: Path
    tokenizer: PreTrainedTokenizerBase
    encoder: TemplateEncoder
    train: TrainSet
    val: TokenDataset | None
    prepared: Prepared
    annotate_eval: Annotate | None = None

    def longest_unit(self, *, written_out: bool) -> int:
        """Tokens of the longest unit to train on, as sequences with a prompt in common or each with its own; 0 if
        nobody knows."""
        examples = self.prepared.train
        if isinstance(self.train, StreamSet):
            return self.train.longest_example
        return int((WrittenOut(examples) if written_out else examples).lengths.max())


def build_data(config: TrainConfig, session: Session) -> Data:
    """Resolve the model's folder, load its tokenizer, encode the rows (once per node; other ranks map the result)."""
    group = session.group

    def begin() -> Path:
        _pulse(session).unlink(missing_ok=True)  # left by a process that was killed: who waits would call this one dead
        return resolve_model(config.model)

    model_path = group.from_main(begin)
    tokenizer = load_tokenizer(model_path, config.model)
    encoder = session.method.make_encoder(tokenizer, config)
    prepared = _prepare_once(config, session, encoder)
    session.notes += encoder.notices
    train = build_train_set(config, session, encoder, prepared)
    _keep_thinking_switch(config, session, train.encoding)
    if session.group.main and prepared.ledger.sources:
        session.monitor.event("data", prepared.ledger.render(), ledger=prepared.ledger.summary())
    return Data(model_path, tokenizer, encoder, train, prepared.val, prepared)


def _keep_thinking_switch(config: TrainConfig, session: Session, encoding: Mapping[str, int]) -> None:
    """Write down how the rows were asked, if all were asked alike, so that inference asks the same way."""
    asked = {kind: encoding.get(f"asked_{kind}", 0) for kind in ("thinking", "not_thinking")}
    if config.template.enable_thinking is None and bool(asked["thinking"]) != bool(asked["not_thinking"]):
        thinking = bool(asked["thinking"])
        session.ask_thinking = thinking
        words = "have thoughts" if thinking else "have no thoughts"
        session.notes.append(f"all answers {words}: the checkpoint asks with enable_thinking {str(thinking).lower()}")


def _pulse(session: Session) -> Path:
    """Rank 0's sign of life while it prepares the data."""
    return session.run_dir / ".preparing"


def _prepare_once(config: TrainConfig, session: Session, encoder: TemplateEncoder) -> Prepared:
    """Rank 0 reads and encodes into mapped files of the run folder, which all machines share; the other ranks wait for
    as long as it shows signs of life, and map what it wrote."""
    group, cache = session.group, session.run_dir / ".tokens"
    pulse = _pulse(session)
    mine: list[Prepared] = []

    def prepare() -> str:
        with Heartbeat(pulse) as heartbeat:
            prepared = prepare_datasets(
                config.data,
                config.template,
                encoder,
                seed=data_seed(config),
                run_dir=session.run_dir,
                store=cache,
                progress=_show_progress(session, heartbeat),
                row_layout=session.method.row_layout,
            )
            mine.append(prepared)
            if group.world_size > 1:
                prepared.save(cache)
        return prepared.fingerprint

    session.at_close.append(lambda: shutil.rmtree(cache, ignore_errors=True))  # mapped until then
    fingerprint = group.from_main(prepare, watch=Watch(pulse, "rank 0 prepares the data").check)
    return mine[0] if group.main else load_prepared(cache, fingerprint)


def build_train_set(config: TrainConfig, session: Session, encoder: TemplateEncoder, prepared: Prepared) -> TrainSet:
    """What is trained on: the examples that were prepared, or files that are read while training."""
    seed = data_seed(config)
    if not config.data.streaming:
        return PreparedSet(
            prepared.train, prepared.parts, config.data, seed, prepared.difficulty, prepared.ledger.encoding
        )
    sources, held_out = resolve_sources(config.data)
    augmented = augmenting(encoder, config.data, seed=seed, train=sources, validation=held_out)
    saved = None
    if session.resumed is not None and session.continues:
        saved = read_data_state(session.resumed.path).get("facts")

    def look(facts: dict[str, Any] | None, *, from_main: bool = False) -> StreamSet:
        settings = (sources, config.data, config.template, augmented)
        layout = session.method.row_layout
        return open_stream(*settings, seed=seed, saved=facts, from_main=from_main, row_layout=layout)

    found = session.group.from_main(lambda: look(saved).saved_facts())
    train = look(found, from_main=True)
    train.ledger_path = session.run_dir / "ledger.jsonl" if session.group.main else None
    return train


def _show_progress(session: Session, heartbeat: Heartbeat) -> Callable[[Progress], None]:
    """A line now and then while rows are read, with the time left."""
    said_s = 0.0

    def show(progress: Progress) -> None:
        nonlocal said_s
        heartbeat.say(f"{100 * progress.share:.0f} % read, {progress.rows:,} rows")
        if progress.seconds - said_s < PROGRESS_EVERY_S or not progress.share:
            return
        said_s = progress.seconds
        left_s = progress.seconds * (1 - progress.share) / progress.share
        words = f"reading data: {100 * progress.share:.0f} %, {progress.rows:,} rows, about {left_s:.0f} s left"
        session.monitor.event("progress", words)

    return show


def evaluation_rhythm(config: TrainConfig, val: TokenDataset | None) -> EvalConfig:
    """When to evaluate: as asked, else whenever a checkpoint is due, else once at the end; never without rows."""
    if val is None:
        return replace(config.eval, eval_strategy="no")
    if config.eval.eval_strategy is None and config.checkpoint.save_strategy == "no":
        return replace(config.eval, eval_strategy="steps", eval_steps=config.eval.eval_steps)  # no steps: at the end
    return replace(
        config.eval,
        eval_strategy=config.eval.eval_strategy or config.checkpoint.save_strategy,
        eval_steps=config.eval.eval_steps or config.checkpoint.save_steps,
    )


def data_seed(config: TrainConfig) -> int:
    """Seed of sampling, splitting and order."""
    return config.training.seed if config.data.data_seed is None else config.data.data_seed
