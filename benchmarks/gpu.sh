#!/usr/bin/env bash
# Everything that only a real accelerator can show, in one run of at most 6 minutes, without a network:
# parity, also with delays and with deleted waits, then memory and step time. Writes a Markdown report and its JSON.
# Needs torch, numpy and transformers. Without an accelerator it runs on the simulated device, with tiny models.
#   benchmarks/gpu.sh [OUTPUT_FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" -m benchmarks.gpu --output "${1:-${OUT:-benchmarks}}"
