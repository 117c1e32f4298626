"""A whole training run: from a model to a head file, in stages that can each be taken up again.

    check -> synthesise -> train -> measure, write

The one module here that knows all the others.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from outrider.llm import LLM
from outrider.models import heads, loader, machine
from outrider.models.trunk import Trunk
from outrider.progress import Listener, ignore
from outrider.train import checkpoint
from outrider.train.batches import batches_from, make_batch
from outrider.train.checkpoint import TrainState
from outrider.train.conversations import Synthesis, synthesise
from outrider.train.errors import Interrupted, TrainingError
from outrider.train.evaluate import Acceptance, evaluate
from outrider.train.exchanges import Exchange, ExchangeFile
from outrider.train.head_file import (
    draft_vocabulary,
    served_head,
    stored_weights,
    trunk_fingerprint,
    write_head,
)
from outrider.train.prompts import read_prompts
from outrider.train.report import Figures
from outrider.train.settings import LEAST_CONVERSATIONS, Settings
from outrider.train.start import starting_head
from outrider.train.trainer import OnStep, Trainer
from outrider.train.workplace import RunRecord, Workplace, check_same

LEAST_TARGETS = 512
LEAST_HELD_OUT = 2
START_TARGETS = 512  # enough to choose a start by
ROWS_ON_CPU, ROWS_ON_GPU = 16, 64


@dataclass(frozen=True)
class Job:
    """What the user asked for; options that were not named are not in `asked`."""

    model: str | Path
    asked: Mapping[str, Any] = field(default_factory=dict)  # by the names of Settings
    out: Path | None = None
    prompts: Path | None = None
    resume: bool = False
    force: bool = False


@dataclass(frozen=True)
class Data:
    exchanges: list[Exchange]
    held_out: list[Exchange]


def train_head(
    job: Job, listener: Listener = ignore, on_step: OnStep = lambda step, loss: None
) -> tuple[Path, Figures]:
    """Train and write a head. Raises TrainingError or ModelUnavailable with the reason, or Interrupted."""
    prompts = read_prompts(job.prompts) if job.prompts else []
    folder = loader.find_folder(job.model)
    workplace = Workplace(_out(job, folder))
    _check_place(job, workplace, folder)
    trunk = _check_model(folder)
    with workplace.locked():
        record = _record(job, workplace, trunk, prompts)
        try:
            figures = _stages(folder, record, workplace, listener, on_step)
        except KeyboardInterrupt:
            raise Interrupted("between two stages") from None
        workplace.remove()
    return workplace.out, figures


def _stages(
    folder: Path, record: RunRecord, workplace: Workplace, listener: Listener, on_step: OnStep
) -> Figures:
    data = _synthesise(folder, record, workplace, listener)
    trunk = loader.load(folder).trunk
    state = _train(trunk, data, record.settings, workplace.folder, listener, on_step)
    return _finish(trunk, data, record, state, workplace.out)


# -- check -----------------------------------------------------------------------------------------------


def _out(job: Job, folder: Path) -> Path:
    if job.out is None:
        return folder / heads.HEAD_FILES[0]
    if job.out.suffix != ".safetensors":
        raise TrainingError(f"--out {job.out}: a head is a file whose name ends with .safetensors.")
    return job.out.expanduser()


def _check_place(job: Job, workplace: Workplace, folder: Path) -> None:
    """Refuse before any work is done."""
    if job.resume:
        if not workplace.is_begun:
            raise TrainingError(f"There is nothing to resume: {workplace.folder} holds no unfinished run.")
        return
    present = workplace.out if workplace.out.exists() else None
    if job.out is None:
        present = heads.find_head(folder)
        if not os.access(folder, os.W_OK):
            raise TrainingError(f"{folder} cannot be written to: name a file for the head with --out.")
    if present is not None and not job.force:
        raise TrainingError(f"{present} exists already: replace it with --force, or name another with --out.")
    if workplace.is_begun and not job.force:
        raise TrainingError(
            f"An unfinished run lies in {workplace.folder}: go on with --resume, or start over with --force."
        )


def _check_model(folder: Path) -> dict[str, str]:
    """The model's fingerprint; refuses a model that is not served or whose layer cannot be a head's."""
    loaded = loader.load(folder)
    heads.head_kv_spec(heads.new_head(loaded.trunk), loaded.trunk)
    return trunk_fingerprint(folder.resolve().name, loaded.config)


def _record(job: Job, workplace: Workplace, trunk: dict[str, str], prompts: list) -> RunRecord:
    if job.resume:
        record = workplace.record()
        check_same(record, trunk, job.asked, prompts)
        return record
    asked = dict(job.asked)
    if prompts:
        asked.setdefault("conversations", max(LEAST_CONVERSATIONS, len(prompts)))
    record = RunRecord(trunk, Settings(**asked), prompts)
    workplace.begin(record)
    return record


# -- synthesise ------------------------------------------------------------------------------------------


def _synthesise(folder: Path, record: RunRecord, workplace: Workplace, listener: Listener) -> Data:
    file = ExchangeFile(workplace.conversations)
    if len(file.read()) < record.settings.conversations:
        try:
            _run_engine(folder, record, file, listener)
        except KeyboardInterrupt:
            raise Interrupted(f"with {len(file.read()):,} conversations") from None
        gc.collect()  # the engine's copy of the weights goes before the trainer's comes
        mx.clear_cache()
    conversations = file.read()
    exchanges = [one for number in sorted(conversations) for one in conversations[number]]
    data = Data(
        [one for one in exchanges if not one.is_held_out], [one for one in exchanges if one.is_held_out]
    )
    _check_enough(data)
    return data


def _run_engine(folder: Path, record: RunRecord, file: ExchangeFile, listener: Listener) -> None:
    num_rows = ROWS_ON_CPU if machine.device_name() == "cpu" else ROWS_ON_GPU
    with LLM(folder, drafter="none", max_rows=num_rows) as llm:
        synthesis = Synthesis(llm.async_engine, llm.tokenizer, record.settings, record.prompts)
        synthesis.check_prompts()
        synthesise(synthesis, file, record.settings.conversations, num_rows, listener)


def _check_enough(data: Data) -> None:
    num_targets = sum(one.num_targets for one in data.exchanges)
    if num_targets < LEAST_TARGETS or len(data.held_out) < LEAST_HELD_OUT:
        raise TrainingError(
            f"Too little data: {num_targets} targets and {len(data.held_out)} held-out answers, where "
            f"{LEAST_TARGETS} and {LEAST_HELD_OUT} are the least. Start afresh with more --conversations."
        )


# -- train, measure, write -------------------------------------------------------------------------------


def _train(
    trunk: Trunk, data: Data, settings: Settings, folder: Path, listener: Listener, on_step: OnStep
) -> TrainState:
    state = checkpoint.load(folder)
    if state is None:
        some = next(batches_from(0, data.exchanges, min(START_TARGETS, settings.batch_tokens), settings.seed))
        head = starting_head(trunk, make_batch(some, depths=1), settings.seed)
        state = TrainState(0, head.parameters(), {})
    trainer = Trainer(trunk, data.exchanges, data.held_out, settings, folder, listener, on_step)
    return trainer.run(state)


def _finish(trunk: Trunk, data: Data, record: RunRecord, state: TrainState, out: Path) -> Figures:
    weights = stored_weights(state.head)
    head = served_head(weights, trunk)
    draft_ids = draft_vocabulary(data.exchanges, head, trunk)

    def measured(ids: mx.array | None) -> Acceptance:
        return evaluate(head, trunk, data.held_out, record.settings.depths, ids)

    whole = measured(None)
    figures = Figures(
        steps=state.step,
        num_targets=state.num_targets,
        trained_s=state.trained_s,
        num_held_out=len(data.held_out),
        at_start=state.milestones[0].held_out,
        whole_vocabulary=whole,
        draft_vocabulary=whole if draft_ids is None else measured(mx.sort(draft_ids)),
        num_draft_ids=None if draft_ids is None else draft_ids.size,
    )
    settings_used = {"settings": json.dumps(asdict(record.settings))}
    write_head(out, weights, draft_ids, {**record.trunk, **figures.metadata(), **settings_used})
    heads.load_head(out, trunk)
    return figures
