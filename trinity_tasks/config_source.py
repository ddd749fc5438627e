"""Where a `Config` comes from (YAML, `--set`, a form), and what a resume may change.

Every error names field, value and remedy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import yaml
from pydantic import BaseModel, ValidationError

from engines.config import Resume
from engines.errors import ConfigError
from engines.plugins import hint
from trinity_tasks.config import Config


class Change(NamedTuple):
    """One field that differs between the job's config and the one given now."""

    field: str
    before: Any
    after: Any
    resume: Resume


class _StrictLoader(yaml.SafeLoader):
    """YAML lets the last of two equal keys win, and half of a config would be lost without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [str(key.value) for key, _ in node.value]
        for key, _ in node.value:
            if keys.count(str(key.value)) > 1 and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.MarkedYAMLError(None, None, f"key {key.value!r} is given twice", key.start_mark)
        return super().construct_mapping(node, deep)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, lay `key.sub=value` overrides over it, validate.

    Raises ConfigError: no such file, not YAML, unknown key (with the nearest known one), or a bad value.
    """
    file = Path(path)
    try:
        text = file.read_text()
    except OSError as error:
        raise ConfigError(f"{file}: cannot read the config: {error.strerror}; give a YAML file with -c") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text: {error}; give a YAML file with -c") from error
    try:
        raw = yaml.load(text, _StrictLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not YAML: {error}") from error
    if not isinstance(raw, Mapping):
        what = "is empty" if raw is None else f"holds a {type(raw).__name__}"
        raise ConfigError(f"{file}: a config is a mapping of keys, this file {what}; see infra/configs for examples")
    merged = dict(cast("Mapping[str, Any]", raw))
    for override in overrides:
        apply_override(merged, override)
    return parse_config(merged, where=str(file))


def apply_override(raw: dict[str, Any], text: str) -> None:
    """Set `a.b=value` in `raw`; the value is YAML, an item of a list goes by its number or its name (`stages.grpo...`).

    A list that a stage inherits becomes the stage's own first, so that an item of it can be named.
    Raises ConfigError if there is no `=`, the value is not YAML, or the list has no such item.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text!r}: write key=value, for example --set trainer.total_steps=200")
    try:
        parsed: Any = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {text!r}: the value is not YAML: {error}") from error
    *parents, last = key.strip().split(".")
    target: Any = raw
    for depth, part in enumerate(parents):
        if isinstance(target, list):
            target = _list_item(cast("list[Any]", target), part, text)
        else:
            inherited = _inherited_list(raw, parents[: depth + 1])
            target = cast("dict[str, Any]", target).setdefault(part, {} if inherited is None else inherited)
        if not isinstance(target, dict | list):
            raise ConfigError(f"--set {text!r}: {part} is {target!r}, which has no keys below it")
    if isinstance(target, list):
        raise ConfigError(f"--set {text!r}: {last} is a whole item of a list; name a key inside it")
    target[last] = parsed


def _inherited_list(raw: dict[str, Any], path: list[str]) -> list[Any] | None:
    """A copy of the list that lies at `path`, inside a stage, in the sections that all stages share; or None."""
    if path[0] != "stages":
        return None
    shared: Any = raw
    for part in path[2:]:
        shared = cast("dict[str, Any]", shared).get(part) if isinstance(shared, dict) else None
    return deepcopy(cast("list[Any]", shared)) if isinstance(shared, list) else None


def _list_item(items: list[Any], part: str, text: str) -> Any:
    names = [str(item.get("stage_name") or item.get("name") or number) for number, item in enumerate(items)]
    if part in names:
        return items[names.index(part)]
    if part.isdigit() and int(part) < len(items):
        return items[int(part)]
    raise ConfigError(f"--set {text!r}: no item {part!r}; there are {', '.join(names)}")


def parse_config(raw: Mapping[str, Any], where: str = "config") -> Config:
    """Validate a mapping. Raises ConfigError that lists every fault with field, value and what is allowed."""
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        lines = [_explain(dict(fault)) for fault in error.errors(include_url=False)]
        raise ConfigError(f"{where}: " + "\n  ".join(lines)) from error


def _explain(fault: dict[str, Any]) -> str:
    path = list(fault["loc"])
    in_stage = path[:1] == ["stages"] and len(path) > 1 and isinstance(path[1], str)
    location = [part for part in path[2 * in_stage :] if not isinstance(part, int)]
    name = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        known = _known_keys(location[:-1])
        return f"{name}: unknown key; {hint(str(location[-1]), known, 'known keys')}"
    message = str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] in ("model_type", "dict_type"):
        message = "it must be a mapping of keys"
    if fault["type"] == "tuple_type":
        message = "it must be a list"
    whole = isinstance(fault["input"], BaseModel) or (
        isinstance(fault["input"], Mapping) and fault["type"] == "value_error"
    )
    shown = "" if whole else " (given: nothing)" if fault["input"] is None else f" (given: {fault['input']!r})"
    return f"{name}: {message}{shown}" if name else message


def _known_keys(location: Sequence[Any]) -> list[str]:
    model: type[BaseModel] = Config
    for part in location:
        annotation = model.model_fields[str(part)].annotation
        candidates = (annotation, *_nested_args(annotation))
        model = next(item for item in candidates if isinstance(item, type) and issubclass(item, BaseModel))
    return sorted(model.model_fields)


def _nested_args(annotation: Any) -> Iterator[Any]:
    for item in get_args(annotation):
        yield item
        yield from _nested_args(item)


def fingerprint(config: Config) -> str:
    """Sha256 over everything that makes the job this experiment: the FORK and FORBIDDEN fields."""
    identity = {name: value for name, (value, resume) in _fields(config).items() if resume is not Resume.SAFE}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def changes(before: Mapping[str, Any], after: Config) -> list[Change]:
    """Fields in which `after` differs from the stored dump of the job's config, with what a resume may do."""
    old, new = _fields(Config.model_validate(before)), _fields(after)
    missing = (None, Resume.SAFE)
    return [
        Change(name, old.get(name, missing)[0], new.get(name, missing)[0], (new.get(name) or old[name])[1])
        for name in dict.fromkeys([*old, *new])
        if old.get(name, missing)[0] != new.get(name, missing)[0]
    ]


def _fields(config: Config) -> dict[str, tuple[Any, Resume]]:
    """Every field by its dotted name. A stage counts with all it resolves to, so that each field keeps its own rule."""
    if not config.stages:
        return dict(_leaves(config))
    return {
        f"stages.{stage.stage_name}.{name}": value
        for stage in config.stages
        for name, value in _leaves(config.stage(stage.stage_name))
    }


def _leaves(model: BaseModel, prefix: str = "") -> Iterator[tuple[str, tuple[Any, Resume]]]:
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        resume = next((item for item in field.metadata if isinstance(item, Resume)), None)
        if isinstance(value, BaseModel):
            yield from _leaves(value, f"{prefix}{name}.")
        elif (
            resume is None
            and isinstance(value, tuple)
            and any(isinstance(item, BaseModel) for item in cast("tuple[Any, ...]", value))
        ):
            for index, item in enumerate(cast("tuple[BaseModel, ...]", value)):
                yield from _leaves(item, f"{prefix}{name}.{index}.")
        else:
            dumped = model.model_dump(mode="json", include={name})[name]
            yield f"{prefix}{name}", (dumped, resume or Resume.FORK)
