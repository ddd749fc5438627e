"""Configuration of the compute layer: model, optimizer, algorithm. Frozen, complete, torch-free; validation is pure.

Key names are those of Trinity-RFT wherever the meaning is the same. Every field says what a resume may do with it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Resume(StrEnum):
    """What happens when this field differs from the one that the job was started with."""

    SAFE = "safe"
    """The job goes on; the change is recorded."""
    FORK = "fork"
    """The job would no longer be the same experiment: it needs a new name."""
    FORBIDDEN = "forbidden"
    """What is stored could not be read, or would be wrong."""


class Frozen(BaseModel):
    """Base of every section: immutable, unknown keys refused, attribute docstrings are the descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class TokenizerConfig(Frozen):
    """A tokenizer built from nothing, when the model has none of its own."""

    kind: Annotated[Literal["char", "byte"], Resume.FORBIDDEN] = "byte"
    """char: one id per character of `alphabet`. byte: one id per UTF-8 byte, any text."""
    alphabet: Annotated[str, Resume.FORBIDDEN] = ""
    """Characters that a char tokenizer knows. Empty: printable ASCII and newline."""
    phrases: Annotated[tuple[str, ...], Resume.FORBIDDEN] = ()
    """Whole strings that become one token each, for text that repeats in every prompt."""
    chat_template: Annotated[str | None, Resume.FORBIDDEN] = None
    """Jinja chat template. None: <|user|>text<|assistant|>text<|end|>."""


class ModelConfig(Frozen):
    """Which model, its limits in tokens, and how it samples."""

    model_path: Annotated[str | None, Resume.FORK] = None
    """HF folder: a local path, a URL on any store, or None to build from `architecture`."""
    architecture: Annotated[dict[str, Any] | None, Resume.FORBIDDEN] = None
    """Arguments of the HF config, `model_type` among them. vocab_size and special ids come from the tokenizer."""
    tokenizer: Annotated[TokenizerConfig | None, Resume.FORBIDDEN] = None
    """Needed with `architecture`; with `model_path` the folder's own tokenizer is used."""
    dtype: Annotated[Literal["float32", "bfloat16"], Resume.FORK] = "float32"
    """Precision of the matrix products. Weights and the softmax are float32 in both."""
    teacher_model_path: Annotated[str | None, Resume.FORK] = None
    """HF folder of a teacher, for distillation. None: rows bring its logprobs."""
    critic_model_path: Annotated[str | None, Resume.FORK] = None
    """HF folder that the critic starts from. None: the model itself."""
    temperature: Annotated[float, Resume.FORK] = Field(default=1.0, ge=0, le=100)
    """Sampling temperature; logprobs are taken at it, once. 0: greedy, logprobs untempered."""
    max_model_len: Annotated[int, Resume.FORK] = Field(default=2048, ge=2)
    """Longest prompt plus response, tokens."""
    max_prompt_tokens: Annotated[int | None, Resume.FORK] = Field(default=None, ge=1)
    """Longest prompt, tokens. None: max_model_len - 1."""
    max_response_tokens: Annotated[int | None, Resume.FORK] = Field(default=None, ge=1)
    """Longest response, tokens. None: what the prompt leaves of max_model_len."""

    @model_validator(mode="after")
    def _source(self) -> Self:
        if (self.model_path is None) == (self.architecture is None):
            raise ValueError("give exactly one of model.model_path and model.architecture")
        if self.architecture is not None and "model_type" not in self.architecture:
            raise ValueError("model.architecture needs model_type, for example llama or qwen3")
        if self.architecture is not None and self.tokenizer is None:
            raise ValueError("model.architecture needs model.tokenizer: a model built from config has none of its own")
        if self.model_path is not None and self.tokenizer is not None:
            raise ValueError("model.tokenizer goes with model.architecture; a model_path brings its own tokenizer")
        prompt, response = self.max_prompt_tokens or 1, self.max_response_tokens or 1
        if prompt + response > self.max_model_len:
            raise ValueError(
                f"model.max_prompt_tokens + model.max_response_tokens = {prompt + response} "
                f"is more than model.max_model_len = {self.max_model_len}"
            )
        return self


Decay = Annotated[float, Field(ge=0, lt=1)]
"""Share of an old average that each update keeps."""


