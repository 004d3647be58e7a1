# Each target sets up what it needs in .venv; a second run finds it there.

PYTHON ?= python3
TORCH  := torch==2.13.0
DEEPSPEED := deepspeed==0.19.8
BIN    := .venv/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: demo test check clean

demo: .venv/cli.stamp
	$(BIN)/sidestep demo

test: .venv/test.stamp .venv/deepspeed.stamp
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

# Built with the torch that is there and torch's setuptools, and with no kernels of its own. Where that fails, only what is
# compared with DeepSpeed is left out, and the next run tries again.
.venv/deepspeed.stamp: .venv/test.stamp
	@if DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(PIP) --no-build-isolation $(DEEPSPEED) >.venv/deepspeed.log 2>&1; \
	then touch $@; \
	else echo "DeepSpeed could not be installed (.venv/deepspeed.log says why): comparisons with it will be skipped."; fi

.PRECIOUS: .venv/torch.stamp .venv/%.stamp
