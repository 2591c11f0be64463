"""Compile every shipped configuration for its target without a GPU, and report what came out.

`python -m fused_lw.kernels.codegen [--target sm_90] [--json]`. Reports are cached by a hash of the kernels' source, the
configuration and Triton's version, in the user's cache directory (FUSED_LW_CONFIG_DIR moves it).
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fused_lw.kernels.configs import SHIPPED, Kind, ProductConfig, tuned_path
from fused_lw.kernels.device import interpreting
from fused_lw.kernels.merge import LaunchKey

TARGETS = tuple(arch for arch in SHIPPED if arch != "interpreter")

# What the four precisions multiply into what.
_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES: dict[Kind, tuple[tuple[torch.dtype, torch.dtype], ...]] = {
    "symmetric": (
        *((_BF16, out) for out in (_FP16, _BF16, _FP32)),
        *((_FP16, out) for out in (_FP16, _BF16, _FP32)),
        (_FP32, _FP32),
    ),
    "general": ((_BF16, _FP16), (_FP16, _FP16), (_BF16, _BF16), (_FP32, _FP32)),
    "update": ((_BF16, _FP16), (_FP16, _FP16), (_BF16, _BF16), (_FP32, _FP32)),
    "reduce": ((_FP32, _FP16), (_FP32, _BF16)),
    "onchip": ((_BF16, _FP16), (_FP16, _FP16), (_BF16, _BF16)),
}

# Parameters that the last product updates: dtype, stochastic rounding.
UPDATES = ((_FP32, False), (_BF16, False), (_BF16, True))
_SOURCES = ("grouped", "onchip", "pack_kernels", "rounding", "table", "codegen", "triton_backend")

_MMA = {"HGMMA": r"\bHGMMA\b", "UTCMMA": r"\bUTC\w*MMA\b", "HMMA": r"\bHMMA\b", "MFMA": r"\bv_mfma"}
# What copy-in reads and writes: gradient, momentum, workspace; and copy-out: factor, parameter, master weights,
# stochastic rounding. Each is compiled with 16-byte accesses and without.
PACKED_IN = (
    *((_FP32, _FP32, packed) for packed in (_BF16, _FP16, _FP32)),
    (_BF16, _BF16, _BF16),
    (_BF16, _FP32, _BF16),
    (_FP16, _FP32, _FP16),
)
PACKED_OUT = (
    (_FP16, _FP32, False, False),
    (_BF16, _FP32, False, False),
    (_FP16, _BF16, False, False),
    (_FP16, _BF16, True, False),
    (_FP16, _BF16, False, True),
    (_FP16, _FP16, False, False),
)

_COPIES = {"WIDE": r"\b(?:LDG|STG)\.E(?:\.\w+)*\.128\b", "LDGSTS": r"\bLDGSTS\b", "UTMALDG": r"\bUTMALDG\b"}
# Bytes of shared memory of a multiprocessor (LDS of a compute unit); a program takes 1 KB more than it uses.
_SHARED = {"sm_80": 167_936, "sm_120": 102_400, "gfx942": 66_560, "gfx950": 164_864}


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel as it ships: its arguments' types, its compile-time constants and Triton's options for a target."""

    name: str
    target: str
    module: str
    kernel: str
    runtime: dict[str, str]
    constants: dict[str, Any]
    config: dict[str, Any]
    num_warps: int
    num_stages: int = 3


@dataclass(frozen=True, slots=True)
class Report:
    """What a case compiled to.

    Attributes:
        spill_bytes: stack and local memory of a thread, bytes.
        shared_bytes: shared memory (LDS) of a program.
        mma, copies: instructions found in the machine code -> how often.
        programs_per_sm: programs that fit a multiprocessor at once.
    """

    name: str
    config: dict[str, Any]
    registers: int
    spill_bytes: int
    shared_bytes: int
    mma: dict[str, int]
    copies: dict[str, int]
    programs_per_sm: int


def cases(targets: Sequence[str] = TARGETS) -> Iterator[Case]:
    """Everything that ships for the targets."""
    for target in targets:
        for kind, dtypes in DTYPES.items():
            for operands, out in dtypes:
                for update in UPDATES if kind == "update" else (None,):
                    key = LaunchKey(kind, operands, out, update)
                    yield _product_case(key, target, SHIPPED[target][kind, operands.itemsize])
        yield from _pack_cases(target)


