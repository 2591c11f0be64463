"""`fused-lw demo`: a small GPT trained with `torch.optim.Muon` and `fused_lw.Muon` side by side, then onwards."""

from __future__ import annotations

import argparse
import csv
import importlib.util
import math
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 the name everybody uses

from fused_lw.arguments import check_writable, usable_device
from fused_lw.kernels.device import explain_backend
from fused_lw.muon import Muon
from fused_lw.plain import PlainMuon
from fused_lw.routing import split_params

CONTEXT = 128  # bytes
BATCH = 16
TEXT_BYTES = 8_000_000
MUON_OPTIONS = {"lr": 0.02, "weight_decay": 0.05, "momentum": 0.95}
ADAMW_OPTIONS = {"lr": 2e-3, "weight_decay": 0.0, "betas": (0.9, 0.95)}
FALL = 0.8  # the validation loss has to end below this share of where it began


class Block(nn.Module):
    """Pre-norm attention and MLP, without biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [batch, context, width]
        batch, context, width = x.shape
        q, k, v = (
            part.view(batch, context, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).split(width, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, context, width))
        out: Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return out


class ByteGPT(nn.Module):
    """A byte-level GPT of 1.9 million parameters."""

    def __init__(self, width: int = 192, layers: int = 4, heads: int = 6) -> None:
        if width % heads:
            raise ValueError(f"width must be a multiple of {heads}, the number of heads; got {width}")
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, context] -> [batch, context, 256]
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:  # windows: [batch, context + 1] uint8
    tokens = windows.long()
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@dataclass
class Text:
    """The source files of the running Python's standard library: one in ten is for validation."""

    train: Tensor  # uint8 [bytes]
    validation: Tensor

    @classmethod
    def read(cls, device: torch.device) -> Text:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        files += sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*/*.py"))
        parts: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        for index, path in enumerate(files):
            parts[index % 10 == 0].extend(path.read_bytes())
            if sum(map(len, parts)) > TEXT_BYTES:
                break
        train, validation = (torch.frombuffer(part, dtype=torch.uint8).to(device) for part in parts)
        return cls(train, validation)

    def batches(self, seed: int) -> Iterator[Tensor]:  # each [BATCH, CONTEXT + 1]
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield self._windows(self.train, torch.randint(len(self.train) - CONTEXT, (BATCH,), generator=generator))

    @torch.no_grad()
    def validate(self, model: nn.Module, batches: int = 8) -> float:
        """Mean loss over evenly spread windows of the validation text, in nats per byte."""
        starts = torch.linspace(0, len(self.validation) - CONTEXT - 1, batches * BATCH).long().view(batches, BATCH)
        return statistics.fmean(float(loss_of(model, self._windows(self.validation, part))) for part in starts)

    def _windows(self, text: Tensor, starts: Tensor) -> Tensor:
        offsets = starts[:, None] + torch.arange(CONTEXT + 1)
        return text[offsets.to(text.device)]


class Run:
    """A model with AdamW on embeddings, norms and head, and a Muon on the matrices of its blocks."""

    def __init__(self, model: nn.Module, muon_class: Callable[..., torch.optim.Optimizer]) -> None:
        self.model = model
        split = split_params(model)
        self.muon = muon_class(split.matrices, **MUON_OPTIONS)
        self.adamw = torch.optim.AdamW(split.others, **ADAMW_OPTIONS)  # type: ignore[arg-type]
        self.losses: list[float] = []
        self.muon_seconds: list[float] = []

    def step(self, windows: Tensor) -> None:
        loss = loss_of(self.model, windows)
        loss.backward()  # type: ignore[no-untyped-call]
        _synchronize(windows.device)
        start = time.perf_counter()
        self.muon.step()
        _synchronize(windows.device)
        self.muon_seconds.append(time.perf_counter() - start)
        self.adamw.step()
        self.muon.zero_grad()
        self.adamw.zero_grad()
        self.losses.append(float(loss.detach()))

    def distance(self, other: Run) -> float:
        """Relative distance of the weights that Muon trains: ||W - W'|| / ||W'||."""
        pairs = list(zip(self._weights(), other._weights(), strict=True))
        return math.sqrt(sum(float((a - b).square().sum()) for a, b in pairs)) / math.sqrt(
            sum(float(b.square().sum()) for _, b in pairs)
        )

    def _weights(self) -> list[Tensor]:
        return [p.detach() for group in self.muon.param_groups for p in group["params"]]


class Comparison:
    """`torch.optim.Muon` and `fused_lw.Muon` from one start on the same batches.

    torch computes the iteration in bf16, so the two must differ; by how much at most, a third run tells: torch's
    rule computed plainly in float32. Ours must stay nearer to it than torch's own bf16 run does.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self.torch_run, self.ours, self.exact = self.runs = tuple(
            self._fresh(muon_class, device, seed) for muon_class in (torch.optim.Muon, Muon, PlainMuon)
        )
        # On a GPU ours rounds its input to bf16 too; on a CPU everything is float32.
        self.allowed = 1.0 if device.type == "cuda" else 0.1
        self.steps = 0

    @staticmethod
    def _fresh(muon_class: Callable[..., torch.optim.Optimizer], device: torch.device, seed: int) -> Run:
        torch.manual_seed(seed)
        return Run(ByteGPT().to(device), muon_class)

    def step(self, windows: Tensor) -> None:
        for run in self.runs:
            run.step(windows)
        self.steps += 1

    def outcome(self) -> Outcome:
        losses = [run.losses[: self.steps] for run in self.runs]
        seconds = zip(self.torch_run.muon_seconds, self.ours.muon_seconds, strict=True)
        ratios = [torch_seconds / ours_seconds for torch_seconds, ours_seconds in seconds]
        torch_distance, ours_distance = (run.distance(self.exact) for run in (self.torch_run, self.ours))
        return Outcome(
            losses=losses,
            step_ms=[statistics.median(run.muon_seconds) * 1e3 for run in self.runs],
            speedup=statistics.median(ratios[1:] or ratios),
            loss_difference=max(abs(a - b) for a, b in zip(losses[0], losses[1], strict=True)),
            weight_difference=self.ours.distance(self.torch_run),
            distances=[torch_distance, ours_distance],
            agree=ours_distance <= self.allowed * torch_distance,
        )


class Outcome(NamedTuple):
    """What the comparison found. Lists are in the order torch, ours, float32."""

    losses: list[list[float]]
    step_ms: list[float]  # median of the optimizer step
    speedup: float  # median ratio of paired step times, without the first step, which allocates
    loss_difference: float  # largest, torch to ours
    weight_difference: float  # relative, torch to ours
    distances: list[float]  # relative distance of the weights to the float32 run
    agree: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--compare-seconds", type=float, default=45, help="time for the comparison (default: 45)")
    parser.add_argument("--train-seconds", type=float, default=90, help="time to train on (default: 90)")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="where loss.csv and loss.png go")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    console = Console(highlight=False)
    csv_path, png_path = args.out / "loss.csv", args.out / "loss.png"
    try:
        device = usable_device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        args.out.mkdir(parents=True, exist_ok=True)
        for path in (csv_path, png_path):
            check_writable(path)
    except (ValueError, OSError) as error:
        print(f"fused-lw demo: {error}", file=sys.stderr)
        return 2
    text = Text.read(device)
    batches = text.batches(args.seed)
    comparison = Comparison(device, args.seed)
    ours = comparison.ours
    size = sum(p.numel() for p in ours.model.parameters())
    console.print(f"model: byte-level GPT, {size / 1e6:.1f} M parameters, on {device}")
    console.print(f"text: {(len(text.train) + len(text.validation)) / 1e6:.1f} MB of the standard library's source")
    console.print(f"backend: {explain_backend(device)}")

    validation: list[tuple[int, float]] = [(0, text.validate(ours.model))]
    _compare(comparison, batches, args.compare_seconds, console)
    outcome = comparison.outcome()
    _print_outcome(outcome, comparison.allowed, console)
    _train(ours, text, batches, args.train_seconds, validation, console)
    first, last = validation[0][1], validation[-1][1]
    console.print(
        f"validation loss: {first:.3f} -> {last:.3f} nats per byte in {len(ours.losses)} steps "
        f"({last / math.log(2):.2f} bits per byte)"
    )
    _write_csv(csv_path, outcome, ours.losses, validation, console)
    _write_png(png_path, outcome, ours.losses, validation, console)
    fell = last < FALL * first
    if not outcome.agree:
        console.print("[red]the two optimizers disagree beyond rounding")
    if not fell:
        console.print(f"[red]the validation loss did not fall below {FALL:.0%} of its start")
    return 0 if outcome.agree and fell else 1


def _compare(comparison: Comparison, batches: Iterator[Tensor], seconds: float, console: Console) -> None:
    start = time.perf_counter()
    with _progress(console) as progress:
        task = progress.add_task("comparing", total=seconds, note="")
        while comparison.steps == 0 or _time_for_one_more(start, seconds, comparison.steps):
            comparison.step(next(batches))
            elapsed = min(seconds, time.perf_counter() - start)
            progress.update(
                task, completed=elapsed, note=f"step {comparison.steps}, loss {comparison.ours.losses[-1]:.3f}"
            )
        progress.update(task, completed=seconds)


def _print_outcome(outcome: Outcome, allowed: float, console: Console) -> None:
    table = Table(title=f"{len(outcome.losses[0])} steps from one start on the same batches")
    table.add_column("optimizer")
    for heading in ("last loss", "optimizer step, ms", "weights' distance to float32"):
        table.add_column(heading, justify="right")
    names = ("torch.optim.Muon", "fused_lw.Muon", "torch's rule in float32")
    distances = (*(f"{distance:.1e}" for distance in outcome.distances), "")
    for name, losses, ms, distance in zip(names, outcome.losses, outcome.step_ms, distances, strict=True):
        table.add_row(name, f"{losses[-1]:.5f}", f"{ms:.1f}", distance)
    console.print(table)
    console.print(f"torch to ours, largest difference of losses: {outcome.loss_difference:.1e}")
    console.print(f"torch to ours, relative difference of weights: {outcome.weight_difference:.1e}")
    console.print(f"torch to ours, ratio of optimizer-step times: {outcome.speedup:.2f}")
    verdict = "[green]agree within rounding[/]" if outcome.agree else "[red]disagree beyond rounding[/]"
    console.print(f"the two {verdict} (ours may be {allowed:g} times as far from float32 as torch's bf16 run is)")


def _train(
    run: Run,
    text: Text,
    batches: Iterator[Tensor],
    seconds: float,
    validation: list[tuple[int, float]],
    console: Console,
) -> None:
    """Train on for about `seconds`; the learning rates fall linearly to a tenth."""
    begun = time.perf_counter()
    run.step(next(batches))
    validation.append((len(run.losses), text.validate(run.model)))
    per_step = time.perf_counter() - begun  # with a validation in it: on the safe side
    for _ in range(3):
        begun = time.perf_counter()
        run.step(next(batches))
        per_step = min(per_step, time.perf_counter() - begun)
    steps = max(10, int(seconds / per_step))
    every = max(1, steps // 12)
    schedules = [
        torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps) for optimizer in (run.muon, run.adamw)
    ]
    start = time.perf_counter()
    with _progress(console) as progress:
        task = progress.add_task("training", total=steps, note="")
        for step in range(1, steps + 1):
            run.step(next(batches))
            for schedule in schedules:
                schedule.step()
            out_of_time = time.perf_counter() - start > 1.3 * seconds
            if step % every == 0 or step == steps or out_of_time:
                validation.append((len(run.losses), text.validate(run.model)))
            progress.update(task, advance=1, note=f"step {step} of {steps}, validation loss {validation[-1][1]:.3f}")
            if out_of_time:
                break


def _write_csv(
    path: Path, outcome: Outcome, losses: list[float], validation: list[tuple[int, float]], console: Console
) -> None:
    columns = {
        "torch_loss": dict(enumerate(outcome.losses[0], 1)),
        "fused_lw_loss": dict(enumerate(losses, 1)),
        "float32_loss": dict(enumerate(outcome.losses[2], 1)),
        "validation_loss": dict(validation),
    }
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *columns])
        for step in range(len(losses) + 1):
            writer.writerow([step, *(column.get(step, "") for column in columns.values())])
    console.print(f"wrote {path}")


def _write_png(
    path: Path, outcome: Outcome, losses: list[float], validation: list[tuple[int, float]], console: Console
) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        console.print("no loss.png: matplotlib is missing (pip install 'fused-lw[plot]')")
        return
    from matplotlib.figure import Figure  # no pyplot: no display is needed

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    compared = len(outcome.losses[0])
    steps = range(1, compared + 1)
    left.plot(steps, outcome.losses[0], label="torch.optim.Muon (bf16 iteration)", linewidth=4, alpha=0.4)
    left.plot(steps, outcome.losses[1], label="fused_lw.Muon", linewidth=1, marker=".")
    left.set_title(f"same start, same batches: step times {outcome.speedup:.1f} : 1")
    right.plot(range(1, len(losses) + 1), losses, alpha=0.4, label="training")
    right.plot(*zip(*validation, strict=True), marker="o", label="validation")
    right.axvline(compared, color="grey", linestyle=":", label="comparison ends")
    right.set_title("trained on with fused_lw.Muon")
    for axes in (left, right):
        axes.set(xlabel="step", ylabel="loss, nats per byte")
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    console.print(f"wrote {path}")


def _time_for_one_more(start: float, seconds: float, done: int) -> bool:
    elapsed = time.perf_counter() - start
    return elapsed + elapsed / done < seconds


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.fields[note]}"), console=console)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
