"""Which parameters become specs, and which are refused by name."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from fused_lw.layout import ParamSpec, plan
from fused_lw.routing import classify, from_module


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.output = nn.Linear(8, 8, bias=False)  # not a head: it is inside a block
        self.conv = nn.Conv1d(8, 8, 3, groups=8)
        self.experts = nn.Parameter(torch.zeros(4, 16, 8))


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(32, 8)
        self.memory = nn.Embedding(5, 8)  # known by its type
        self.pos_embed = nn.Parameter(torch.zeros(1, 7, 8))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.patch = nn.Conv2d(3, 8, 4)
        self.output = nn.Linear(8, 32, bias=False)
        if tied:
            self.output.weight = self.wte.weight


def test_matrices_in_definition_order() -> None:
    specs = from_module(Model())
    assert [(spec.name, spec.shape) for spec in specs] == [
        ("blocks.0.experts", (4, 16, 8)),
        ("blocks.0.qkv.weight", (24, 8)),
        ("blocks.0.output.weight", (8, 8)),
        ("blocks.1.experts", (4, 16, 8)),
        ("blocks.1.qkv.weight", (24, 8)),
        ("blocks.1.output.weight", (8, 8)),
        ("patch.weight", (8, 3, 4, 4)),
    ]
    plan(specs, dp_size=2).validate()


def test_every_trainable_parameter_has_one_role() -> None:
    model = Model()
    model.blocks[0].qkv.weight.requires_grad_(False)
    roles = {name: role for name, _, role, _ in classify(model)}
    assert set(roles) == {name for name, param in model.named_parameters() if param.requires_grad}
    assert roles["wte.weight"] == roles["memory.weight"] == roles["pos_embed"] == "embedding"
    assert roles["output.weight"] == "head"
    assert roles["blocks.1.norm.weight"] == roles["blocks.1.qkv.bias"] == roles["patch.bias"] == "vector"
    assert roles["blocks.1.conv.weight"] == "other"
    assert Counter(roles.values())["matrix"] == 6


def test_tied_head_is_an_embedding_once() -> None:
    named = [(name, role) for name, _, role, _ in classify(Model(tied=True)) if role in ("embedding", "head")]
    assert named == [("pos_embed", "embedding"), ("wte.weight", "embedding"), ("memory.weight", "embedding")]


@pytest.mark.parametrize("prefix", ["", "module.", "model.", "_orig_mod.module."])
def test_names_alone(prefix: str) -> None:
    shapes = {"embed_tokens.weight": 2, "layers.0.mlp.weight": 2, "layers.0.output.weight": 2, "output.weight": 2}
    shapes |= {"lm_head.weight": 2, "norm.weight": 1}
    named = [(prefix + name, nn.Parameter(torch.zeros((4,) * ndim))) for name, ndim in shapes.items()]
    assert [spec.name for spec in from_module(named)] == [
        prefix + "layers.0.mlp.weight",
        prefix + "layers.0.output.weight",
    ]


def tagged(*shape: int, **tags: object) -> nn.Parameter:
    param = nn.Parameter(torch.zeros(shape))
    for tag, value in tags.items():
        setattr(param, tag, value)
    return param


def test_tags_decide() -> None:
    named = [
        ("lm_head.weight", tagged(8, 4, use_muon=True)),
        ("a", tagged(8, 4, use_muon=False)),
        ("b", tagged(8, 4, is_embedding_or_output_parameter=True)),
        ("c", tagged(2, 6, is_gtp_weight_remat=True, gtp_remat_size=4, pad_length=3)),
        ("d", tagged(8, 4, shared_embedding=True)),
        ("e", tagged(8, 4, shared_embedding=True, use_muon=False)),
        ("f", tagged(2, 6, gtp_remat_size=4)),  # not sharded without its tag
        ("g", tagged(2, 6, is_gtp_weight_remat=True, gtp_remat_size=4, pad_length=None)),
    ]
    assert from_module(named) == [
        ParamSpec("lm_head.weight", (8, 4)),
        ParamSpec("c", (2, 6), gtp_size=4, pad_rows=3),
        ParamSpec("d", (8, 4), shared_embedding=True),
        ParamSpec("f", (2, 6)),
        ParamSpec("g", (2, 6), gtp_size=4),
    ]
    assert from_module(named)[1].full_shape == (5, 6)


@pytest.mark.parametrize(
    ("param", "reason"),
    [
        pytest.param(tagged(4, use_muon=True), "not a matrix", id="vector"),
        pytest.param(tagged(0, 4), "no elements", id="empty"),
        pytest.param(tagged(4, 4, is_gtp_weight_remat=True), "gtp_remat_size", id="gtp-without-size"),
        pytest.param(tagged(2, 4, 4, is_gtp_weight_remat=True, gtp_remat_size=2), "two dimensions", id="gtp-3d"),
        pytest.param(tagged(2, 4, is_gtp_weight_remat=True, gtp_remat_size=2, pad_length=4), "no row", id="no-row"),
        pytest.param(tagged(2, 4, is_gtp_weight_remat=True, gtp_remat_size=2, pad_length="1"), "pad_length", id="pad"),
        pytest.param(nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64)), "floating point", id="complex"),
        pytest.param(nn.UninitializedParameter(), "not initialized", id="lazy"),
    ],
)
def test_refused_by_name(param: nn.Parameter, reason: str) -> None:
    with pytest.raises(ValueError, match=f"'odd'.*{reason}"):
        from_module([("ok", tagged(4, 4)), ("odd", param)])


def test_a_name_given_twice() -> None:
    with pytest.raises(ValueError, match="'w' is given twice"):
        from_module([("w", tagged(4, 4)), ("w", tagged(4, 4))])


def test_bare_parameters_are_refused() -> None:
    with pytest.raises(TypeError, match="pairs"):
        from_module([tagged(4, 4)])  # type: ignore[list-item]
