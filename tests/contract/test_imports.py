"""Which file may import which, what an import pulls in, and what only one file may name."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
PACKAGE = SOURCE / "sidestep"
FILES = sorted(PACKAGE.rglob("*.py"))

# From the inside out: each layer may import itself and the layers above it in this list.
LAYERS = [
    {"errors", "shards"},
    {"placement", "leaves", "interrupts", "skips", "ranks"},
    {"wrapped"},
    {"trials"},
    {"twins"},
    {"probe"},
    {"chunks"},
    {"guarded", "engine", "masters"},
    {"kernels"},
    {"rest", "gradients", "offloaded", "forwards"},
    {"gates", "overlap"},
    {"watch"},
    {"lending"},
    {"host_update"},
    {"shadow"},
    {"step"},
    {"arrangement"},
    {"times", "trace"},
    {"picture"},
    {"loading", "report", "dcp"},
    {"optimizer"},
    {"parameters"},
    {"planning"},
    {"integrations", "cli"},
]
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}

TESTING_IMPORTS = ("sidestep.errors", "sidestep.engine.device", "sidestep.engine.sites", "sidestep.testing")
IMPORTS_TESTING = {"cli", "planning", "testing"}
REAL_DEVICE_NAMES = ("torch.cuda", "torch.Stream", "torch.accelerator", "torch.xpu", "torch.Event")
OPTIONAL = ("transformers", "accelerate", "rich", "typer", "matplotlib", "sidestep.testing", "sidestep.cli")
POSIX_ONLY = {"resource", "fcntl", "pwd", "grp", "termios", "tty", "pty", "posix", "syslog"}


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(file) for file in FILES}


def part(module: str) -> str:
    """``sidestep.engine.slots`` is of the part ``engine``; the package itself of the part "" (it only re-exports)."""
    return [*module.split("."), ""][1]


def imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every module named by an import statement anywhere in ``tree``, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            origin = str(node.module)
            names = [f"{origin}.{alias.name}" for alias in node.names]
            yield from ((name if name in MODULES else origin, node.lineno) for name in names)


def own_imports(file: Path) -> list[tuple[str, int]]:
    found = imported(ast.parse(file.read_text()))
    return [(name, line) for name, line in found if name.split(".")[0] == "sidestep"]


def allowed(importer: str, target: str) -> bool:
    """Whether the arrow from ``importer`` to ``target``, two modules of the package, is one that the design draws."""
    source_part, target_part = part(importer), part(target)
    if source_part == "testing":
        return target.startswith(TESTING_IMPORTS)
    if target_part == "testing":
        return source_part in IMPORTS_TESTING
    if target_part == "cli":
        return source_part == "cli"
    if source_part == "":
        return RANK[target_part] <= RANK["planning"]
    if target_part == "":
        return source_part in LAYERS[-1]  # only the outermost layer uses the library as its users do
    return RANK[target_part] <= RANK[source_part]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_one_way(file: Path) -> None:
    importer = module_name(file)
    wrong = [f"{importer}:{line} imports {name}" for name, line in own_imports(file) if not allowed(importer, name)]
    assert not wrong, wrong


def test_every_part_has_a_layer() -> None:
    parts = {part(module_name(file)) for file in FILES} - {"", "testing"}
    assert parts <= RANK.keys(), f"give {parts - RANK.keys()} a place in LAYERS"


@pytest.mark.parametrize(
    ("importer", "target"),
    [
        ("sidestep.engine.slots", "sidestep.step"),
        ("sidestep.step", "sidestep.optimizer"),
        ("sidestep.optimizer", "sidestep.testing"),
        ("sidestep.testing.simulated", "sidestep.engine.slots"),
        ("sidestep.testing.simulated", "sidestep"),
        ("sidestep.planning.planner", "sidestep.cli.app"),
        ("sidestep.engine.slots", "sidestep"),
    ],
)
def test_an_arrow_that_the_design_does_not_draw_is_seen(importer: str, target: str) -> None:
    assert not allowed(importer, target)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_only_one_file_names_a_real_device(file: Path) -> None:
    if file == PACKAGE / "engine" / "accelerator.py":
        return
    named = {ast.unparse(node) for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}
    named |= {name for name, _ in imported(ast.parse(file.read_text()))}
    assert not named & set(REAL_DEVICE_NAMES)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_nothing_posix_only_at_import(file: Path) -> None:
    tree = ast.parse(file.read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    late = {id(inner) for node in ast.walk(tree) if isinstance(node, functions) for inner in ast.walk(node)}
    statements = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    at_import = [name for node in statements if id(node) not in late for name, _ in imported(node)]
    assert not {name.split(".")[0] for name in at_import} & POSIX_ONLY


def test_import_pulls_in_nothing_optional() -> None:
    code = f"import sys, sidestep; print([name for name in {OPTIONAL!r} if name in sys.modules])"
    assert _python(code) == "[]"


def test_command_line_parts_are_not_needed_to_import_its_entry_point() -> None:
    code = "import sys, sidestep.cli; print([name for name in ('typer', 'rich', 'matplotlib') if name in sys.modules])"
    assert _python(code) == "[]"


def test_a_missing_extra_is_named() -> None:
    code = "import sys; sys.modules['typer'] = None\nfrom sidestep.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'sidestep[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_import_time_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints what ``import sidestep`` adds to ``import torch``; a time is never a reason to fail."""
    code = (
        "import time, torch\nstart = time.perf_counter()\nimport sidestep\n"
        "print(f'{(time.perf_counter() - start) * 1000:.1f}')"
    )
    milliseconds = _python(code)
    with capsys.disabled():
        print(f"\nimport sidestep adds {milliseconds} ms to import torch (aim: under 50)")


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
