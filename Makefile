# Each target sets up what it needs in .venv; a second run finds it there.

PYTHON ?= python3
TORCH  := torch==2.13.0
BIN    := .venv/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: demo test check clean

demo: .venv/cli.stamp
	$(BIN)/sidestep demo

test: .venv/test.stamp
	$(BIN)/python -m pytest --numprocesses auto --dist loadgroup

check: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q --numprocesses auto --seeds 2 --every 25 tests/unit tests/contract tests/simulated

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist sidestep-demo.png
	find src tests -name __pycache__ -prune -exec rm -rf {} +

# torch first and pinned: the test results are stated for this version.
.venv/torch.stamp: Makefile
	$(PYTHON) -m venv .venv
	@echo "Installing $(TORCH); the first time this takes minutes."
	$(PIP) $(TORCH)
	@touch $@

.venv/%.stamp: .venv/torch.stamp pyproject.toml
	$(PIP) $(TORCH) --editable '.[$*]'
	@touch $@

.PRECIOUS: .venv/torch.stamp .venv/%.stamp
