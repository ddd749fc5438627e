"""TRL's side of the train step: `GRPOTrainer` with generation replaced by the stored sequences.

A step runs from `on_step_begin` to `on_step_end`: padding, rewards and advantages, forward and backward of every
micro-batch, clip, optimizer. TRL also computes entropy and clip metrics, which cannot be turned off.
"""

# The extra `bench` may not be installed where types are checked.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.benchmarks.pairs import Commands
from tests.benchmarks.workload import GROUP_SIZE, LEARNING_RATE, read_rows

MICRO_BATCH = 8
UNREACHED_STEPS = 1_000_000


class _NoMoreSteps(Exception):
    """The caller has closed the pipe."""


class _StepClock(TrainerCallback):
    """Waits for a go before each optimisation step and reports on it when TRL has logged it."""

    def __init__(self, commands: Commands) -> None:
        self.commands = commands
        self.trainer: Any = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.commands.ready(num_parameters=self.trainer.model.num_parameters())

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if not self.commands.wait():
            raise _NoMoreSteps
        self.commands.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.commands.end()

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        responses = self.trainer._buffered_inputs[0]["num_items_in_batch"]
        self.commands.report(loss=logs["loss"], grad_norm=logs["grad_norm"], num_trained_tokens=float(responses))


def main() -> None:
    """Serve steps of the workload in argv[1], JSON: folder, dtype, num_threads, gradient_checkpointing."""
    spec = json.loads(sys.argv[1])
    commands = Commands()
    torch.set_num_threads(spec["num_threads"])
    with tempfile.TemporaryDirectory() as output:
        trainer = _trainer(spec, output, _StepClock(commands))
        try:
            trainer.train()
        except _NoMoreSteps:
            return


def _trainer(spec: dict[str, Any], output: str, clock: _StepClock) -> GRPOTrainer:
    folder = Path(spec["folder"])
    rows = read_rows(folder)

    def stored(prompts: list[str], *_: Any) -> dict[str, Any]:
        assert prompts == [str(index // GROUP_SIZE) for index in range(len(rows))], prompts
        return {
            "prompt_ids": [row.prompt for row in rows],
            "completion_ids": [row.response for row in rows],
            "logprobs": None,
            "stored_reward": [row.reward for row in rows],
        }

    def reward(stored_reward: list[float | None], **_: Any) -> list[float | None]:
        return stored_reward

    arguments = GRPOConfig(
        output_dir=output,
        use_cpu=True,
        bf16=spec["dtype"] == "bfloat16",
        gradient_checkpointing=spec["gradient_checkpointing"],
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=len(rows) // MICRO_BATCH,
        num_generations=GROUP_SIZE,
        max_completion_length=max(len(row.response) for row in rows),
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_steps=UNREACHED_STEPS,
        shuffle_dataset=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": [str(group) for group in range(len(rows) // GROUP_SIZE)]}),
        rollout_func=stored,
        callbacks=[clock],
    )
    clock.trainer = trainer
    return trainer


if __name__ == "__main__":
    main()
