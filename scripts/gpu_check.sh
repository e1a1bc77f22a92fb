#!/usr/bin/env bash
# Parity of the tiny model with 1+1 and 2+2 actors on the GPU of this machine; figures to results/gpu.json.
set -euo pipefail
cd "$(dirname "$0")/.."
python=python3
if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
exec timeout 480 "$python" -m experiments.gpu_check --device cuda --out results/gpu.json "$@"
