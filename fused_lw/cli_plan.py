"""`fused-lw plan`: plan layouts of a model's buffers and say what they cost, without a GPU and without weights."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple, get_args

from rich.console import Console
from rich.table import Table

from fused_lw.arguments import check_writable, elements
from fused_lw.layout import (
    CostModel,
    CostTable,
    Layout,
    ParamSpec,
    Policy,
    load_model,
    model_names,
    model_source,
    model_specs,
    plan,
)
from fused_lw.plot_layout import draw, require_matplotlib

EPILOG = """examples:
  fused-lw plan --model llama3-8b --dp 32 --bucket-size 400M --compare
  fused-lw plan --model deepseek-v3 --dp 64 --ep 8 --expert-dp 8 --compare --plot layout.png
  fused-lw plan --specs mine.json --dp 16 --json layout.json

A specs file lists parameters in forward order, sizes as one rank stores them:
  [{"name": "layers.0.qkv", "shape": [64, 8192], "gtp_size": 64, "pad_rows": 0}, ...]
A cost table holds measured seconds of batched Newton-Schulz:
  {"rows": [{"shape": [1024, 4096], "batch": 8, "seconds": 0.0011}, ...]}
"""


class Buffer(NamedTuple):
    """One packed buffer to plan: dense and expert matrices live in separate ones."""

    name: str
    specs: list[ParamSpec]
    dp_size: int


class Planned(NamedTuple):
    policy: Policy
    layout: Layout
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", metavar="NAME", help="a published model: " + ", ".join(model_names()))
    what.add_argument("--specs", type=Path, metavar="FILE.json", help="your own parameters (format below)")
    parser.add_argument("--dp", type=int, required=True, metavar="N", help="ranks that share the buffer: its shards")
    parser.add_argument("--ep", type=int, metavar="E", help="expert-parallel ranks that share the experts (default: 1)")
    parser.add_argument("--expert-dp", type=int, metavar="N", help="ranks that share the expert buffer (default: --dp)")
    parser.add_argument("--gtp", type=int, metavar="G", help="ranks over which rows of dense matrices lie (default: 1)")
    parser.add_argument(
        "--bucket-size",
        type=elements,
        metavar="S",
        help="elements a bucket holds at least, like 400M (default: one bucket)",
    )
    parser.add_argument("--policy", choices=get_args(Policy), default="balanced", help="default: balanced")
    parser.add_argument("--compare", action="store_true", help="show all policies side by side")
    parser.add_argument(
        "--cost",
        default="megatron",
        metavar="MODEL",
        help="megatron, flops or a cost table FILE.json (default: megatron)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the layout of --policy, for Layout.from_json")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw shards, buckets and cost per rank")


def run(args: argparse.Namespace) -> int:
    console = Console(highlight=False)
    try:
        cost = _cost(args.cost)
        buffers = _buffers(args)
        # Planning may take long: what cannot be written in the end is said first.
        outputs = [_outputs(args, f"-{buffer.name}" if len(buffers) > 1 else "") for buffer in buffers]
        if args.model is not None:
            console.print(f"shapes of {args.model}: {model_source(args.model)}\n", style="dim")
        for buffer, (json_path, plot_path) in zip(buffers, outputs, strict=True):
            planned = _plan(args, buffer, cost)
            _print(console, args, buffer, planned, cost)
            if json_path is not None:
                json_path.write_text(next(p.layout for p in planned if p.policy == args.policy).to_json())
                console.print(f"layout of the {args.policy} policy written to {json_path}")
            if plot_path is not None:
                draw([p.layout for p in planned], _title(args, buffer), plot_path)
                console.print(f"picture written to {plot_path}")
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"fused-lw plan: {error}", file=sys.stderr)
        return 2
    return 0


def _outputs(args: argparse.Namespace, suffix: str) -> tuple[Path | None, Path | None]:
    """Files of a buffer's layout and picture, which can be written."""
    json_path, plot_path = (path and path.with_stem(path.stem + suffix) for path in (args.json, args.plot))
    if plot_path is not None:
        require_matplotlib()
    for path in (json_path, plot_path):
        if path is not None:
            check_writable(path)
    return json_path, plot_path


def _cost(text: str) -> CostModel | CostTable:
    if text in get_args(CostModel):
        model: CostModel = "megatron" if text == "megatron" else "flops"
        return model
    path = Path(text)
    if not path.is_file():
        raise ValueError(f"--cost {text}: expected megatron, flops or the file of a cost table")
    return CostTable.from_json(path.read_text(), path.name)


def _buffers(args: argparse.Namespace) -> list[Buffer]:
    options = {"--ep": args.ep, "--expert-dp": args.expert_dp, "--gtp": args.gtp}
    if args.specs is not None:
        for option, value in options.items():
            if value is not None:
                raise ValueError(f"{option} goes with --model: a specs file has the sizes that one rank stores")
        return [Buffer("all", _read_specs(args.specs), args.dp)]
    kinds = {matrix.kind for matrix in load_model(args.model)}
    for kind, meant in (("expert", ("--ep", "--expert-dp")), ("dense", ("--gtp",))):
        for option in meant:
            if kind not in kinds and options[option] not in (None, 1):
                raise ValueError(f"{option} {options[option]} has no meaning: {args.model} has no {kind} matrices")
    expert_dp = args.dp if args.expert_dp is None else args.expert_dp
    ep, gtp = (1 if size is None else size for size in (args.ep, args.gtp))
    buffers = []
    for kind, dp_size in (("dense", args.dp), ("expert", expert_dp)):
        if kind in kinds:
            specs = model_specs(args.model, ep=ep, gtp=gtp, kinds=(kind,))
            buffers.append(Buffer(kind, specs, dp_size))
    return buffers


