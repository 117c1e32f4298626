"""Trains the eye: first to read patches, then to make the frozen trunk answer.

    python train/vision/train.py patches MODEL_FOLDER start.safetensors --seconds 60
    python train/vision/train.py answers MODEL_FOLDER eye.safetensors --start start.safetensors --seconds 400

The first lesson needs only the model's tokenizer. The rate follows the clock, so a run ends when it should. A
finished eye learns on with `answers --start vision.safetensors --patches-until 0 --rate 6e-4`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from batches import Batch, Lessons, lessons
from font import CHARACTERS
from frozen import FrozenTrunk, random_trunk
from pictures import COLOURS, SHAPES
from seeing import answer_logits, load_eye, save_eye
from torch import Tensor
from vit import Eye, PatchReader, normalised

LABEL_CLASSES = (1 + len(SHAPES), 1 + len(COLOURS), 1 + len(CHARACTERS))
CONNECTOR_RATE = 2e-4  # it has 2,560 inputs, so small steps go far
DECAY = 0.05
LOG_EVERY_STEPS = 100
SAVE_EVERY_S = 60


class Trainer:
    """Steps over batches until the time is up."""

    def __init__(self, options: argparse.Namespace, device: str) -> None:
        self.options, self.device = options, device
        torch.manual_seed(1)
        self.eye = load_eye(options.start, device) if options.start else Eye().to(device)
        self.reader = PatchReader(self.eye.shape.hidden_size, LABEL_CLASSES).to(device)
        if options.start and _reader_file(options.start).is_file():
            self.reader.load_state_dict(torch.load(_reader_file(options.start), map_location=device))
        if options.compiled:
            for layer in self.eye.vision_model.encoder.layers:
                layer.compile(dynamic=False)
        self.optimizer = _optimizer(self.eye, self.reader, options.rate, device)
        self.trunk: FrozenTrunk | None = None

    def run(self, batches: Iterator[Batch]) -> None:
        first = next(batches).to(self.device)
        self._step(first, 0.0, 0)  # compiles
        self._synchronise()
        start = saved = logged = time.monotonic()
        step = 1
        while (now := time.monotonic()) - start < self.options.seconds:
            progress = (now - start) / self.options.seconds
            losses = self._step(next(batches).to(self.device), progress, step)
            if step % LOG_EVERY_STEPS == 0:
                figures = " ".join(f"{name} {value.item():.4f}" for name, value in losses.items())
                pace = LOG_EVERY_STEPS / (time.monotonic() - logged)
                print(f"step {step} {100 * progress:.1f} % {figures} ({pace:.1f} steps/s)", flush=True)
                logged = time.monotonic()
            if now - saved > SAVE_EVERY_S:
                self.save()
                saved = now
            step += 1
        self.save()
        print(f"{step} steps in {time.monotonic() - start:.0f} s", flush=True)

    def _step(self, batch: Batch, progress: float, step: int) -> dict[str, Tensor]:
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * min((step + 1) / self.options.warm_up_steps, 1.02 - progress)
        losses = self._losses(batch)
        loss = losses["patches"] * self._weight_of_patches(progress)
        if "answers" in losses:
            loss = loss + losses["answers"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.eye.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return losses

    def _weight_of_patches(self, progress: float) -> float:
        if self.trunk is None:
            return 1.0
        until = self.options.patches_until
        return max(0.0, 1 - progress / until) if until else 0.0

    def _losses(self, batch: Batch) -> dict[str, Tensor]:
        if self.trunk is None:
            with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
                patches = self.eye.vision_model(normalised(batch.pixels))
            return {"patches": self.reader.loss(patches.float(), batch.labels)}
        logits, patches = answer_logits(self.eye, self.trunk, batch)
        losses = {"answers": F.cross_entropy(logits, batch.answers)}
        with torch.no_grad():
            losses["right"] = (logits.argmax(-1) == batch.answers).float().mean()
        losses["patches"] = self.reader.loss(patches.float(), batch.labels)
        return losses

    def save(self) -> None:
        save_eye(self.eye, self.options.eye, torch.float32)
        torch.save(self.reader.state_dict(), _reader_file(self.options.eye))

    def _synchronise(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def _reader_file(eye_file: Path) -> Path:
    return eye_file.with_suffix(".reader.pt")


def _optimizer(eye: Eye, reader: PatchReader, rate: float, device: str) -> torch.optim.AdamW:
    matrices, others = [], []
    for module in (eye.vision_model, reader):
        for name, weight in module.named_parameters():
            decays = weight.ndim > 1 and "position" not in name
            (matrices if decays else others).append(weight)
    groups = [
        {"params": matrices, "peak": rate, "weight_decay": DECAY},
        {"params": others, "peak": rate, "weight_decay": 0.0},
        {"params": list(eye.connector.parameters()), "peak": CONNECTOR_RATE, "weight_decay": DECAY},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=device == "cuda")


def time_trunk(trainer: Trainer, batches: Iterator[Batch], steps: int = 30) -> None:
    """Prints the pace of the second lesson with random weights in the trunk's place."""
    trainer.trunk = random_trunk(trainer.device, trainer.options.compiled)
    state = {name: value.clone() for name, value in trainer.eye.state_dict().items()}
    begun = time.monotonic()
    for step in range(steps + 1):
        trainer._step(next(batches).to(trainer.device), 0.99, 0)
        if step == 0:
            trainer._synchronise()
            print(f"first step: {time.monotonic() - begun:.1f} s", flush=True)
            begun = time.monotonic()
    trainer._synchronise()
    print(f"answers: {1000 * (time.monotonic() - begun) / steps:.1f} ms a step", flush=True)
    trainer.eye.load_state_dict(state)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lesson", choices=("patches", "answers"))
    parser.add_argument("model", type=Path, help="the default model's folder")
    parser.add_argument("eye", type=Path, help="the file to write")
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
        "--several", action="store_true", help="draw pictures of several shapes twice as often"
    )
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--width", type=int, default=128, help="tokens a row")
    parser.add_argument("--workers", type=int, default=max(0, (os.cpu_count() or 1) - 3))
    parser.add_argument("--seed", default="training 1")
    parser.add_argument("--compiled", action="store_true", help="compile the layers")
    parser.add_argument("--time-trunk", action="store_true", help="time the second lesson after the first")
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # the eye's layers are compiled one by one
    device = "cuda" if torch.cuda.is_available() else "cpu"

    tokenizer_file = options.model / "tokenizer.json"
    seed = f"{options.seed} {options.lesson}"
    several = 2 if options.several else 1
    batches = lessons(Lessons(tokenizer_file, options.rows, options.width, seed, several), options.workers)
    trainer = Trainer(options, device)
    if options.lesson == "answers":
        trainer.trunk = FrozenTrunk.load(options.model, device, options.compiled)
    trainer.run(batches)
    if options.time_trunk:
        time_trunk(trainer, batches)


if __name__ == "__main__":
    main()
