"""A whole training run, from a model to a head file. An interrupted run can be resumed in every stage.

check -> synthesise -> train -> measure and write
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

from outrider.config import DEFAULT_HEAD_GROUP_SIZE
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
    num_bytes,
    quantized_weights,
    served_head,
    stored_weights,
    trunk_fingerprint,
    write_head,
)
from outrider.train.prompts import read_prompts
from outrider.train.report import Figures
from outrider.train.run_folder import RunFolder, RunRecord, check_same
from outrider.train.settings import MIN_CONVERSATIONS, TrainingSettings
from outrider.train.start import starting_head
from outrider.train.trainer import OnStep, Trainer

# Chosen by hand.
MIN_TARGETS = 512  # fewer targets than one small batch teach a head nothing
MIN_HELD_OUT = 2
START_TARGETS = 512  # targets for choosing the scale of the starting head
ROWS_ON_CPU, ROWS_ON_GPU = 16, 64  # conversations that are synthesised at once


@dataclass(frozen=True)
class Job:
    """The user's options."""

    model: str | Path
    given: Mapping[str, Any] = field(default_factory=dict)  # TrainingSettings that the user has set, by name
    out: Path | None = None
    prompts: Path | None = None
    resume: bool = False
    force: bool = False


@dataclass(frozen=True)
class Data:
    exchanges: list[Exchange]
    held_out: list[Exchange]


def _trunk_to_learn_from(folder: Path) -> Trunk:
    """On a CPU in float32: the operations for quantised weights there have no gradients."""
    return loader.load(folder, "float32" if machine.is_cpu() else "auto").trunk


def train_head(
    job: Job, listener: Listener = ignore, on_step: OnStep = lambda step, loss: None
) -> tuple[Path, Figures]:
    """Train a head and write its file. Raises TrainingError, ModelUnavailable or Interrupted."""
    prompts = read_prompts(job.prompts) if job.prompts else []
    folder = loader.find_folder(job.model)
    run_folder = RunFolder(_out(job, folder))
    _check_place(job, run_folder, folder)
    loaded = loader.load(folder)
    heads.head_kv_spec(heads.new_head(loaded.trunk), loaded.trunk)  # raises if its layer cannot be a head's
    if (how := _quantization(TrainingSettings(**job.given))) is not None:
        heads.quantize_layers(heads.new_head(loaded.trunk), how, loaded.trunk)  # raises if no layer fits
    fingerprint = trunk_fingerprint(folder.resolve().name, loaded.config)
    del loaded
    with run_folder.locked():
        record = _record(job, run_folder, fingerprint, prompts)
        try:
            data = _synthesise(folder, record, run_folder, listener)
            trunk = _trunk_to_learn_from(folder)
            state = _train(trunk, data, record.settings, run_folder.folder, listener, on_step)
            figures = _finish(trunk, data, record, state, run_folder.out)
        except KeyboardInterrupt:
            raise Interrupted("between two stages") from None
        run_folder.remove()
    return run_folder.out, figures


# -- check -----------------------------------------------------------------------------------------------


def _out(job: Job, folder: Path) -> Path:
    if job.out is None:
        return folder / heads.HEAD_FILES[0]
    if job.out.suffix != ".safetensors":
        raise TrainingError(f"--out {job.out}: a head is a file whose name ends with .safetensors.")
    return job.out.expanduser()


def _check_place(job: Job, run_folder: RunFolder, folder: Path) -> None:
    """Check the output file and the run folder before any work is done."""
    if job.resume:
        if not run_folder.is_begun:
            raise TrainingError(f"There is nothing to resume: {run_folder.folder} holds no unfinished run.")
        return
    present = run_folder.out if run_folder.out.exists() else None
    if job.out is None:
        present = heads.find_head(folder)
        if not os.access(folder, os.W_OK):
            raise TrainingError(f"{folder} cannot be written to: name a file for the head with --out.")
    if present is not None and not job.force:
        raise TrainingError(f"{present} exists already: replace it with --force, or name another with --out.")
    if run_folder.is_begun and not job.force:
        raise TrainingError(
            f"{run_folder.folder} holds an unfinished run: go on with --resume, or start afresh with --force."
        )


