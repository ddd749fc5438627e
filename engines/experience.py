"""`Experience` and `EID`: one trained row and its identity. Plain numpy, so that storage needs no torch.

Owns: construction rules and the type of a row. Does not own: encoding on storage (`trinity_tasks.buffer`), padding or
packing (`engines.hf.batch`).
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from engines.errors import DataError

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
ExperienceType = Literal["single_turn", "multi_turn", "dpo"]
TruncateStatus = Literal["prompt_truncated", "response_truncated"]


@dataclass(slots=True, frozen=True)
class EID:
    """Identity of an experience: which batch, task, run (sample of the task) and step (turn) it came from.

    Example:
        >>> EID(batch=1, task=2, run=3, step=4, suffix="abc").uid
        '1/2/3/4/abc'
    """

    batch: int | str = ""
    """Explorer step that produced the row."""
    task: int | str = ""
    """Task within that batch; rows of one task form a group."""
    run: int = 0
    """Which of the task's repeated samples."""
    step: int = 0
    """Turn within the run, for multi-step workflows."""
    suffix: str = field(default_factory=lambda: secrets.token_hex(3))
    """Six hex characters that keep two rows of one turn apart."""

    @property
    def uid(self) -> str:
        """Unique id of the row."""
        return f"{self.batch}/{self.task}/{self.run}/{self.step}/{self.suffix}"

    @property
    def sid(self) -> str:
        """Step id: rows of the same turn over all runs of a task."""
        return f"{self.batch}/{self.task}/{self.step}"

    @property
    def rid(self) -> str:
        """Run id: all turns of one sample."""
        return f"{self.batch}/{self.task}/{self.run}"

    @property
    def tid(self) -> str:
        """Task id: the group over which advantages are computed."""
        return f"{self.batch}/{self.task}"


@dataclass(slots=True, eq=False)
class Experience:
    """One sequence to train on. L = prompt + response tokens, p = prompt_length, T = L - p.

    Example:
        >>> Experience(tokens=[5, 6, 7, 8], prompt_length=2, logprobs=[-0.1, -0.2], reward=1.0).action_mask
        array([ True,  True])
    """

    tokens: Ints
    """[L] token ids: prompt, then response (for dpo: the prompt only)."""
    prompt_length: int = 1
    """p, tokens. For dpo it is always L."""
    eid: EID = field(default_factory=EID)
    logprobs: Floats | None = None
    """[T] sampler logprobs at the sampling temperature; 0.0 where action_mask is 0."""
    reward: float | None = None
    """Outcome of the whole sequence; None is "unscored", never 0."""
    token_level_reward: Floats | None = None
    """[T] reward per token; wins over `reward`."""
    advantages: Floats | None = None
    """[T] given advantages, when computed before the buffer."""
    returns: Floats | None = None
    """[T] given returns, when computed before the buffer."""
    action_mask: Bools | None = None
    """[T] True on tokens that train. Defaults to all True (single turn), all False (truncated prompt)."""
    truncate_status: TruncateStatus | None = None
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    """JSON-able facts: model_version, taskset, is_expert, ..."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Numbers about this row that the trainer averages into its step metrics."""
    prompt_text: str | None = None
    response_text: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chosen: Ints | None = None
    """[Tc] dpo: preferred response without the prompt."""
    rejected: Ints | None = None
    """[Tr] dpo: refused response without the prompt."""
    chosen_messages: list[dict[str, Any]] | None = None
    rejected_messages: list[dict[str, Any]] | None = None
    teacher_logprobs: Floats | None = None
    """[T] teacher logprobs of the same tokens, for distillation."""
    experience_type: ExperienceType = "single_turn"
    """Set by the constructor from what is given: a mask means multi_turn, a pair means dpo."""

    def __post_init__(self) -> None:
        self.tokens = np.asarray(self.tokens, np.int32)
        for name in ("logprobs", "token_level_reward", "advantages", "returns", "teacher_logprobs"):
            if (value := getattr(self, name)) is not None:
                setattr(self, name, np.asarray(value, np.float32))
        for name in ("chosen", "rejected"):
            if (value := getattr(self, name)) is not None:
                setattr(self, name, np.asarray(value, np.int32))
        if self.action_mask is not None:
            self.experience_type = "multi_turn"
            self.action_mask = np.asarray(self.action_mask, np.bool_)
        elif self.chosen is not None and self.rejected is not None:
            self.experience_type, self.prompt_length = "dpo", len(self.tokens)
            return
        else:
            self.experience_type = "single_turn"
            self._default_mask()
        self._check_lengths()

    def _default_mask(self) -> None:
        if self.truncate_status == "prompt_truncated":
            length = 0 if self.logprobs is None else len(self.logprobs)
            self.action_mask = np.zeros(length, np.bool_)
            return
        if self.prompt_length <= 0:
            raise DataError(f"experience {self.eid.uid}: prompt_length is {self.prompt_length}; it must be at least 1")
        if len(self.tokens) <= self.prompt_length:
            raise DataError(
                f"experience {self.eid.uid}: {len(self.tokens)} tokens with prompt_length {self.prompt_length} leave "
                "no response to train on; give more tokens, a smaller prompt_length or "
                "truncate_status='prompt_truncated'"
            )
        self.action_mask = np.ones(len(self.tokens) - self.prompt_length, np.bool_)

    def _check_lengths(self) -> None:
        if self.truncate_status == "prompt_truncated":
            return
        expected = len(self.tokens) - self.prompt_length
        for name in ("action_mask", "logprobs", "token_level_reward", "advantages", "returns", "teacher_logprobs"):
            value = getattr(self, name)
            if value is not None and len(value) != expected:
                raise DataError(
                    f"experience {self.eid.uid}: {name} has {len(value)} entries, the response has {expected} tokens"
                )

    @property
    def response_length(self) -> int:
        """T, tokens."""
        return max(len(self.tokens) - self.prompt_length, 0)

    @property
    def model_version(self) -> int:
        """Train step of the weights that sampled this row; 0 if it was not sampled."""
        return int(self.info.get("model_version", 0))
