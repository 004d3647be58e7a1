"""The ``sidestep`` command. It needs the ``cli`` extra; the library itself does not."""

from __future__ import annotations

import sys

_EXTRA = ("typer", "rich", "matplotlib")


def main() -> None:
    """Run the command line, or say which extra it is missing and exit with status 1."""
    try:
        from sidestep.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        sys.exit(f"sidestep: the command line needs {error.name}, which is not installed: pip install 'sidestep[cli]'")
    app()
