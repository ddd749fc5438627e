"""Policy losses, KL, entropy and aggregation against the reference system's numbers, gradients included."""

from typing import Any

import pytest
import torch

from engines.algorithms.entropy import entropy_bonus
from engines.algorithms.inputs import Part, TokenLoss
from engines.algorithms.kl import ESTIMATORS
from engines.algorithms.losses import ppo_clip, sft
from engines.algorithms.reduce import StatTotals, aggregate
from engines.algorithms.spec import EntropyBonus, PpoClip, Sft
from tests.golden.cases import RTOL, Flat, cases, flatten, float64, names

METRICS = {
    "pg_clipfrac": "policy/clip_fraction",
    "pg_clipfrac_lower": "policy/clip_fraction_lower",
    "ppo_kl": "kl/policy",
    "seq_mask/masked_tokens": "policy/sequence_masked_fraction",
}


def assert_equal(loss: TokenLoss, flat: Flat, mode: Any, expected: dict[str, Any], scale: float = 1.0) -> None:
    factor = flat.seq_mean_factor if mode in ("seq-mean-token-sum", "seq-mean-token-mean") else 1.0
    total = aggregate(loss, flat.inputs, mode, flat.counts) * scale
    torch.testing.assert_close(total.detach(), float64(expected["loss"] * factor), rtol=RTOL, atol=1e-12)
    (gradient,) = torch.autograd.grad(total, flat.leaf)
    key = "grad_logprob" if "grad_logprob" in expected else "grad_entropy"
    if expected.get(key) is not None:
        torch.testing.assert_close(gradient, float64(expected[key]) * factor, rtol=RTOL, atol=1e-12)
    assert torch.equal(gradient[~flat.mask], torch.zeros_like(gradient[~flat.mask]))


@pytest.mark.parametrize("case", cases("policy_loss_ppo"), ids=names("policy_loss_ppo"))
def test_ppo(case: Any) -> None:
    args = dict(case["init_args"])
    mode = args.pop("loss_agg_mode", "token-mean")
    flat = flatten(case["inputs"])
    loss = ppo_clip(flat.inputs, PpoClip(**args)) if flat.counts.tokens else TokenLoss(-flat.inputs.logprobs)
    assert_equal(loss, flat, mode, case["outputs"])
    totals = StatTotals()
    totals.add(loss.stats)
    numbers = totals.numbers(dict.fromkeys(Part, flat.counts))
    for theirs, ours in METRICS.items():
        if theirs in case["outputs"]["metrics"] and flat.counts.tokens:
            assert numbers[ours].value == pytest.approx(case["outputs"]["metrics"][theirs], rel=RTOL, abs=1e-12)


@pytest.mark.parametrize("case", cases("policy_loss_sft"), ids=names("policy_loss_sft"))
def test_sft(case: Any) -> None:
    flat = flatten(case["inputs"])
    assert_equal(sft(flat.inputs, Sft()), flat, case["init_args"]["loss_agg_mode"], case["outputs"])


KL_CASES = [
    (name, case)
    for name in ("k1", "k2", "k3", "low_var_kl", "abs")
    for case in cases(f"kl_{name}")
    if "logprob" in case["inputs"]
]


@pytest.mark.parametrize(("name", "case"), KL_CASES, ids=[f"{name}/{case['name']}" for name, case in KL_CASES])
def test_kl(name: str, case: Any) -> None:
    flat = flatten(case["inputs"])
    assert flat.inputs.reference_logprobs is not None
    divergence = ESTIMATORS[name](flat.inputs.logprobs, flat.inputs.reference_logprobs)
    torch.testing.assert_close(divergence, float64(case["outputs"]["kl"])[flat.mask], rtol=1e-9, atol=1e-12)
    coefficient = case["init_args"]["kl_coef"]
    assert_equal(TokenLoss(divergence), flat, case["inputs"]["loss_agg_mode"], case["outputs"], coefficient)


@pytest.mark.parametrize("case", cases("entropy_default"), ids=names("entropy_default"))
def test_entropy(case: Any) -> None:
    flat = flatten(case["inputs"], "entropy")
    bonus = entropy_bonus(flat.inputs, EntropyBonus(entropy_coef=case["init_args"]["entropy_coef"]))
    # the file's loss is what its engine subtracts, ours is added
    assert_equal(bonus, flat, case["inputs"]["loss_agg_mode"], case["outputs"], scale=-1.0)


AGGREGATE_CASES = [case for case in cases("utils_aggregate") if "token-mean" in case["outputs"]]
"""The others are about whitening."""


@pytest.mark.parametrize("case", AGGREGATE_CASES, ids=[case["name"] for case in AGGREGATE_CASES])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_aggregate(case: Any, mode: Any) -> None:
    flat = flatten(case["inputs"] | {"action_mask": case["inputs"]["mask"]}, "values")
    assert_equal(TokenLoss(flat.leaf[flat.mask]), flat, mode, {"loss": case["outputs"][mode]})


VERL_CASES = [case for case in cases("verl_agg_loss") if case["name"].split("/")[1] != "token-sum"]
"""token-sum is not a mode of ours."""


@pytest.mark.parametrize("case", VERL_CASES, ids=[case["name"] for case in VERL_CASES])
def test_aggregate_of_verl(case: Any) -> None:
    """verl leaves out empty rows, as we do; its sum-norm, unlike that of Trinity and ours, also divides by rows."""
    mode = case["name"].split("/")[1]
    flat = flatten(case["inputs"] | {"action_mask": case["inputs"]["loss_mask"]}, "loss_mat")
    total = aggregate(TokenLoss(flat.leaf[flat.mask]), flat.inputs, mode, flat.counts)
    rows = flat.counts.sequences if mode == "seq-mean-token-sum-norm" else 1
    assert float(total.detach()) / rows == pytest.approx(case["outputs"], rel=RTOL)
