"""The models of an engine: the policy with its optimizer, and the reference, teacher and critic where they are needed.

Owns: which of them there are, where each comes from, what of them a snapshot holds. Does not own: the format of a model
(`engines.hf.model`) or of the rest of a snapshot (`engines.hf.state`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from engines.algorithms.spec import Algorithm
from engines.config import EngineConfig, ModelConfig
from engines.errors import CheckpointError, ConfigError, EngineError
from engines.hf import model as hf_model
from engines.hf import state
from engines.hf.critic import Critic
from engines.hf.model import LoadedModel, Policy
from engines.hf.optim import AdamW

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CRITIC = "critic"
"""Folder of the critic in a snapshot."""


@dataclass(frozen=True, slots=True)
class Folders:
    """Where models come from. None: from the config."""

    model: Path | None = None
    teacher: Path | None = None
    critic: Path | None = None
    restore: Path | None = None
    """A snapshot; its model and critic win."""


@dataclass(slots=True, eq=False)
class Models:
    """The models that take part in a step. Optional ones are there if the algorithm needs them."""

    loaded: LoadedModel
    policy: Policy
    optimizer: AdamW
    reference: Policy | None = None
    teacher: Policy | None = None
    critic: Critic | None = None

    @property
    def optimizers(self) -> dict[str, AdamW]:
        """Prefix of its files in a snapshot -> optimizer."""
        return {"": self.optimizer} | ({} if self.critic is None else {f"{CRITIC}/": self.critic.optimizer})


class _Builder:
    def __init__(self, config: EngineConfig, folders: Folders, device: torch.device) -> None:
        self._config, self._folders, self._device = config, folders, device

    def load(self, folder: Path | None, config: ModelConfig | None = None) -> LoadedModel:
        return hf_model.load(config or self._config.model, folder, self._config.seed, self._device)

    def restored(self, folder: Path) -> LoadedModel:
        try:
            return self.load(folder)
        except (ConfigError, EngineError) as error:
            raise CheckpointError(f"the model of the snapshot in {folder} cannot be restored: {error}") from error

    def policy(self, loaded: LoadedModel) -> Policy:
        return Policy(loaded.model, self._config.model.temperature, DTYPES[self._config.model.dtype])

    def frozen(self, folder: Path | None, config: ModelConfig | None = None) -> Policy:
        policy = self.policy(self.load(folder, config))
        policy.model.requires_grad_(False)
        return policy

    @property
    def total_updates(self) -> int | None:
        config = self._config
        return None if config.total_steps is None else config.total_steps * config.updates_per_step

    def critic(self) -> Critic:
        restore, model = self._folders.restore, self._config.model
        if restore is not None:
            loaded = self.restored(restore / CRITIC)
        elif model.critic_model_path is not None:
            loaded = self.load(self._folders.critic or Path(model.critic_model_path))
        else:
            loaded = self.load(self._folders.model)
        critic = Critic(loaded, self.policy(loaded), self._config.algorithm.critic, self.total_updates)
        if restore is not None:
            critic.load_head(restore / CRITIC)
        return critic

    def teacher(self, vocab_size: int) -> Policy | None:
        """None: rows bring the teacher's logprobs."""
        path = self._config.model.teacher_model_path
        if path is None:
            return None
        teacher = self.frozen(self._folders.teacher or Path(path))
        if (size := teacher.head.weight.shape[0]) != vocab_size:
            raise ConfigError(
                f"model.teacher_model_path = {path}: its vocabulary has {size} tokens, the model's {vocab_size}; the "
                "teacher must read the same tokens"
            )
        return teacher


def build(config: EngineConfig, algorithm: Algorithm, folders: Folders, device: torch.device) -> Models:
    """Load or build what the algorithm needs.

    Raises ConfigError, EngineError for a model that cannot be used; CheckpointError for one of the snapshot.
    """
    if config.model.dtype not in DTYPES:
        raise ConfigError(f"model.dtype = {config.model.dtype!r}; this engine knows {', '.join(DTYPES)}")
    builder = _Builder(config, folders, device)
    restore = folders.restore
    loaded = builder.load(folders.model) if restore is None else builder.restored(restore / state.MODEL)
    return Models(
        loaded=loaded,
        policy=builder.policy(loaded),
        optimizer=AdamW(loaded.model, config.algorithm.optimizer, builder.total_updates),
        reference=builder.frozen(folders.model) if "reference" in algorithm.needs else None,
        teacher=builder.teacher(loaded.vocab_size) if "teacher_logprobs" in algorithm.needs else None,
        critic=builder.critic() if "values" in algorithm.needs else None,
    )
