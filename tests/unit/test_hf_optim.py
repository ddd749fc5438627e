"""AdamW against torch's own, decay groups, schedules over updates, and updates that must change nothing."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engines.config import OptimizerConfig
from engines.errors import ConfigError
from engines.hf.optim import AdamW, lr_factor


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 4)
        self.linear = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3)
        self.tied = nn.Linear(4, 5, bias=False)
        self.tied.weight = self.embedding.weight


def set_gradients(model: nn.Module, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale


def bits(model: nn.Module, optimizer: AdamW) -> list[bytes]:
    tensors: list[Tensor] = [*model.parameters(), *optimizer.tensors().values()]
    return [tensor.detach().numpy().tobytes() for tensor in tensors]


def test_equals_torch_adamw_with_groups_clip_and_schedule() -> None:
    ours, theirs = Small(), Small()
    config = OptimizerConfig(
        lr=0.1,
        betas=(0.8, 0.95),
        eps=1e-6,
        weight_decay=0.3,
        clip_grad=0.5,
        lr_scheduler_type="linear",
        min_lr_ratio=0.1,
    )
    optimizer = AdamW(ours, config, total_updates=4)
    decayed = [theirs.linear.weight]
    spared = [theirs.embedding.weight, theirs.linear.bias, theirs.norm.weight, theirs.norm.bias]
    reference = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.3}, {"params": spared, "weight_decay": 0.0}],
        betas=(0.8, 0.95),
        eps=1e-6,
        fused=False,
    )
    for step, lr in enumerate([0.1, 0.0775, 0.055, 0.0325]):
        for model in (ours, theirs):
            set_gradients(model, step)
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        update = optimizer.update(loss=1.0)
        assert update.applied
        assert update.lr == pytest.approx(lr)
        assert update.grad_norm == pytest.approx(float(norm))
    for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("where", ["gradient", "loss"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_update_changes_nothing(where: str, bad: float) -> None:
    model = Small()
    optimizer = AdamW(model, OptimizerConfig(lr=0.1, lr_scheduler_type="cosine"), total_updates=10)
    set_gradients(model, 0)
    optimizer.update(1.0)
    before, lr = bits(model, optimizer), optimizer.next_lr
    set_gradients(model, 1)
    if where == "gradient":
        assert model.linear.bias.grad is not None
        model.linear.bias.grad[1] = bad
    update = optimizer.update(bad if where == "loss" else 1.0)
    assert not update.applied
    assert bits(model, optimizer) == before
    assert (optimizer.num_updates, optimizer.next_lr) == (1, lr)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_state_goes_round_and_training_goes_on_equally() -> None:
    first, second = Small(), Small()
    config = OptimizerConfig(lr=0.1)
    one, two = AdamW(first, config, None), AdamW(second, config, None)
    for seed in range(3):
        set_gradients(first, seed)
        one.update(0.0)
    second.load_state_dict(first.state_dict())
    two.load_tensors(one.tensors())
    two.num_updates = one.num_updates
    for model, optimizer in ((first, one), (second, two)):
        set_gradients(model, 9)
        optimizer.update(0.0)
    assert bits(first, one) == bits(second, two)


def test_unknown_parameter_in_a_stored_state_is_an_error() -> None:
    with pytest.raises(KeyError, match="nobody"):
        AdamW(Small(), OptimizerConfig(), None).load_tensors({"exp_avg.nobody": torch.zeros(1)})


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("constant", [0, 0.5, 1, 1, 1, 1]), ("linear", [0, 0.5, 1, 0.775, 0.55, 0.325])],
)
def test_schedule_by_hand(kind: str, expected: list[float]) -> None:
    assert [lr_factor(kind, t, 2, 6, 0.1) for t in range(6)] == pytest.approx(expected)


def test_linear_stays_at_its_floor() -> None:
    assert lr_factor("linear", 9, 2, 6, 0.1) == 0.1


@pytest.mark.parametrize(
    ("changes", "warmup"), [({"lr_warmup_steps": 3}, 3), ({"lr_warmup_steps_ratio": 0.25}, 5), ({}, 0)]
)
def test_warmup_counts_updates(changes: dict[str, Any], warmup: int) -> None:
    optimizer = AdamW(Small(), OptimizerConfig(lr=1.0, **changes), total_updates=20)
    optimizer.num_updates = warmup
    assert optimizer.next_lr == 1.0
    if warmup:
        optimizer.num_updates = warmup - 1
        assert optimizer.next_lr == pytest.approx((warmup - 1) / warmup)


@pytest.mark.parametrize("changes", [{"lr_scheduler_type": "cosine"}, {"lr_warmup_steps_ratio": 0.1}])
def test_open_ended_jobs_cannot_decay(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.total_steps"):
        AdamW(Small(), OptimizerConfig(**changes), total_updates=None)
