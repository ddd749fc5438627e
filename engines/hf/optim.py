"""AdamW, its learning-rate schedule, the gradient clip and the guard against non-finite updates.

An update whose loss or gradient norm is not finite changes nothing: not the weights, not the moments, not the schedule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engines.config import OptimizerConfig
from engines.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Update:
    """What one call of `AdamW.update` did."""

    applied: bool
    grad_norm: float
    """Global L2 norm before the clip."""
    lr: float
    """Learning rate of this update."""


def lr_factor(kind: str, update: int, warmup: int, total: int | None, min_ratio: float) -> float:
    """Share of the peak learning rate for an update, counted from 0: linear warm-up from 0, then what `kind` says.

    As verl 0.9.1 (get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup), past the end included, where its
    cosine rises again; linear stays at the floor.
    """
    if update < warmup:
        return update / max(1, warmup)
    if kind == "constant":
        return 1.0
    assert total is not None
    progress = (update - warmup) / max(1, total - warmup)
    if kind == "linear":
        return max(min_ratio, 1 - (1 - min_ratio) * progress)
    return max(min_ratio, min_ratio + (1 - min_ratio) * (1 + math.cos(math.pi * progress)) / 2)


class AdamW:
    """torch's fused AdamW over a model's trainable parameters. Vectors and embeddings have no weight decay."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, total_updates: int | None) -> None:
        """Raises ConfigError if the schedule needs the number of updates and there is none."""
        self.num_updates = 0
        """Applied updates; the schedule counts these."""
        self._config = config
        self._total = total_updates
        self._warmup = _warmup_updates(config, total_updates)
        self._parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
        embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        decayed = [p for p in self._parameters.values() if p.ndim >= 2 and id(p) not in embeddings]
        spared = [p for p in self._parameters.values() if p.ndim < 2 or id(p) in embeddings]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": spared, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )

    @property
    def next_lr(self) -> float:
        """Learning rate of the next update."""
        config = self._config
        return config.lr * lr_factor(
            config.lr_scheduler_type, self.num_updates, self._warmup, self._total, config.min_lr_ratio
        )

    def update(self, loss: float) -> Update:
        """Clip the accumulated gradients and step, unless `loss` or their norm is not finite; then drop them."""
        grads = [p.grad for p in self._parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        grad_norm, lr = float(norm), self.next_lr
        applied = math.isfinite(grad_norm) and math.isfinite(loss)
        if applied:
            torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), self._config.clip_grad, norm)
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
            self.num_updates += 1
        self._adamw.zero_grad(set_to_none=True)
        return Update(applied, grad_norm, lr)

    def drop_gradients(self) -> None:
        """Forget what was accumulated."""
        self._adamw.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """The optimizer's state, `<moment>.<parameter name>` -> tensor."""
        return {
            f"{kind}.{name}": value.detach()
            for name, parameter in self._parameters.items()
            for kind, value in self._adamw.state[parameter].items()
        }

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take back what `tensors` gave. Raises KeyError for a tensor of an unknown parameter."""
        state: dict[Tensor, dict[str, Any]] = {}
        for key, value in tensors.items():
            kind, name = key.split(".", 1)
            parameter = self._parameters[name]
            state.setdefault(parameter, {})[kind] = value.clone().to(parameter.device)  # a clone does not map the file
        self._adamw.state.clear()
        self._adamw.state.update(state)


def _warmup_updates(config: OptimizerConfig, total: int | None) -> int:
    if total is None and config.lr_scheduler_type != "constant":
        raise ConfigError(
            f"algorithm.optimizer.lr_scheduler_type = {config.lr_scheduler_type!r} decays towards the end of the job; "
            "set trainer.total_steps or use 'constant'"
        )
    if config.lr_warmup_steps >= 0:
        return config.lr_warmup_steps
    if total is None and config.lr_warmup_steps_ratio > 0:
        raise ConfigError("algorithm.optimizer.lr_warmup_steps_ratio needs trainer.total_steps; or set lr_warmup_steps")
    return int(config.lr_warmup_steps_ratio * (total or 0))
