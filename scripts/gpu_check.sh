#!/usr/bin/env bash
# What dhp does on one GPU of this machine: the product itself, steps, kernels, parity with the plain model, waits. Rows
# are appended to results/gpu.jsonl as soon as they are there. Status 0: all is right; 1: something deviates; 2: no device.
#
# All of it takes 12 minutes, and two calls suffice where a machine is held for less; by worth, the first before the second:
#   GPU_CHECK_S=420 scripts/gpu_check.sh --limit 410 --only probe product rates attention processes
#   GPU_CHECK_S=330 scripts/gpu_check.sh --limit 320 --only full_depth compile parity generation determinism kernels waits profile recompute
#
# It needs Python 3.11 or newer with torch, transformers (whose pins are in requirements.txt; the first row says which
# are here), numpy, pillow and safetensors. What is not there and is not to be had from a package index is brought along
# by scripts/gpu_bundle.sh OUT_DIR; without Ray, Hydra and DeepSpeed the rows of the product are skipped, and so are
# others without what they need (peft, bitsandbytes, triton, flash-attn-4). `--from SECTION` goes on where a run ended,
# `--patience 2` gives each section twice its time (with `--limit` and GPU_CHECK_S, seconds), `--out FILE` writes
# elsewhere; `python -m experiments.gpu_check.report` makes a table of the rows.
set -euo pipefail
cd "$(dirname "$0")/.."
python=python3
if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
exec timeout "${GPU_CHECK_S:-750}" "$python" -m experiments.gpu_check --device cuda --out results/gpu.jsonl "$@"
