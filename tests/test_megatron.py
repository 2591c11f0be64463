"""The Megatron-Core adapter on stand-ins with its names and signatures, and on the package where it is installed."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import types

import pytest
import torch

import fused_lw
from fused_lw import megatron
from fused_lw.layout import ParamSpec, plan
from tests import optimizers
from tests.optimizers import MODULES

CORE = "megatron.core"
REAL = importlib.util.find_spec("megatron") is not None


@dataclasses.dataclass
class PerBufferParamLayout:
    param_index_map: dict = dataclasses.field(default_factory=dict)
    bucket_indices: list = dataclasses.field(default_factory=list)
    per_bucket_numel_unpadded: list = dataclasses.field(default_factory=list)
    param_indices: list = dataclasses.field(default_factory=list)
    num_optimizer_shards: int | None = None


@pytest.fixture
def core(monkeypatch):
    """A Megatron-Core of today: the module of each stand-in, by its last name."""
    optimizers.install(monkeypatch)

    class LayerWiseDistributedOptimizer:
        @staticmethod
        def _compute_per_buffer_param_layout(
            params, bucket_size, data_parallel_world_size, ddp_config, param_indices=None
        ):
            return "theirs"

    sys.modules[CORE].__version__ = "0.99"
    found = {"emerging_optimizers": MODULES[f"{CORE}.optimizer.emerging_optimizers"]}
    for name, cls in (
        ("layer_wise_optimizer", LayerWiseDistributedOptimizer),
        ("param_layout", PerBufferParamLayout),
    ):
        module = found[name] = types.ModuleType(f"{CORE}.optimizer.{name}")
        setattr(module, cls.__name__, cls)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    yield types.SimpleNamespace(**found)
    megatron.uninstall()


def make_params(shapes, seed=0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def train(optimizer, steps: int = 3) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 + step)
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()


def compute(core, params, bucket_size, dp_size, *, busbw=False, **kwargs):
    config = types.SimpleNamespace(pad_buckets_for_high_nccl_busbw=busbw)
    method = core.layer_wise_optimizer.LayerWiseDistributedOptimizer._compute_per_buffer_param_layout
    return method(params, bucket_size, dp_size, config, **kwargs)


# The layout


@pytest.mark.parametrize(("policy", "numel"), [("balanced", 1280), ("megatron", 1408)])
def test_layout_is_ours_in_their_form(core, policy, numel):
    params = make_params([(192,), (8, 16), (8, 16), (16, 16), (192,), (192,)])  # backprop order is the reverse
    megatron.install(policy, step=False)
    layout = compute(core, params, 448, 2, param_indices=[5, 4, 3, 2, 1, 0])
    assert isinstance(layout, PerBufferParamLayout)
    ours = plan(
        [ParamSpec(str(i), tuple(p.shape)) for i, p in enumerate(params)], dp_size=2, bucket_size=448, policy=policy
    )
    assert layout.bucket_indices == [(bucket.start, bucket.end) for bucket in ours.buckets]
    assert layout.bucket_indices[-1][1] == ours.buffer_numel <= numel
    assert layout.per_bucket_numel_unpadded == [bucket.numel for bucket in ours.buckets]
    assert layout.param_indices == [5, 4, 3, 2, 1, 0]
    assert layout.num_optimizer_shards == 2
    for param, slot in zip(params, ours.slots, strict=True):
        assert layout.param_index_map[param] == (slot.start, slot.end, slot.bucket)


def test_layout_follows_the_tags(core):
    params = make_params([(32, 16), (10, 16), (32, 16), (32, 16)])
    params[0].shared_embedding = True
    params[1].is_gtp_weight_remat, params[1].gtp_remat_size, params[1].pad_length = True, 8, 3
    megatron.install(step=False)
    layout = compute(core, params, None, 2)
    tags = [{"shared_embedding": True}, {"gtp_size": 8, "pad_rows": 3}, {}, {}]
    specs = [ParamSpec(str(i), tuple(p.shape), **tag) for (i, p), tag in zip(enumerate(params), tags, strict=True)]
    slots = plan(specs, dp_size=2).slots
    assert [layout.param_index_map[param] for param in params] == [slot[:3] for slot in slots]
    embedding, _ = layout.bucket_indices[1]
    assert layout.param_index_map[params[0]] == (embedding, embedding + 512, 1), "alone, in shard 0"
    assert compute(core, params, None, 2, busbw=True).bucket_indices[0][1] % 2**16 == 0
    params[1].pad_length = 80
    with pytest.raises(ValueError, match=r"parameter 1.*leaves no row"):
        compute(core, params, None, 2)


# The step


def muon(core, params, **options):
    return core.emerging_optimizers.TensorParallelMuon(params, lr=0.02, weight_decay=0.1, **options)


@pytest.mark.parametrize("built", ["before install", "after install"])
def test_step_runs_ours_and_uninstall_gives_theirs_back(core, built):
    shapes = [(16, 24), (24, 16), (24, 24)]
    params, expected = make_params(shapes), make_params(shapes)
    train(muon(core, expected))
    theirs = core.layer_wise_optimizer.LayerWiseDistributedOptimizer
    methods = (vars(theirs)["_compute_per_buffer_param_layout"], core.emerging_optimizers.TensorParallelMuon.step)
    if built == "before install":
        optimizer = muon(core, params)
    megatron.install(backend="torch", max_scratch_bytes=10**6)
    if built == "after install":
        optimizer = muon(core, params)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("hook"))
    train(optimizer)
    assert calls == ["hook"] * 3
    assert optimizer._fused_lw.max_scratch_bytes == 10**6
    for a, b in zip(params, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)
    with pytest.raises(RuntimeError, match="installed already"):
        megatron.install()
    megatron.uninstall()
    assert type(optimizer) is core.emerging_optimizers.TensorParallelMuon
    assert methods == (vars(theirs)["_compute_per_buffer_param_layout"], type(optimizer).step)
    train(optimizer, 1)
    assert calls == ["hook"] * 4


def test_subclasses_keep_their_own_step(core):
    class WithoutUpdates(core.emerging_optimizers.TensorParallelMuon):
        def orthogonalize(self, p, grad):
            return torch.zeros_like(p)

    megatron.install(layout=False)
    (param,) = make_params([(8, 8)])
    before = param.detach().clone()
    train(WithoutUpdates([param], weight_decay=0.0), 1)
    assert torch.equal(param, before)


@pytest.mark.parametrize("tagged", [True, False], ids=["shapes of the parameter", "shapes of the optimizer"])
def test_fused_qkv_is_three_matrices_over_all_query_groups(core, tagged):
    """3 query groups of 4 query rows, 2 key rows and 2 value rows: Q is 12 rows, four in a row, eight apart."""
    (param,), (q, k, v) = make_params([(24, 16)]), make_params([(12, 16), (6, 16), (6, 16)])
    options = {"split_qkv": True, "is_qkv_fn": lambda p: getattr(p, "is_qkv", False)}
    param.is_qkv = True
    if tagged:
        param.qkv_split_shapes = [4, 2, 2]
    optimizer = fused_lw.replace_step(muon(core, [param], qkv_split_shapes=None if tagged else [4, 2, 2], **options))
    rows = torch.arange(24).view(3, 8)
    parts = [(q, rows[:, :4]), (k, rows[:, 4:6]), (v, rows[:, 6:])]
    for part, index in parts:
        part.data.copy_(param[index.reshape(-1)])
    apart = muon(core, [q, k, v])
    for step in range(3):
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(step))
        for part, index in parts:
            part.grad = param.grad[index.reshape(-1)]
        before = param.grad.clone()
        optimizer.step()
        apart.step()
        assert torch.equal(param.grad, before)
    for part, index in parts:
        torch.testing.assert_close(param[index.reshape(-1)], part, rtol=2e-5, atol=2e-6)


def test_qkv_that_a_rank_would_cut_is_refused(core):
    (param,) = make_params([(20, 16)])
    optimizer = muon(core, [param], split_qkv=True, is_qkv_fn=lambda p: True, qkv_split_shapes=[4, 2, 2])
    with pytest.raises(ValueError, match=r"\(20, 16\).*fused QKV of 20 rows.*\[4, 2, 2\].*whole groups"):
        fused_lw.replace_step(optimizer)


def test_blockwise_tensor_parallelism_orthogonalizes_each_block(core):
    group = types.SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    groups = types.SimpleNamespace(tp=group, expt_tp=group, gtp_remat=None, expt_gtp_remat=None)
    results = []
    for swap in (True, False):
        (param,) = make_params([(8, 16)])
        param.partition_dim = 0
        optimizer = muon(core, [param], pg_collection=groups, tp_mode="blockwise")
        train(fused_lw.replace_step(optimizer) if swap else optimizer)
        results.append(param)
    torch.testing.assert_close(*results, rtol=2e-5, atol=2e-6)


# Versions that lack something


def test_a_version_without_layouts_says_so_and_leaves_everything(core):
    cls = core.layer_wise_optimizer.LayerWiseDistributedOptimizer
    step = core.emerging_optimizers.TensorParallelMuon.step
    del cls._compute_per_buffer_param_layout
    with pytest.raises(RuntimeError, match=r"Megatron-Core 0\.99 has no _compute_per_buffer.*install\(layout=False\)"):
        megatron.install()
    assert core.emerging_optimizers.TensorParallelMuon.step is step
    cls._compute_per_buffer_param_layout = staticmethod(lambda params, bucket_size: None)
    with pytest.raises(RuntimeError, match=r"takes \(params, bucket_size\), expected \(params, .*ddp_config"):
        megatron.install()
    megatron.install(layout=False)
    assert core.emerging_optimizers.TensorParallelMuon.step is not step


def test_a_version_without_muon_says_so(core, monkeypatch):
    monkeypatch.setattr(core.emerging_optimizers, "TensorParallelMuon", type("TensorParallelMuon", (), {}))
    with pytest.raises(RuntimeError, match=r"has no TensorParallelMuon.*install\(step=False\)"):
        megatron.install()
    megatron.install(step=False)


@pytest.mark.skipif(REAL, reason="Megatron-Core is installed")
@pytest.mark.parametrize("options", [{"layout": False}, {"step": False}], ids=["step", "layout"])
def test_without_megatron_install_says_what_is_missing(options):
    with pytest.raises(ImportError, match="install Megatron-Core"):
        megatron.install(**options)


@pytest.mark.skipif(not REAL, reason="Megatron-Core is not installed")
def test_the_real_package_is_replaced_or_says_what_it_lacks():
    try:
        megatron.install()
    except RuntimeError as error:
        assert "Megatron-Core" in str(error)
        assert "install(" in str(error)
    finally:
        megatron.uninstall()