def _product_case(key: LaunchKey, target: str, config: ProductConfig) -> Case:
    # Imported by name, for it needs Triton.
    backend = importlib.import_module("fused_lw.kernels.triton_backend")
    dtypes = _arrows(key.operands, key.out)
    if key.update is not None:
        param, stochastic = key.update
        dtypes += f"->{_arrows(param)}{'-stochastic' * stochastic}"
    constants = backend.constants(key, config, interpret=False)
    num_warps, num_stages = constants.pop("num_warps"), constants.pop("num_stages")
    runtime = {"table": "*i64", "total_tiles": "i32"}
    if key.kind == "onchip":
        runtime = {"table": "*i64", "schedule": "*i64", "steps": "i32", "matrices": "i32", "q_scale": "fp32"}
    return Case(
        name=f"{target}/{key.kind}/{dtypes}",
        target=target,
        module=backend.KERNELS[key.kind].__module__,
        kernel=backend.KERNELS[key.kind].__name__,
        runtime=runtime,
        constants=constants,
        config=dataclasses.asdict(config),
        num_warps=num_warps,
        num_stages=num_stages,
    )


def _pack_cases(target: str) -> Iterator[Case]:
    pack = importlib.import_module("fused_lw.kernels.pack")

    def case(kernel: str, name: str, runtime: dict[str, str], **constants: Any) -> Case:
        config = {"block": constants["BLOCK"], "num_warps": pack.NUM_WARPS}
        module = "fused_lw.kernels.pack_kernels"
        return Case(f"{target}/{name}", target, module, kernel, runtime, constants, config, pack.NUM_WARPS)

    common = {"BLOCK": pack.BLOCK, "INTERPRET": False}
    tables = {"table": "*i64", "rules": "*fp32", "tile_matrix": "*i32", "partial": "*fp32"}
    for grad, momentum, packed in PACKED_IN:
        names = ("GRAD_DTYPE", "MOMENTUM_DTYPE", "PACKED_DTYPE")
        dtypes = dict(zip(names, map(pack.triton_dtype, (grad, momentum, packed)), strict=True))
        # An fp16 workspace is written in a second pass.
        for update, write in ((True, False), (False, True)) if packed == _FP16 else ((True, True),):
            name = f"copy_in/{_arrows(grad, momentum, packed)}" + "-second" * (not update)
            yield case("copy_in_kernel", name, tables, **dtypes, UPDATE=update, PACK=write, **common)
    for packed in (_BF16, _FP16):
        constants = {"PACKED_DTYPE": pack.triton_dtype(packed), "BLOCK": 1024}
        runtime = {"table": "*i64", "partial": "*fp32", "tiles": "i32"}
        yield case("sum_tiles_kernel", f"sum_tiles/{_arrows(packed)}", runtime, **constants)
    tables = {"table": "*i64", "rules": "*fp64", "tile_matrix": "*i32", "hyper": "*fp64"}
    for factor, param, master, stochastic in PACKED_OUT:
        name = f"copy_out/{_arrows(factor, param)}{'-master' * master}{'-stochastic' * stochastic}"
        dtypes = {"PARAM_DTYPE": pack.triton_dtype(param), "FACTOR_DTYPE": pack.triton_dtype(factor)}
        yield case("copy_out_kernel", name, tables, **dtypes, MASTER=master, STOCHASTIC=stochastic, **common)


def _arrows(*dtypes: torch.dtype) -> str:
    return "->".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def report(case: Case) -> Report:
    """Compile a case, or read what it compiled to before."""
    if interpreting():
        raise RuntimeError("kernels cannot be compiled under TRITON_INTERPRET=1: run this in a process without it")
    path = tuned_path(case.target).parent / "codegen" / f"{_digest(case)}.json"
    if path.exists():
        return Report(**json.loads(path.read_text(encoding="utf-8")))
    result = _inspect(case, _compile(case))
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written whole and then renamed: another process may be reading.
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        json.dump(dataclasses.asdict(result), file)
    os.replace(file.name, path)
    return result


def _digest(case: Case) -> str:
    import triton

    here = Path(__file__).parent
    digest = hashlib.sha256(repr((case, triton.__version__)).encode())
    for name in _SOURCES:
        digest.update((here / f"{name}.py").read_bytes())
    return digest.hexdigest()[:32]


