"""A loss and an advantage of one's own: a class with the parameters, a function with the formula; no registration."""

import numpy as np
import torch

from engines.algorithms.advantages import AdvantageInputs, Advantages
from engines.algorithms.inputs import LossInputs, TokenLoss
from engines.algorithms.spec import AdvantageParams, Algorithm, LossParams
from trinity_tasks.tasksets import Task


class SoftClip(LossParams):
    """-A width tanh(log(ratio) / width): the further from the old policy, the smaller the gradient."""

    function = "my_losses:soft_clip"
    requires = frozenset({"rewards", "old_logprobs"})
    width: float = 0.2


def soft_clip(x: LossInputs, p: SoftClip) -> TokenLoss:
    return TokenLoss(-x.advantages * p.width * torch.tanh((x.logprobs - x.old_logprobs) / p.width))


class Median(AdvantageParams):
    """A = scale (R - median of the group): one lucky answer does not make all others bad."""

    function = "my_losses:median"
    scale: float = 1.0


def median(x: AdvantageInputs, p: Median) -> Advantages:
    values = np.zeros(len(x.rewards))
    for rows in x.groups:
        values[rows] = p.scale * (x.rewards[rows] - np.median(x.rewards[rows]))
    return Advantages(x.spread(values))


ALGORITHM = Algorithm(advantage=Median(), loss=SoftClip(), group_size=8)


def letters(task: Task, response: str) -> float:
    """A reward that a model can raise from nothing: the share of the answer's letters that are in the response."""
    return sum(letter in response for letter in task.answer) / len(task.answer)
