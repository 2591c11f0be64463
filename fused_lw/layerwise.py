"""Layer-wise distributed Muon: every matrix is orthogonalized by one rank and its weights are sent to the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NoReturn, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from fused_lw.agreement import agree
from fused_lw.aux_adamw import MuonWithAuxAdamW
from fused_lw.layout import Layout
from fused_lw.matrix_parts import OwnedMatrices
from fused_lw.muon import begin_step, end_step
from fused_lw.naming import Homes, named_groups
from fused_lw.replace import own_step
from fused_lw.replicas import Members, Replica, Settings, divide


class LayerWiseMuon(MuonWithAuxAdamW):
    """Muon whose matrices are divided over the ranks of a process group, whole, by a `Layout`.

    Over plain modules it replaces DistributedDataParallel: matrices and their gradients live in flat buffers
    (`.grad` is a view; set to None or to another tensor it is brought back), each bucket's gradients are
    reduce-scattered to their owners as soon as the backward has written them, owners step their matrices in waves,
    and each bucket of new weights is all-gathered while the next wave is computed. With `reduce="ddp"` the gradients
    have been averaged by DistributedDataParallel. Parameters that are DTensors from `fully_shard` stay sharded,
    momenta too: all-to-alls bring each matrix to its owner and the update back.

    What is no matrix is stepped by `torch.optim.AdamW` on every rank, with gradients averaged in one all-reduce. The
    result is that of `fused_lw.MuonWithAuxAdamW` in a single process on the mean gradient: a parameter without
    gradient on every rank is left as it is, one with a gradient on some ranks counts as zero on the others.

    Args:
        params: a module, divided by `fused_lw.split_params`; or (name, parameter) pairs or groups of them, with
            options of their own and "use_muon" (True where not given). Every rank passes the same.
        layout: who owns what, made by `fused_lw.layout.plan` for these matrices; "auto" plans with buckets of 40
            million elements, or a million a rank where that is more.
        process_group: the ranks that hold the same parameters; None takes all.
        model: gives names to parameters that come without, and its trainable parameters must all be in a group.
        adamw: options of `torch.optim.AdamW` for groups with use_muon=False that do not set them.
        reduce: "scatter", or "ddp" where DistributedDataParallel has averaged the gradients.
        overlap: communicate during the backward and the step; False does one after the other, with larger batches.
        expert_process_group: the ranks that hold the same experts: of parameters tagged `allreduce=False`, as
            Megatron-Core tags them. Each step's loss is still the mean over `process_group`.
        gtp_process_group: the ranks that hold the other rows of matrices tagged `is_gtp_weight_remat`. They have the
            same layout, are all at the same place of their own `process_group`, and step together.
        muon: lr, weight_decay, momentum and all other options of `fused_lw.Muon`, except `capturable`.

    Raises:
        ValueError, TypeError: on every rank together, at construction: for what `fused_lw.Muon` refuses, a trainable
            parameter in no group or in two, a layout for other parameters or another world size, parameters or
            options that differ between ranks; in `step` for a parameter that was replaced. Messages name what it is.

    Weights that are changed behind the optimizer's back are changed on one rank only, and with master weights not at
    all: load checkpoints into model and optimizer, or before the first step. Clip with `clip_grad_norm`: gradients may
    be on their way when the backward ends. For the same reason `torch.amp.GradScaler` is refused: train in bf16.
    """

    # Makes GradScaler tell `step` of its scale, instead of changing gradients that are on their way.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        layout: Layout | Literal["auto"] = "auto",
        process_group: dist.ProcessGroup | None = None,
        *,
        model: nn.Module | None = None,
        adamw: Mapping[str, Any] | None = None,
        reduce: Literal["scatter", "ddp"] = "scatter",
        overlap: bool = True,
        expert_process_group: dist.ProcessGroup | None = None,
        gtp_process_group: dist.ProcessGroup | None = None,
        **muon: Any,
    ) -> None:
        group = dist.group.WORLD if process_group is None else process_group
        if group is None:
            raise ValueError("LayerWiseMuon needs torch.distributed.init_process_group to be called first")
        self._complete = False
        self._replicas: list[Replica] = []
        self._has_gradient: list[list[bool]] | None = None  # per replica and matrix; known between reduction and step
        self._factor: Tensor | None = None  # by which gradients are clipped
        self._stepped = False

        members: list[Members] = []
        facts: dict[str, object] = {"reduce": reduce, "overlap": overlap}
        error: Exception | None = None
        try:
            if reduce not in ("scatter", "ddp"):
                raise ValueError(f"reduce must be 'scatter' or 'ddp', not {reduce!r}")
            if reduce == "scatter" and isinstance(params, DistributedDataParallel):
                raise ValueError("DistributedDataParallel reduces gradients itself: pass reduce='ddp'")
            groups, model = named_groups(params, model)
            super().__init__(groups, muon=muon, adamw=adamw)
            self._device = self.param_groups[0]["params"][0].device
            defaults = self._members[True].defaults
            settings = Settings(
                reduce == "scatter",
                overlap,
                dist.get_world_size(group),
                gtp_process_group,
                defaults["backend"],
                defaults["max_scratch_bytes"],
            )
            members = divide(self.param_groups, layout, group, expert_process_group, settings)
            facts |= members[0].facts(self.param_groups)
        except (TypeError, ValueError) as refused:
            error = refused
        agree(group, facts, error)
        for other, part in ((expert_process_group, members[-1]), (gtp_process_group, members[0])):
            if other is not None:
                agree(other, part.facts(self.param_groups))

        self._homes = Homes(model)
        self._replicas += [part.build(self._muon_groups(), settings) for part in members]
        self._start_state()
        self._complete = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while the optimizer is made: a layout is for all parameters. Raises a ValueError afterwards."""
        if self._complete:
            raise ValueError("the layout of a LayerWiseMuon is fixed: make a new one with all parameters")
        split = param_group.get("split_rows", self._members[True].defaults["split_rows"])
        if any(getattr(param, "is_gtp_weight_remat", False) for _, param in param_group["params"]):
            # Blocks of rows are those of the whole matrix, which `divide` checks, not of the rows held here.
            super().add_param_group({**param_group, "split_rows": None})
            self.param_groups[-1]["split_rows"] = split
        else:
            super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; gradients in the flat buffer are zeroed and stay, and count as None after `set_to_none`."""
        super().zero_grad(set_to_none)
        for matrices, _ in self._replicas:
            if matrices is not None:
                matrices.zero_grad(set_to_none)
        self._has_gradient = self._factor = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients in backward passes inside, without reducing them; the last one of a step is outside.

        With `reduce="ddp"` or `fully_shard` use what those offer.
        """
        buffers = [matrices.buffers for matrices, _ in self._replicas if isinstance(matrices, OwnedMatrices)]
        before = [one.syncing for one in buffers]
        for one in buffers:
            one.syncing = False
        try:
            yield
        finally:
            for one, syncing in zip(buffers, before, strict=True):
                one.syncing = syncing

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Let the coming step use gradients scaled down to this 2-norm, that of all parameters together.

        To be called by every rank between the last backward and `step`. No `.grad` is changed. Returns the norm of the
        mean gradient before clipping, [] fp32.
        """
        has_gradient = self._reduce()
        shards = torch.zeros((), dtype=torch.float32, device=self._device)
        whole = torch.zeros_like(shards)
        for index, ((matrices, averager), some) in enumerate(zip(self._replicas, has_gradient, strict=True)):
            if matrices is not None:
                shards += matrices.ready(some)
            of_shards, of_whole = averager.sq_norms()
            shards += of_shards
            if index:  # experts: every rank of their group has them, and other groups have others
                shards += of_whole / dist.get_world_size(averager.group)
            else:
                whole += of_whole
        dist.all_reduce(shards, group=self._replicas[0].averager.group)
        norm = (shards + whole).sqrt()
        self._factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch.nn.utils.clip_grad_norm_'s
        return norm

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's. Takes the state of this rank's shard or of all parameters, and keeps what this rank owns."""
        super().load_state_dict(state_dict)
        for matrices, _ in self._replicas:
            for index, param in enumerate([] if matrices is None else matrices.params):
                if matrices is not None and not matrices.owns(index):
                    self.state.pop(param, None)
        self._make_matrix_state()
        self._stepped = True

    def __getstate__(self) -> NoReturn:
        raise TypeError("a LayerWiseMuon holds process groups and cannot be copied: save its state_dict instead")

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient on any rank. Every rank calls it.

        Args:
            closure: recomputes the loss and the gradients; called once, before the update.
        """
        if hasattr(self, "found_inf"):
            raise RuntimeError("LayerWiseMuon reduces gradients before a GradScaler could unscale them: train in bf16")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self._muon_groups()
        rules = begin_step(groups)
        has_gradient = self._reduce()
        if not self._stepped:  # the weights may have been loaded since the optimizer was made
            for entry in self.state.values():
                entry.pop("master_param", None)
            self._make_matrix_state()
            self._stepped = True
        for (matrices, _), some in zip(self._replicas, has_gradient, strict=True):
            if matrices is not None:
                matrices.step(rules, self.state, some, self._factor)
        # While the matrices are on their way.
        with ExitStack() as borrowed:
            for _, averager in self._replicas:
                borrowed.enter_context(averager.averaged(self._factor))
            self._step_adamw()
        for matrices, _ in self._replicas:
            if matrices is not None:
                matrices.settle()
        end_step(groups)
        self._has_gradient = self._factor = None
        return loss

    def _reduce(self) -> list[list[bool]]:
        """Start all reductions of this step, once, and agree on who has a gradient: per replica and matrix."""
        if self._has_gradient is not None:
            return self._has_gradient
        has_gradient, replaced = [], []
        for matrices, averager in self._replicas:
            names, moved = list(averager.names), [self._homes.moved_out(param) for param in averager.params]
            seen: list[bool] = []
            late: list[bool] = []
            if matrices is not None:
                names += matrices.names
                out = [self._homes.moved_out(param) for param in matrices.params]
                moved += [a or b for a, b in zip(out, matrices.replaced(), strict=True)]
                seen, late = matrices.finish(), matrices.late()
            flags = averager.run([*seen, *moved, *late])
            has_gradient.append(flags[: len(seen)])
            replaced += [name for name, flag in zip(names, flags[len(seen) :], strict=False) if flag]
            if matrices is not None:
                matrices.reduce_again(flags[len(seen) + len(moved) :])
        if replaced:
            raise ValueError(
                f"{replaced[0]} was replaced, or its memory, after the optimizer was made: make the optimizer last"
            )
        self._has_gradient = has_gradient
        return has_gradient

    def _step_adamw(self) -> None:
        member = self._members[False]
        member.state = self.state
        member.param_groups = [group for group in self.param_groups if not group["use_muon"]]
        own_step(AdamW)(member)
        member.param_groups = []

    def _muon_groups(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["use_muon"]]

    @torch.no_grad()
    def _start_state(self) -> None:
        """All state that this rank will have, so that a checkpoint can be loaded into it before the first step."""
        self._make_matrix_state()
        others = [group for group in self.param_groups if not group["use_muon"]]
        params = [param for group in others for param in group["params"]]
        grads, rates = [param.grad for param in params], [group["lr"] for group in others]
        for param in params:
            param.grad = torch.zeros_like(param)
        for group in others:
            group["lr"] = 0.0
        self._step_adamw()
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
            self.state[param]["step"].zero_()
        for group, rate in zip(others, rates, strict=True):
            group["lr"] = rate
        if not self.state:
            # torch.distributed.checkpoint would make state by a step of its own, on this rank alone.
            self.state[self.param_groups[0]["params"][0]] = {}

    def _make_matrix_state(self) -> None:
        rules = begin_step(self._muon_groups())
        for matrices, _ in self._replicas:
            if matrices is not None:
                matrices.make_state(self.state, rules)
