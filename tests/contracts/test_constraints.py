"""infra/constraints.txt pins everything that pyproject.toml asks for, in a form that installs on any machine."""

import re
import tomllib
from pathlib import Path

REPO = Path(__file__).parents[2]
PIN = re.compile(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.!]+)")
NAME = re.compile(r"[A-Za-z0-9._-]+")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    found: dict[str, str] = {}
    for line in (REPO / "infra/constraints.txt").read_text(encoding="ascii").splitlines():
        if line.startswith("#"):
            continue
        match = PIN.fullmatch(line)
        assert match, f"infra/constraints.txt: {line!r} is not name==version; no URL, path, option or +local version"
        assert normal(match[1]) not in found, f"infra/constraints.txt: {match[1]} is pinned twice"
        found[normal(match[1])] = match[2]
    return found


def test_every_requirement_is_pinned_but_those_of_the_ray_extra() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    extras = {name: entry for name, entry in project["optional-dependencies"].items() if name != "ray"}
    wanted = [*project["dependencies"], *(line for entry in extras.values() for line in entry)]
    names = {normal(match[0]) for line in wanted if (match := NAME.match(line))}
    assert len(names) > 20
    assert names - pins().keys() == set()


def test_measured_versions_are_the_pinned_ones() -> None:
    measured = {"torch": "2.13.0", "transformers": "5.24.0", "prefect": "3.9.1", "mlflow": "3.17.2", "trl": "1.16.0"}
    assert {name: pins()[name] for name in measured} == measured
