"""Engines by name. Owns: which class a `trainer.trainer_type` means. Imports no engine before it is asked for.

Built-in engines are listed here; others come as entry points of the group `trinity_flows.engines`, or are named in full
as module:Class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from engines import plugins
from engines.base import TrainEngineWrapper
from engines.config import EngineConfig
from engines.errors import ConfigError

ENGINES: dict[str, str] = {"hf": "engines.hf.engine:HfEngine"}
"""Name -> module:Class."""

ENTRY_POINT_GROUP = "trinity_flows.engines"


def get_trainer_wrapper(config: EngineConfig) -> TrainEngineWrapper:
    """The engine that `config.trainer_type` names, not yet prepared.

    Raises ConfigError for an unknown name, or for a plug-in that cannot be imported or is not an engine.
    """
    name = config.trainer_type
    target = ENGINES.get(name) or plugins.target("trainer.trainer_type", name, ENTRY_POINT_GROUP, ENGINES)
    engine_class = plugins.load(f"engine {name!r}", target)
    if not (isinstance(engine_class, type) and issubclass(engine_class, TrainEngineWrapper)):
        raise ConfigError(f"engine {name!r} ({target}) is not a TrainEngineWrapper")
    construct = cast("Callable[[EngineConfig], TrainEngineWrapper]", engine_class)
    return construct(config)
