"""TRL's trainers, built for the small model. Owns: what happens where TRL is not installed; that nothing is downloaded.

Without TRL every test module that imports this is skipped; with SECOND_OPINION=required it fails instead.
"""

# The extra `bench` may not be installed where types are checked.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer
    except ModuleNotFoundError as error:
        if error.name != "trl" or os.environ.get("SECOND_OPINION") == "required":
            raise
        pytest.skip(
            "NO SECOND OPINION: TRL is not installed, so nothing is compared with it; run `make second-opinion`",
            allow_module_level=True,
        )
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

Scores = Callable[[Any], tuple[Tensor, Tensor | None]]
"""Model -> [B, T] logprobs and entropies of the completions."""


class _Given:
    """In place of a forward pass, what the test gives. All else is TRL's."""

    given: Scores

    def _get_per_token_logps_and_entropies(self, model: Any, *_: Any, **__: Any) -> tuple[Any, Any, None]:
        return (*self.given(model), None)


class _GivenGrpo(_Given, GRPOTrainer):
    pass


class _GivenRloo(_Given, RLOOTrainer):
    pass


def grpo(folder: Path, given: Scores | None = None, **config: Any) -> Any:
    """A GRPOTrainer on the model in `folder`, in training mode; `given` replaces its forward passes."""
    return _online(GRPOTrainer if given is None else _GivenGrpo, GRPOConfig, folder, given, config)


def rloo(folder: Path, given: Scores | None = None, **config: Any) -> Any:
    """An RLOOTrainer, likewise."""
    return _online(RLOOTrainer if given is None else _GivenRloo, RLOOConfig, folder, given, config)


def _online(trainer_class: Any, config_class: Any, folder: Path, given: Scores | None, config: dict[str, Any]) -> Any:
    prompts = Dataset.from_dict({"prompt": ["a", "b"]})
    trainer = _built(trainer_class, config_class, folder, config, reward_funcs=_stored_reward, train_dataset=prompts)
    if given is not None:
        trainer.given = given
    return trainer


def dpo(folder: Path, **config: Any) -> Any:
    """A DPOTrainer whose reference is the model in `folder`."""
    pairs = Dataset.from_dict({"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]})
    return _built(DPOTrainer, DPOConfig, folder, config, train_dataset=pairs)


def sft(folder: Path, **config: Any) -> Any:
    """An SFTTrainer."""
    rows = Dataset.from_dict({"prompt": ["a"], "completion": ["b"]})
    return _built(SFTTrainer, SFTConfig, folder, config, train_dataset=rows)


def scored(
    trainer: Any, completions: Sequence[Sequence[int]], rewards: Sequence[float], prompts: Sequence[str], **given: Any
) -> dict[str, Any]:
    """What TRL makes of these answers in place of sampled ones: masks, advantages, weights.

    For GRPOTrainer `given` are further results of a rollout: logprobs of the sampler, env_mask.
    """
    ids = [list(completion) for completion in completions]

    def rollout(texts: list[str], _: Any) -> dict[str, Any]:
        prompt_ids = trainer.processing_class(texts)["input_ids"]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None} | given

    if isinstance(trainer, GRPOTrainer):
        trainer.rollout_func = rollout
    else:
        trainer._generate_single_turn = lambda *_: ids
    rows = [{"prompt": prompt, "reward": reward} for prompt, reward in zip(prompts, rewards, strict=True)]
    with quiet():
        return trainer._generate_and_score_completions(rows)


def loss(trainer: Any, inputs: dict[str, Any], **arguments: Any) -> Tensor:
    """TRL's loss of a micro-batch, with gradient."""
    with quiet():
        return trainer.compute_loss(trainer.model, inputs, **arguments)


def _stored_reward(reward: Sequence[float], **_: Any) -> list[float]:
    """The column `reward` of the dataset."""
    return list(reward)


def _built(trainer_class: Any, config_class: Any, folder: Path, config: dict[str, Any], **arguments: Any) -> Any:
    with quiet():
        settings = config_class(
            output_dir=str(folder.parent / "trl"),
            use_cpu=True,
            bf16=False,
            report_to="none",
            disable_tqdm=True,
            **config,
        )
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        trainer = trainer_class(model=model, processing_class=tokenizer, args=settings, **arguments)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = settings.gradient_accumulation_steps
    return trainer


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without TRL's warnings and progress bars, which are not about us."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
