"""docs/migrate.md as written: its diffs are applied to the recipes, and both run with the real library.

The recipes run in a folder of their own, against the installed package: with the repository's root on sys.path,
transformers would take our folder kernels/ for another package.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import fused_lw
from fused_lw import rules
from tests import optimizers
from tests.optimizers import MODULES

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
DOCS = (ROOT / "docs" / "migrate.md").read_text(encoding="utf-8")

# heading in the docs -> the recipe, what it imports, and how near its losses are (torch's iteration is bf16)
RECIPES = {
    "Hugging Face Trainer": ("hf_trainer", "transformers", 1e-4),
    "Lightning": ("lightning_module", "lightning", 2e-2),
    "PyTorch and DistributedDataParallel": ("ddp", "torch", 2e-2),
    "accelerate": ("accelerate_loop", "accelerate", 1e-4),
}
RUNNER = """
import gc, importlib, json, os, sys
import torch.distributed as dist
from fused_lw.update import Updater
steps, step = [], Updater.__call__
Updater.__call__ = lambda *args: steps.append(None) or step(*args)
result = importlib.import_module(sys.argv[1]).main() | {"steps of fused_lw": len(steps)}
if dist.is_initialized():
    gc.collect()  # DistributedDataParallel lies in a cycle, and gloo aborts a process that ends with its group alive
    dist.barrier()  # take the groups down together
    dist.destroy_process_group()
if os.environ.get("RANK", "0") == "0":
    open(f"{sys.argv[1]}.json", "w").write(json.dumps(result))
"""


def diff_under(heading: str) -> list[str]:
    section = DOCS.split(f"### {heading}\n", 1)[1].split("\n### ")[0].split("\n## ")[0]
    (block,) = re.findall(r"```diff\n(.*?)```", section, re.DOTALL)
    return block.splitlines()


def applied(source: str, diff: list[str]) -> str:
    """Apply a diff whose hunks are parted by @@; every hunk has to be found exactly once, as it stands."""
    for hunk in "\n".join(diff).split("\n@@\n"):
        lines = hunk.splitlines()
        before = "\n".join(line[1:] for line in lines if line[0] in " -") + "\n"
        after = "\n".join(line[1:] for line in lines if line[0] in " +") + "\n"
        assert source.count(before) == 1, f"{before!r} is in the recipe {source.count(before)} times"
        source = source.replace(before, after)
    return source


@pytest.mark.parametrize("heading", RECIPES)
def test_recipe_trains_and_resumes_as_before(heading, tmp_path):
    name, library, tolerance = RECIPES[heading]
    # Not importorskip: it would import the library here, with the repository's root on sys.path.
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    diff = diff_under(heading)
    added = [line for line in diff if line.startswith("+") and line != "+import fused_lw"]
    assert len(added) == 1, "swapping costs one line"

    source = (HERE / "recipes" / f"{name}.py").read_text(encoding="utf-8")
    (tmp_path / "before.py").write_text(source, encoding="utf-8")
    (tmp_path / "after.py").write_text(applied(source, diff), encoding="utf-8")
    (tmp_path / "runner.py").write_text(RUNNER, encoding="utf-8")
    shutil.copy(optimizers.__file__, tmp_path / "others.py")
    for module in ("muon", "toy_train"):
        (tmp_path / f"{module}.py").write_text(
            f"from others import MODULES\nglobals().update(vars(MODULES[{module!r}]))\n"
        )

    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "PYTHONPATH"))}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "0"}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if name == "ddp" else []
    results = []
    # A launch each: a second process group under the same launcher can read the first one's addresses, and hang.
    for module in ("before", "after"):
        command = [sys.executable, *launcher, "runner.py", module]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-3000:]
        results.append(json.loads((tmp_path / f"{module}.json").read_text()))

    before, after = results
    assert before["steps of fused_lw"] == 0
    assert after["steps of fused_lw"] >= len(after["losses"]) // 2  # of which accelerate accumulates two, and resumes
    torch.testing.assert_close(after["losses"], before["losses"], rtol=tolerance, atol=0)
    assert before["losses"][-1] < before["losses"][0]
    if name != "ddp":
        resumed = after["resumed"]
        assert len(resumed) == len(after["losses"]) // 2
        assert resumed == after["losses"][-len(resumed) :], "the next losses are equal"


def test_code_of_the_docs_runs(monkeypatch):
    optimizers.install(monkeypatch)
    monkeypatch.setattr(rules, "_BY_NAME", dict(rules._BY_NAME))
    monkeypatch.setattr(rules, "_BY_CLASS", dict(rules._BY_CLASS))

    class MyMuon(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.02, "weight_decay": 0.1, "beta": 0.95})

        def step(self, closure=None):
            raise AssertionError("not replaced")

    MyMuon.__module__, MyMuon.__qualname__ = "my_project.optim", "MyMuon"
    model = torch.nn.Sequential(torch.nn.Embedding(8, 16), torch.nn.Linear(16, 4))
    matrices = [model[1].weight]
    dion = MODULES["dion.muon"].Muon(matrices)
    own = [torch.nn.Parameter(torch.ones(4, 4))]
    for param in (*model.parameters(), *own):
        param.grad = torch.ones_like(param)
    dion.step()
    names = {
        "fused_lw": fused_lw,
        "rich": types.SimpleNamespace(print=lambda table: names.update(printed=table)),
        "model": model,
        "matrices": matrices,
        "dion_checkpoint": dion.state_dict(),
        "my_optimizer": MyMuon(own),
    }
    blocks = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, names)
        names["optimizer"].step()
    assert names["printed"].row_count == 3
    names["my_optimizer"].step()
    assert not torch.equal(own[0], torch.ones(4, 4))
    lines = [line for line in blocks[2].splitlines() if line.strip()]
    assert len(lines) - 1 <= 10, "ten lines for a rule, and one to use it"
