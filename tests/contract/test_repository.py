"""What the text of this repository must not hold: paths of one machine, and addresses of package registries."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Put together here, so that this file does not hold them either.
MACHINE_PATHS = ["/" + "/".join(parts) for parts in [("work", ""), ("root", ""), ("opt", "wheels"), ("opt", "pypi")]]
REGISTRIES = [".".join(parts) for parts in [("pypi", "org"), ("pythonhosted", "org"), ("download", "pytorch", "org")]]


def repository_files() -> list[Path]:
    """Every file that is, or would be, committed; outside a git checkout there is nothing to look at."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in done.stdout.split("\0") if name]
    return [file for file in files if file.is_file()]


@pytest.mark.parametrize("word", [*MACHINE_PATHS, *REGISTRIES])
def test_no_file_mentions(word: str) -> None:
    found = [str(file.relative_to(ROOT)) for file in repository_files() if word.encode() in file.read_bytes()]
    assert not found, f"{word} in {found}"
