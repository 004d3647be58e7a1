"""The public names, the words that no name holds, and the sites of the engine's waits."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import sidestep
from sidestep.engine import sites

PACKAGE = Path(sidestep.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# What the design makes public. Names that later versions bring: offload_parameters, plan, Plan, and the
# modules checkpoint and integrations.
PUBLIC = ["Hardware", "OffloadOptimizer", "Placement", "Report", "SidestepError", "offload", "testing"]

# Words that say nothing about what a thing does.
EMPTY_WORDS = {"manager", "helper", "helpers", "util", "utils", "handler", "info", "misc"}

SITES = {name: value for name, value in vars(sites).items() if name.isupper() and isinstance(value, str)}


def test_public_names() -> None:
    assert sorted(sidestep.__all__) == sorted(PUBLIC)
    assert all(hasattr(sidestep, name) for name in PUBLIC)


def words(name: str) -> set[str]:
    """``HostStore`` and ``host_store`` both have the words host and store."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def test_words() -> None:
    assert words("OffloadManager") == {"offload", "manager"}
    assert words("_read_misc_info2") == {"read", "misc", "info"}
    assert words("HTTPHandler") == {"http", "handler"}


def defined(file: Path) -> Iterator[str]:
    yield file.stem
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_no_empty_words_in_names(file: Path) -> None:
    assert not [name for name in defined(file) if words(name) & EMPTY_WORDS]


def test_sites_differ() -> None:
    assert len(set(SITES.values())) == len(SITES)


def test_hazards_are_of_sites() -> None:
    assert set(sites.HAZARDS) <= set(SITES.values())


@pytest.mark.parametrize("name", SITES)
def test_each_site_says_its_hazard(name: str) -> None:
    assert sites.HAZARDS.get(SITES[name]), f"say in HAZARDS what goes wrong without the wait {name}"


@pytest.mark.parametrize("name", SITES)
def test_each_site_is_used(name: str) -> None:
    assert name in _names_in_engine_and_step(), f"no code waits at {name}"


def _names_in_engine_and_step() -> set[str]:
    files = [
        file
        for file in [
            *(PACKAGE / f"{name}.py" for name in ("step", "offloaded", "overlap")),
            *(PACKAGE / "engine").glob("*.py"),
        ]
        if file.stem != "sites"
    ]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)} | {
        node.id for node in nodes if isinstance(node, ast.Name)
    }