class OptimizerConfig(Frozen):
    """AdamW and its learning-rate schedule. Schedules count optimizer updates."""

    lr: Annotated[float, Resume.SAFE] = Field(default=1e-6, ge=0)
    """Peak learning rate."""
    lr_warmup_steps: Annotated[int, Resume.SAFE] = Field(default=-1, ge=-1)
    """Linear warm-up, updates. -1: use lr_warmup_steps_ratio."""
    lr_warmup_steps_ratio: Annotated[float, Resume.SAFE] = Field(default=0.0, ge=0, le=1)
    """Warm-up as a share of all updates."""
    min_lr_ratio: Annotated[float, Resume.SAFE] = Field(default=0.01, ge=0, le=1)
    """Floor of a decaying schedule, as a share of lr."""
    lr_scheduler_type: Annotated[Literal["constant", "linear", "cosine"], Resume.SAFE] = "constant"
    """Shape after the warm-up. linear and cosine need trainer.total_steps."""
    betas: Annotated[tuple[Decay, Decay], Resume.FORK] = (0.9, 0.999)
    """AdamW moment decay rates."""
    eps: Annotated[float, Resume.FORK] = Field(default=1e-8, gt=0)
    """AdamW denominator term."""
    weight_decay: Annotated[float, Resume.SAFE] = Field(default=0.01, ge=0)
    """Decoupled weight decay, on matrices only: never on norms, biases or embeddings."""
    clip_grad: Annotated[float, Resume.SAFE] = Field(default=1.0, gt=0)
    """Largest global gradient norm."""


class CriticConfig(Frozen):
    """The critic of algorithms with values."""

    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    """Its optimizer and learning-rate schedule."""
    cliprange_value: Annotated[float, Resume.FORK] = Field(default=0.5, gt=0)
    """Farthest that a value may usefully move in one step."""


class PartConfig(Frozen):
    """A part of an algorithm by name, with its parameters."""

    name: Annotated[str, Resume.FORK]
    """What it is called."""
    args: Annotated[dict[str, Any], Resume.FORK] = Field(default_factory=dict)
    """Changes only the parameters that it names."""


class AlgorithmConfig(Frozen):
    """An algorithm by name, and what differs from its preset. `engines.algorithms.presets.resolve` reads it."""

    algorithm_type: Annotated[str, Resume.FORK] = "grpo"
    """Preset name."""
    repeat_times: Annotated[int | None, Resume.FORK] = Field(default=None, ge=1)
    """Group size: samples per task. None: the preset's."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and learning-rate schedule."""
    advantage_fn: Annotated[str | None, Resume.FORK] = None
    """Advantage by name. None: the preset's."""
    advantage_fn_args: Annotated[dict[str, Any], Resume.FORK] = {}
    """Changes only the parameters that it names."""
    policy_loss_fn: Annotated[str | None, Resume.FORK] = None
    """Policy loss by name. None: the preset's."""
    policy_loss_fn_args: Annotated[dict[str, Any], Resume.FORK] = {}
    """Changes only the parameters that it names."""
    kl_loss_fn: Annotated[str | None, Resume.FORK] = None
    """KL estimator to the reference model, in the loss. None: the preset's."""
    kl_loss_fn_args: Annotated[dict[str, Any], Resume.FORK] = {}
    """Changes only the parameters that it names; `kl_coef` is the coefficient."""
    kl_penalty_fn: Annotated[str | None, Resume.FORK] = None
    """KL estimator to the reference model, in the reward. None: the preset's."""
    kl_penalty_fn_args: Annotated[dict[str, Any], Resume.FORK] = {}
    """Changes only the parameters that it names; `kl_coef` is the coefficient."""
    entropy_loss_fn: Annotated[str | None, Resume.FORK] = None
    """Entropy bonus by name. None: the preset's."""
    entropy_loss_fn_args: Annotated[dict[str, Any], Resume.FORK] = {}
    """Changes only the parameters that it names; `entropy_coef` is the coefficient."""
    loss_agg_mode: Annotated[
        Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None,
        Resume.FORK,
    ] = None
    """How token losses become one number. None: the preset's."""
    bypass_old_logprobs: Annotated[bool | None, Resume.FORK] = None
    """True: the sampler's logprobs are the old logprobs. False: recompute them with the trained weights. None: the
    preset's."""
    rollout_correction: Annotated[PartConfig | None, Resume.FORK] = None
    """Weights for the difference between sampler and trainer: truncate, mask or full. None: the preset's."""
    overlong_shaping: Annotated[PartConfig | None, Resume.FORK] = None
    """Lower rewards of very long responses: overlong; or none. None: the preset's."""
    filters: Annotated[tuple[PartConfig, ...] | None, Resume.FORK] = None
    """Which rows take part, one after another. None: the preset's."""
    mask_truncated: Annotated[bool | None, Resume.FORK] = None
    """Responses that were cut at the limit do not train. None: the preset's."""
    critic: CriticConfig = CriticConfig()
    """The critic, if the algorithm has one."""


class EngineConfig(Frozen):
    """All that an engine is told. Derived from the full `Config` by `Config.engine`."""

    trainer_type: str
    model: ModelConfig
    algorithm: AlgorithmConfig
    total_steps: int | None
    """Train steps the job will make, for schedules that decay; None: open-ended."""
    critic_warmup: int = 0
    """Train steps in which only the critic learns."""
    updates_per_step: int = 1
    """optimizer.step() calls per train step."""
    max_token_len_per_gpu: int = 2048
    """Token budget of one micro-batch, padding included."""
    max_nonfinite_steps: int = 3
    """Consecutive skipped updates after which the engine gives up."""
    num_threads: int | None = None
    """torch intra-op threads. None: torch's choice."""
    seed: int = 42