def _compile(case: Case) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = [i for i, kind in enumerate(case.runtime.values()) if kind.startswith("*")]
    source = ASTSource(
        fn=getattr(importlib.import_module(case.module), case.kernel),
        signature={**case.runtime, **dict.fromkeys(case.constants, "constexpr")},
        constexprs=case.constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in pointers},
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    if case.target.startswith("sm_"):
        target = GPUTarget("cuda", int(case.target[3:]), 32)
    else:
        target = GPUTarget("hip", case.target, 64)
    return triton.compile(source, target=target, options=options)


def _inspect(case: Case, kernel: Any) -> Report:
    if case.target.startswith("sm_"):
        usage, code = _disassemble(kernel.asm["cubin"])
        registers = int(_only(r"REG:(\d+)", usage))
        spills = int(_only(r"STACK:(\d+)", usage)) + int(_only(r"LOCAL:(\d+)", usage))
        threads, all_registers = 32 * case.num_warps, 65_536
    else:
        code = kernel.asm["amdgcn"]
        registers = int(_only(r"\.vgpr_count:\s+(\d+)", code))
        spills = int(_only(r"\.private_segment_fixed_size:\s+(\d+)", code))
        # A compute unit has 4 x 512 vector registers of 64 lanes.
        threads, all_registers = 64 * case.num_warps, 131_072
    shared = int(kernel.metadata.shared)
    # Registers are given out in eights.
    by_registers = all_registers // (-(-registers // 8) * 8 * threads)
    by_shared = _SHARED.get(case.target, 233_472) // (shared + 1024)
    return Report(
        name=case.name,
        config=case.config,
        registers=registers,
        spill_bytes=spills,
        shared_bytes=shared,
        mma=_count(_MMA, code),
        copies=_count(_COPIES, code),
        programs_per_sm=min(by_registers, by_shared, 2_048 // threads),
    )


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """Resource usage and machine code, by the tools that come with Triton."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        commands = ([tools / "cuobjdump", "--dump-resource-usage"], [tools / "nvdisasm", "-c"])
        usage, code = (
            subprocess.run([*map(str, c), file.name], check=True, capture_output=True, text=True).stdout
            for c in commands
        )
    return usage, code


def _only(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"no {pattern!r} in what the compiler reports")
    return found.group(1)


def _count(patterns: dict[str, str], code: str) -> dict[str, int]:
    counts = {name: len(re.findall(pattern, code)) for name, pattern in patterns.items()}
    return {name: count for name, count in counts.items() if count}


def _print(reports: Sequence[Report]) -> None:
    columns = ("kernel", "configuration", "registers", "spills", "shared", "MMA", "copies", "programs/SM")
    table = Table(*columns, title="Compiled, not run")
    for r in reports:
        c = r.config
        shape = f"{c['block']} w{c['num_warps']}"
        if "tile_m" in c:
            shape = f"{c['tile_m']}x{c['tile_n']}x{c['block_k']} w{c['num_warps']} s{c['num_stages']}"
        numbers = (str(n) for n in (r.registers, r.spill_bytes, r.shared_bytes))
        mma, copies = (" ".join(f"{n} {k}" for k, n in counts.items()) for counts in (r.mma, r.copies))
        table.add_row(r.name, shape + (" tma" if c.get("tma") else ""), *numbers, mma, copies, str(r.programs_per_sm))
    Console().print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fused_lw.kernels.codegen", description=__doc__)
    parser.add_argument("--target", action="append", choices=TARGETS, help="may be repeated; all if left out")
    parser.add_argument("--only", default="", help="a part of the names of the kernels to compile")
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    args = parser.parse_args(argv)
    if interpreting():
        # Triton decides at import whether to interpret, so compiling takes a process of its own.
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        command = [sys.executable, "-m", "fused_lw.kernels.codegen", *(sys.argv[1:] if argv is None else argv)]
        return subprocess.run(command, env=environment, check=False).returncode
    reports = [report(case) for case in cases(args.target or TARGETS) if args.only in case.name]
    if args.json:
        print(json.dumps([dataclasses.asdict(r) for r in reports]))
    else:
        _print(reports)
    return 0


if __name__ == "__main__":
    sys.exit(main())
