"""What the README says exists: its commands, make targets, files and configs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from engines.algorithms.describe import listing
from flows.cli import app
from trinity_tasks.config_source import apply_override, load_config, parse_config

REPO = Path(__file__).parents[2]
README = (REPO / "README.md").read_text()
COMMANDS: Any = typer.main.get_command(app)


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"^    make ([a-z-]+)", README, re.MULTILINE))
    assert len(named) >= 5
    assert named <= targets


def test_every_link_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    missing = [link for link in links if "://" not in link and not (REPO / link).exists()]
    assert len(links) >= 5
    assert missing == []


def test_every_command_and_option_is_known() -> None:
    lines = re.findall(r"^    (?:\.venv/bin/)?trinity-flows (.+)$", README, re.MULTILINE)
    assert len(lines) >= 4
    for line in lines:
        names, *words = line.split("#")[0].replace("[", " ").replace("]", " ").split()
        for name in names.split("|"):
            options = {option for parameter in COMMANDS.commands[name].params for option in parameter.opts}
            assert {word for word in words if word.startswith("-")} <= options, line


def test_commands_that_show_work_name_every_command() -> None:
    table = set(re.findall(r"^\| `([a-z]+)` \|", README, re.MULTILINE))
    in_line = set(re.findall(r"trinity-flows ([a-z]+) JOB_URL", README))
    assert table | in_line == set(COMMANDS.commands)


@pytest.mark.parametrize("block", re.findall(r"```yaml\n(.*?)```", README, re.DOTALL))
def test_yaml_is_a_valid_config(block: str) -> None:
    config = parse_config(yaml.safe_load(block))
    assert (config.algorithm.algorithm_type, config.train_batch_size) in {("grpo", 16 * 8), ("sft", 64)}


def test_overrides_fit_their_config() -> None:
    shown = re.findall(r"-c (infra/\S+) --set (\S+)", README)
    assert shown
    for path, override in shown:
        raw = yaml.safe_load((REPO / path).read_text())
        apply_override(raw, override)
        assert parse_config(raw) != load_config(REPO / path), override


def test_table_of_algorithms_is_what_the_command_says() -> None:
    section = README.partition("\n## Algorithms\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    assert rows[2:] == [f"| {page.name} | {page.source} | {page.needs_in_short} |" for page in listing().algorithms]