def _record(job: Job, run_folder: RunFolder, trunk: dict[str, str], prompts: list) -> RunRecord:
    if job.resume:
        record = run_folder.record()
        check_same(record, trunk, job.given, prompts)
        return record
    given = dict(job.given)
    if prompts:
        given.setdefault("conversations", max(MIN_CONVERSATIONS, len(prompts)))
    record = RunRecord(trunk, TrainingSettings(**given), prompts)
    run_folder.begin(record)
    return record


# -- synthesise ------------------------------------------------------------------------------------------


def _synthesise(folder: Path, record: RunRecord, run_folder: RunFolder, listener: Listener) -> Data:
    file = ExchangeFile(run_folder.conversations)
    if len(file.read()) < record.settings.conversations:
        try:
            _run_engine(folder, record, file, listener)
        except KeyboardInterrupt:
            raise Interrupted(f"with {len(file.read()):,} conversations") from None
        gc.collect()  # free the engine's weights before the trainer loads its own
        mx.clear_cache()
    conversations = file.read()
    exchanges = [one for number in sorted(conversations) for one in conversations[number]]
    data = Data(
        [one for one in exchanges if not one.is_held_out], [one for one in exchanges if one.is_held_out]
    )
    num_targets = sum(one.num_targets for one in data.exchanges)
    if num_targets < MIN_TARGETS or len(data.held_out) < MIN_HELD_OUT:
        raise TrainingError(
            f"Too little data: {num_targets} targets and {len(data.held_out)} held-out answers, at least "
            f"{MIN_TARGETS} and {MIN_HELD_OUT} are needed. Start afresh with more --conversations."
        )
    return data


def _run_engine(folder: Path, record: RunRecord, file: ExchangeFile, listener: Listener) -> None:
    num_rows = ROWS_ON_CPU if machine.device_name() == "cpu" else ROWS_ON_GPU
    with LLM(folder, drafter="none", max_rows=num_rows, generation_config="none") as llm:
        synthesis = Synthesis(llm.async_engine, llm.tokenizer, record.settings, record.prompts)
        synthesis.check_prompts()
        synthesise(synthesis, file, record.settings.conversations, num_rows, listener)


# -- train, measure, write -------------------------------------------------------------------------------


def _train(
    trunk: Trunk, data: Data, settings: TrainingSettings, folder: Path, listener: Listener, on_step: OnStep
) -> TrainState:
    state = checkpoint.load(folder)
    if state is None:
        some = next(batches_from(0, data.exchanges, min(START_TARGETS, settings.batch_tokens), settings.seed))
        head = starting_head(trunk, make_batch(some, depths=1), settings.seed)
        state = TrainState(0, head.parameters(), {})
    trainer = Trainer(trunk, data.exchanges, data.held_out, settings, folder, listener, on_step)
    return trainer.run(state)


def _quantization(settings: TrainingSettings) -> heads.Quantization | None:
    if settings.bits is None:
        return None
    return heads.Quantization(settings.bits, settings.group_size or DEFAULT_HEAD_GROUP_SIZE)


def _finish(trunk: Trunk, data: Data, record: RunRecord, state: TrainState, out: Path) -> Figures:
    """Measure and write the head: if it is to be quantised, the quantised one."""
    weights = stored_weights(state.head)
    metadata, quantized = {}, None
    if (how := _quantization(record.settings)) is not None:
        bytes_before = num_bytes(weights)
        weights, layers = quantized_weights(weights, how, trunk)
        metadata, quantized = layers.metadata(), layers.describe(bytes_before, num_bytes(weights))
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
        quantized=quantized,
    )
    settings_used = {"settings": json.dumps(asdict(record.settings))}
    write_head(out, weights, draft_ids, {**record.trunk, **figures.metadata(), **settings_used, **metadata})
    heads.load_head(out, trunk)
    return figures
