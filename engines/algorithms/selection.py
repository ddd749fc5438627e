"""Tokens that a loss treats differently, chosen once per step from the whole batch, on the host. Torch-free.

Formulas are cited on the params of the losses, in `engines.algorithms.spec.losses`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engines.algorithms.advantages import Bools, Float64s
from engines.algorithms.spec import ClipCov, KlCov


@dataclass(frozen=True, slots=True, eq=False)
class SelectionInputs:
    """What a selection sees: the N action tokens of all rows of a step, on the host."""

    old_logprobs: Float64s
    """[N]."""
    advantages: Float64s
    """[N]."""
    seed: int
    """For what is drawn at random."""

    @property
    def covariances(self) -> Float64s:
        """[N] (A - mean A) (old - mean old)."""
        return (self.advantages - self.advantages.mean()) * (self.old_logprobs - self.old_logprobs.mean())


def clip_cov(x: SelectionInputs, p: ClipCov) -> Bools:
    """[N] tokens drawn from those with a covariance within the bounds."""
    covariances = x.covariances
    candidates = np.flatnonzero((covariances > p.clip_cov_lb) & (covariances < p.clip_cov_ub))
    num_chosen = min(max(int(p.clip_cov_ratio * len(covariances)), 1), len(candidates))
    selected = np.zeros(len(covariances), np.bool_)
    selected[np.random.default_rng(x.seed).choice(candidates, num_chosen, replace=False)] = True
    return selected


def kl_cov(x: SelectionInputs, p: KlCov) -> Bools:
    """[N] tokens with the largest covariance."""
    covariances = x.covariances
    num_chosen = max(int(p.kl_cov_ratio * len(covariances)), 1)
    selected = np.zeros(len(covariances), np.bool_)
    selected[np.argsort(-covariances, kind="stable")[:num_chosen]] = True
    return selected
