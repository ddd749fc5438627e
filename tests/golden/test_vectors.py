"""Every case of the reference system's vectors, evaluated by the loader; and which of them deviate, and why."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.algorithms.inputs import LossInputs
from engines.algorithms.losses import ppo_clip
from engines.algorithms.reduce import Counts, aggregate
from engines.algorithms.spec import PpoClip, Sapo, function_of
from tests.golden.batches import Batch
from tests.golden.evaluate import Report, evaluate_file, evaluator_of
from tests.golden.format import floats

VECTORS = Path(__file__).parent / "vectors"
FILES = [path for path in sorted(VECTORS.glob("*.json")) if evaluator_of(path.stem) is not None]
DEVIATING: dict[str, tuple[int, set[int]]] = {
    "advantage_asymre": (3, {6}),
    "advantage_asymre_verl": (4, {6}),
    "advantage_clipb": (5, {6}),
    "advantage_clipv": (9, {6}),
    "advantage_grpo": (8, {6, 11}),
    "advantage_grpo_verl": (4, {6}),
    "advantage_opmd": (3, {6}),
    "advantage_opmd_verl": (5, {6}),
    "advantage_ppo": (6, {5}),
    "advantage_rec": (4, {7}),
    "advantage_reinforceplusplus": (1, {5}),
    "advantage_rloo": (4, {6}),
    "advantage_step_wise_grpo": (9, {6, 10}),
    "algorithm_defaults": (19, {7, 8}),
    "algorithm_grpo_verl_quirk": (1, {7}),
    "entropy_default": (1, {4}),
    "entropy_mix": (5, {4}),
    "kl_abs": (5, {4, 7}),
    "kl_corrected_k3": (11, {4, 7}),
    "kl_k1": (5, {4, 7}),
    "kl_k2": (5, {4, 7}),
    "kl_k3": (5, {4, 7}),
    "kl_low_var_kl": (5, {4, 7}),
    "policy_loss_cispo": (1, {4}),
    "policy_loss_dpo": (6, {2}),
    "policy_loss_gspo": (1, {4}),
    "policy_loss_mix": (15, {4, 9}),
    "policy_loss_mix_chord": (27, {4, 9}),
    "policy_loss_ppo": (1, {4}),
    "policy_loss_rec": (3, {4, 7}),
    "policy_loss_sapo": (4, {3}),
    "policy_loss_sft": (1, {4}),
    "utils_aggregate": (4, {4}),
}
"""File -> how many of its cases deviate, and by which of the listed differences. No other file has any."""


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_every_case_is_within_tolerance_or_deviates_as_listed(path: Path) -> None:
    report = evaluate_file(path)
    assert report.failures == []
    assert report.num_cases == len(json.loads(path.read_text())["cases"])
    assert (report.num_deviating, report.differences) == DEVIATING.get(path.stem, (0, set()))
    assert report.max_rel_error <= (1e-6 if path.stem.startswith("advantage_") else 1e-7)


def test_line_has_the_file_its_cases_its_errors_and_what_deviates() -> None:
    report = Report("policy_loss_x", 12, 1e-12, 2.5e-10, 3, {6, 4})
    assert report.line.split() == ["policy_loss_x", "12", "1.0e-12", "2.5e-10", "deviates", "3", "(#4", "#6)"]


def quirk(name: str) -> Any:
    """A fault of the reference system, with what was meant."""
    cases = json.loads((VECTORS / "quirks.json").read_text())["cases"]
    return next(case for case in cases if case["name"] == name)


def batch_of_quirk() -> Batch:
    return Batch.of(quirk("ppo_token_mean_grad_vs_micro_batches")["inputs"])


@pytest.mark.parametrize("size", [4, 2, 1])
def test_gradient_is_that_of_one_batch_however_it_is_cut(size: int) -> None:
    """Difference 1: there, the gradients of 2 and of 4 micro-batches are sums of means (the other columns)."""
    batch, x = batch_of_quirk(), batch_of_quirk().inputs
    batch.leaf.grad = None
    counts = Counts(int(batch.mask.sum()), 4, batch.width)
    for first in range(0, 4, size):
        mask = torch.from_numpy(batch.mask[first : first + size])
        chosen = (x.row_of_token >= first) & (x.row_of_token < first + size)
        assert x.old_logprobs is not None
        assert x.advantages is not None
        part = LossInputs(
            logprobs=batch.leaf[first : first + size][mask],
            row_of_token=x.row_of_token[chosen] - first,
            num_actions=x.num_actions[first : first + size],
            old_logprobs=x.old_logprobs[chosen],
            advantages=x.advantages[chosen],
        )
        aggregate(ppo_clip(part, PpoClip()), part, "token-mean", counts).backward()
    assert batch.leaf.grad is not None
    wanted = torch.from_numpy(floats(quirk("ppo_token_mean_grad_vs_micro_batches")["outputs"]["one_batch"]))
    torch.testing.assert_close(batch.leaf.grad, wanted, rtol=1e-9, atol=1e-12)


def test_sapo_is_the_papers() -> None:
    """Difference 3: paper_loss and paper_grad of the file, on the batch of the case before it."""
    batch, outputs = batch_of_quirk(), quirk("sapo_gradient_trinity_vs_paper")["outputs"]
    loss = function_of(Sapo())(batch.inputs, Sapo())
    ours = batch.reduced(loss, "token-mean", batch.inputs_there(), batch.counts_there())
    assert ours.loss == pytest.approx(outputs["paper_loss"], rel=1e-9)
    torch.testing.assert_close(
        torch.from_numpy(ours.gradient), torch.from_numpy(floats(outputs["paper_grad"])), rtol=1e-9, atol=1e-12
    )
