"""The command `fused-lw`: one subcommand a module, imported only when it is called."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

# name -> (module with `add_arguments(parser)` and `run(args) -> exit status`, one line of help)
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("fused_lw.demo", "train a small GPT with torch.optim.Muon and fused_lw.Muon side by side"),
    "doctor": ("fused_lw.doctor", "say what this machine has and what each shape would run on"),
    "tune": ("fused_lw.cli_tune", "measure kernel configurations on this machine's GPU and keep the fastest"),
    "bench": ("fused_lw.cli_bench", "measure the kernels and the step against their peers; report and compare results"),
    "profile": ("fused_lw.cli_profile", "record steps of a command and print where their time went, per rank"),
    "plan": ("fused_lw.cli_plan", "plan a layout for a model: buckets, padding, balance, launches"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `fused-lw ARGV` and return the exit status: 0 done, 1 the command found a failure, 2 bad usage."""
    parser = argparse.ArgumentParser(prog="fused-lw", description="Fused, layer-wise Muon for PyTorch.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    argv = list(sys.argv[1:] if argv is None else argv)
    for name, (module, help_text) in COMMANDS.items():
        sub = subparsers.add_parser(name, help=help_text, description=help_text)
        if argv[:1] == [name]:
            importlib.import_module(module).add_arguments(sub)
    args = parser.parse_args(argv)
    status: int = importlib.import_module(COMMANDS[args.command][0]).run(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