def _read_specs(path: Path) -> list[ParamSpec]:
    try:
        entries = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(entries, list):
        raise ValueError(f"{path}: expected a list of parameters, got {type(entries).__name__}")
    specs = []
    for i, entry in enumerate(entries):
        try:
            specs.append(ParamSpec(**entry))
        except TypeError as error:
            raise ValueError(
                f"{path}, parameter {i}: expected name, shape and perhaps gtp_size, pad_rows, shared_embedding "
                f"({error})"
            ) from error
    return specs


def _plan(args: argparse.Namespace, buffer: Buffer, cost: CostModel | CostTable) -> list[Planned]:
    policies: tuple[Policy, ...] = get_args(Policy)[::-1] if args.compare else (args.policy,)
    planned = []
    for policy in policies:
        with Console(stderr=True).status(
            f"planning the {buffer.name} buffer, {len(buffer.specs):,} matrices: {policy}"
        ):
            start = time.perf_counter()
            layout = plan(buffer.specs, dp_size=buffer.dp_size, bucket_size=args.bucket_size, policy=policy, cost=cost)
            planned.append(Planned(policy, layout, time.perf_counter() - start))
    return planned


def _title(args: argparse.Namespace, buffer: Buffer) -> str:
    name = args.model or args.specs.name
    numel = sum(spec.numel for spec in buffer.specs)
    bucket = "one bucket" if args.bucket_size is None else f"buckets of {_short(args.bucket_size)} or more"
    kind = "" if buffer.name == "all" else f"{buffer.name} "
    size = f"{len(buffer.specs):,} matrices, {_short(numel)} elements"
    return f"{name}, {kind}buffer: {size}, {buffer.dp_size} ranks, {bucket}"


def _print(
    console: Console,
    args: argparse.Namespace,
    buffer: Buffer,
    planned: list[Planned],
    cost: CostModel | CostTable,
) -> None:
    console.print(_title(args, buffer), style="bold")
    table = Table()
    table.add_column("")
    for policy, _, _ in planned:
        table.add_column(policy, justify="right", style="green" if policy == "balanced" else "")
    for label, values in _rows(planned, cost):
        table.add_row(label, *values)
    console.print(table)
    layouts = {policy: layout for policy, layout, _ in planned}
    if args.compare and layouts["balanced"].numel:
        ours, theirs = layouts["balanced"], layouts["megatron"]
        console.print(
            f"balanced against megatron: buffer {ours.buffer_numel / theirs.buffer_numel:.3f} times as large, "
            f"slowest rank {max(ours.shard_costs) / max(1, max(theirs.shard_costs)):.3f} times as costly."
        )
    console.print()


def _rows(planned: list[Planned], cost: CostModel | CostTable) -> list[tuple[str, list[str]]]:
    layouts = [layout for _, layout, _ in planned]
    unit = {"megatron": "max·min²", "flops": "flop"}.get(str(cost), "ms")

    def amount(value: float) -> str:
        return f"{value / 1e6:.3f}" if isinstance(cost, CostTable) else f"{value:.3e}"

    return [
        ("buckets", [f"{len(layout.buckets)}" for layout in layouts]),
        ("buffer, elements", [_short(layout.buffer_numel) for layout in layouts]),
        ("padding", [f"{layout.padding:.1%}" for layout in layouts]),
        (f"cost of the slowest rank, {unit}", [amount(max(layout.shard_costs)) for layout in layouts]),
        (f"lower bound, {unit}", [amount(layout.lower_bound) for layout in layouts]),
        ("over the lower bound", [f"{layout.over_bound:.1%}" for layout in layouts]),
        ("imbalance, max / mean", [f"{layout.imbalance:.3f}" for layout in layouts]),
        ("most batches on a rank", [f"{layout.launches}" for layout in layouts]),
        ("largest scratch of a batch", [_bytes(_scratch(layout)) for layout in layouts]),
        ("time to plan", [f"{seconds:.2f} s" for _, _, seconds in planned]),
    ]


def _scratch(layout: Layout) -> int:
    """Bytes of the batch that needs most: its packed input and the three squares of the iteration, 16 bits each."""
    owned = [Counter[tuple[int, int]]() for _ in range(layout.dp_size)]
    for spec, slot in zip(layout.params, layout.slots, strict=True):
        owned[slot.shard][spec.oriented] += spec.matrices
    return max((2 * n * (r * s + 3 * r * r) for batches in owned for (r, s), n in batches.items()), default=0)


def _short(count: int) -> str:
    for size, suffix in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.4g}{suffix}"
    return str(count)


def _bytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
