#!/usr/bin/env bash
# What dhp does on one GPU of this machine: kernels, speed at full depth, parity with the plain model, waits. Rows are
# appended to results/gpu.jsonl as soon as they are there. Status 0: all is right; 1: something deviates; 2: no device.
#
# It needs Python 3.11 or newer with torch, transformers (whose pins are in requirements.txt; the first row says which
# are here), numpy, pillow and safetensors. Neither ray, hydra, omegaconf, deepspeed, numba nor av have to be there, and
# no package index. Where another version is to be brought along, as wheels in a folder WHEELS:
#   python3 -m pip install --no-index --no-deps --find-links WHEELS --target SITE transformers
#   PYTHONPATH=SITE scripts/gpu_check.sh
# Rows that need bitsandbytes, peft, deepspeed or triton are skipped where these are missing. `--from SECTION` goes on
# where a run ended, `--patience 2` gives each section twice its time (with `--limit` and GPU_CHECK_S, seconds), `--out FILE` writes elsewhere; `python -m experiments.gpu_check.report` makes a table of the rows.
set -euo pipefail
cd "$(dirname "$0")/.."
python=python3
if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
exec timeout "${GPU_CHECK_S:-550}" "$python" -m experiments.gpu_check --device cuda --out results/gpu.jsonl "$@"
