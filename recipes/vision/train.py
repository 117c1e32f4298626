"""Trains the vision encoder: first to read patches, then to make the frozen trunk answer.

    python recipes/vision/train.py patches MODEL_FOLDER start.safetensors --seconds 60
    python recipes/vision/train.py answers MODEL_FOLDER encoder.safetensors --start start.safetensors

The first lesson needs only the model's tokenizer. The rate follows the clock, so a run ends when it should. A
finished encoder learns on with `answers --start vision.safetensors --patches-until 0 --rate 8e-4`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from batches import IGNORED, Batch, Lessons, Plan, lessons
from encoder_and_trunk import answer_logits, load_encoder, save_encoder
from font import CHARACTERS
from frozen import FrozenTrunk, random_trunk
from pictures import COLOURS, SHAPES
from questions import KINDS
from torch import Tensor
from vit import PatchReader, VisionEncoder, normalised

LABEL_CLASSES = (1 + len(SHAPES), 1 + len(COLOURS), 1 + len(CHARACTERS))
CONNECTOR_RATE = 2e-4  # it has 2,560 inputs, so small steps go far
DECAY = 0.05
LOG_EVERY_STEPS = 100
SAVE_EVERY_S = 60


class Trainer:
    """Steps over batches until the time is up. On a GPU a step is one CUDA graph over buffers that stay."""

    def __init__(
        self, options: argparse.Namespace, device: str, first: Batch, trunk: FrozenTrunk | None
    ) -> None:
        self.options, self.device, self.trunk = options, device, trunk
        torch.manual_seed(1)
        self.encoder = load_encoder(options.start, device) if options.start else VisionEncoder().to(device)
        self.reader = PatchReader(self.encoder.shape.hidden_size, LABEL_CLASSES).to(device)
        if options.start and _reader_file(options.start).is_file():
            self.reader.load_state_dict(torch.load(_reader_file(options.start), map_location=device))
        if options.compiled:
            for layer in self.encoder.vision_model.encoder.layers:
                layer.compile(dynamic=False)
        self.optimizer = _optimizer(self.encoder, self.reader, options.rate, device)
        self.reads_patches = trunk is None or options.patches_until > 0
        self.weight_of_patches = torch.ones((), device=device)
        self.batch = first.to(device)  # what a step learns from
        self.losses: dict[str, Tensor] = {}
        self.right: Tensor | None = None  # bool [n]: which tokens of answers are the model's first choice
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, batches: Iterator[Batch]) -> None:
        begun = time.monotonic()
        self._prepare()
        print(f"ready after {time.monotonic() - begun:.0f} s", flush=True)
        start = saved = logged = time.monotonic()
        step = 1
        done = torch.cuda.Event() if self.device == "cuda" else None
        while (now := time.monotonic()) - start < self.options.seconds:
            progress = (now - start) / self.options.seconds
            batch = next(batches)
            if done:
                done.synchronize()  # the step before
            self.batch.copy_(batch)
            self._set_rates(progress, step)
            self._step()
            if done:
                done.record()
            if step % LOG_EVERY_STEPS == 0:
                pace = LOG_EVERY_STEPS / (time.monotonic() - logged)
                print(f"step {step} {100 * progress:.1f} % {self.figures()} ({pace:.1f} steps/s)", flush=True)
                logged = time.monotonic()
            if now - saved > SAVE_EVERY_S:
                self.save()
                saved = now
            step += 1
        self.save()
        print(f"{step} steps in {time.monotonic() - start:.0f} s", flush=True)

    def figures(self) -> str:
        figures = [f"{name} {value.item():.4f}" for name, value in self.losses.items()]
        if self.right is not None:
            figures += [f"{kind} {100 * share:.0f}" for kind, share in self._right_answers().items()]
        return " ".join(figures)

    def _right_answers(self) -> dict[str, float]:
        """Of this step's answers, the share that is right to the letter, by kind of question."""
        batch, counts = self.batch, defaultdict(list)
        assert self.right is not None
        wrong = torch.zeros(len(batch.answers), device=self.device)
        wrong.index_add_(0, batch.answer_of, (~self.right & (batch.answers != IGNORED)).float())
        kinds = dict(zip(batch.answer_of.tolist(), batch.kinds.tolist(), strict=True))
        for number, errors in enumerate(wrong.tolist()):
            if number in kinds:
                counts[kinds[number]].append(errors == 0)
        return {KINDS[kind]: sum(right) / len(right) for kind, right in sorted(counts.items())}

    def _prepare(self) -> None:
        """Compiles and, on a GPU, records the step."""
        self._set_rates(0.0, 0)
        if self.device != "cuda":
            self._compute()
            return
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                self._compute()
        torch.cuda.current_stream().wait_stream(aside)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):  # workers pin memory
            self._compute()

    def _step(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            self._compute()

    def _set_rates(self, progress: float, step: int) -> None:
        share = min((step + 1) / self.options.warm_up_steps, 1.02 - progress)
        for group in self.optimizer.param_groups:
            group["lr"].fill_(group["peak"] * share)
        if self.trunk is not None and self.reads_patches:
            self.weight_of_patches.fill_(max(0.0, 1 - progress / self.options.patches_until))

    def _compute(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.encoder.parameters(), 1.0)
        self.optimizer.step()

    def _loss(self) -> Tensor:
        batch = self.batch
        if self.trunk is None:
            with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
                patches = self.encoder.vision_model(normalised(batch.pixels))
            loss = self.reader.loss(patches.float(), batch.labels)
            self.losses = {"patches": loss.detach()}
            return loss
        logits, patches = answer_logits(self.encoder, self.trunk, batch)
        loss = F.cross_entropy(logits, batch.answers, ignore_index=IGNORED)
        self.losses = {"answers": loss.detach()}
        self.right = logits.detach().argmax(-1) == batch.answers
        if self.reads_patches:
            reading = self.reader.loss(patches.float(), batch.labels)
            self.losses["patches"] = reading.detach()
            loss = loss + reading * self.weight_of_patches
        return loss

    def save(self) -> None:
        save_encoder(self.encoder, self.options.encoder, torch.float32)
        torch.save(self.reader.state_dict(), _reader_file(self.options.encoder))


def _reader_file(encoder_file: Path) -> Path:
    return encoder_file.with_suffix(".reader.pt")


def _optimizer(encoder: VisionEncoder, reader: PatchReader, rate: float, device: str) -> torch.optim.AdamW:
    matrices, others = [], []
    for module in (encoder.vision_model, reader):
        for name, weight in module.named_parameters():
            decays = weight.ndim > 1 and "position" not in name
            (matrices if decays else others).append(weight)
    groups = [
        {"params": matrices, "peak": rate, "weight_decay": DECAY},
        {"params": others, "peak": rate, "weight_decay": 0.0},
        {"params": list(encoder.connector.parameters()), "peak": CONNECTOR_RATE, "weight_decay": DECAY},
    ]
    for group in groups:
        group["lr"] = torch.tensor(0.0, device=device)  # a tensor, so that a recorded step sees it change
    on_gpu = device == "cuda"
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=on_gpu, capturable=on_gpu)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lesson", choices=("patches", "answers"))
    parser.add_argument("model", type=Path, help="the default model's folder")
    parser.add_argument("encoder", type=Path, help="the file to write")
    parser.add_argument("--start", type=Path, help="the file to begin with")
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--rate", type=float, default=1e-3, help="at its highest; the connector has its own")
    parser.add_argument("--warm-up-steps", type=int, default=200)
    parser.add_argument(
        "--patches-until",
        type=float,
        default=0.6,
        help="the share of the second lesson in which patches still count",
    )
    parser.add_argument(
        "--several", type=float, default=0.6, help="the share of rows that show several shapes"
    )
    parser.add_argument("--rows", type=int, default=64, help="of 256 tokens, in a batch")
    parser.add_argument("--workers", type=int, default=max(0, (os.cpu_count() or 1) - 3))
    parser.add_argument("--seed", default="training 1")
    parser.add_argument("--compiled", action="store_true", help="compile the layers")
    parser.add_argument(
        "--random-trunk", action="store_true", help="to time steps without the model's weights"
    )
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # the encoder's layers are compiled one by one
    device = "cuda" if torch.cuda.is_available() else "cpu"

    plan = Plan.of(options.rows, options.several)
    seed = f"{options.seed} {options.lesson}"
    batches = lessons(Lessons(options.model / "tokenizer.json", plan, seed), options.workers)
    first, trunk = next(batches), None
    if options.random_trunk:
        trunk = random_trunk(device, options.compiled)
    elif options.lesson == "answers":
        trunk = FrozenTrunk.load(options.model, device, options.compiled)
    Trainer(options, device, first, trunk).run(batches)


if __name__ == "__main__":
    main()
