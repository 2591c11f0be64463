"""One optimizer object for a whole model: Muon for its matrices, torch's AdamW for everything else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import torch
from torch.optim import AdamW, Optimizer

from fused_lw.muon import Muon, keep_live_options, keep_saved_dtypes
from fused_lw.replace import own_step


class MuonWithAuxAdamW(Optimizer):
    """Muon for the groups with `use_muon=True`, `torch.optim.AdamW` for those with `use_muon=False`.

    For trainers that want one optimizer. Each group has the options of its own optimizer and no others; AdamW's are
    stepped by torch's own code, fused or foreach where torch would choose that.

    Args:
        params: groups, each with a key "use_muon": `fused_lw.split_params(model).groups()`, or your own.
        muon: options of the Muon groups that do not set them, as `fused_lw.Muon` takes them.
        adamw: options of the AdamW groups that do not set them, as `torch.optim.AdamW` takes them.

    Raises:
        ValueError: for a group without "use_muon", and as `fused_lw.Muon` and `torch.optim.AdamW`.
        TypeError: for an unknown option in `muon` or `adamw`.

    Example:
        >>> groups = fused_lw.split_params(model).groups()
        >>> optimizer = fused_lw.MuonWithAuxAdamW(groups, muon={"lr": 0.02}, adamw={"lr": 3e-4, "betas": (0.9, 0.95)})
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        muon: Mapping[str, Any] | None = None,
        adamw: Mapping[str, Any] | None = None,
    ) -> None:
        # Two optimizers without parameters: they check options, fill in defaults, and step the groups of this one.
        self._members: dict[bool, Optimizer] = {
            True: Muon([torch.empty(1, 1)], **(muon or {})),
            False: AdamW([torch.empty(1)], **(adamw or {})),
        }
        for member in self._members.values():
            member.param_groups = []
        super().__init__(params, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, after its optimizer has checked it and filled in what it does not set."""
        if not isinstance(param_group.get("use_muon"), bool):
            raise ValueError(
                f"group {len(self.param_groups)} needs 'use_muon', True for matrices and False for what AdamW takes, "
                f"not {param_group.get('use_muon')!r}: fused_lw.split_params(model).groups() makes such groups"
            )
        member = self._members[param_group["use_muon"]]
        try:
            # With the groups there are, so that a message counts the new one after them.
            member.param_groups = list(self.param_groups)
            member.add_param_group(param_group)
            param_group = member.param_groups.pop()
        finally:
            member.param_groups = []
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Checkpoints of KellerJordan's MuonWithAuxAdam know fewer options, and count AdamW's steps in integers.
        for group in self.param_groups:
            for key, value in self._members[group["use_muon"]].defaults.items():
                group.setdefault(key, value)
        for entries in self.state.values():
            if isinstance(entries.get("step"), int):
                entries["step"] = torch.tensor(float(entries["step"]))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_members": self._members}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but momenta and master weights keep their dtype instead of taking the parameter's.

        Checkpoints of `torch.optim.Muon` and `fused_lw.Muon` load where the groups are the same.
        """
        options = {"use_muon", *self._members[True].defaults, *self._members[False].defaults}
        state_dict = keep_live_options(self, state_dict, options)
        super().load_state_dict(state_dict)
        keep_saved_dtypes(self, state_dict, "momentum_buffer")
        keep_saved_dtypes(self, state_dict, "master_param")

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: recomputes the loss and the gradients; called once, before the update.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Muon first: it refuses a gradient before anything has changed. In its place an empty group stands for each of
        # AdamW's, so that its messages count groups as the user does.
        muon, adamw = self._members[True], self._members[False]
        nothing = {**muon.defaults, "params": []}
        self._step_member(muon, [group if group["use_muon"] else dict(nothing) for group in self.param_groups])
        self._step_member(adamw, [group for group in self.param_groups if not group["use_muon"]])
        return loss

    def _step_member(self, member: Optimizer, groups: list[dict[str, Any]]) -> None:
        try:
            member.state, member.param_groups = self.state, groups
            own_step(type(member))(member)
        finally:
            # What it kept of the state would outlive the state, when another is loaded.
            member.state, member.param_groups = defaultdict(dict), []
