#!/usr/bin/env bash
# What a machine with PyTorch, but without a package index, lacks to run `python -m dhp.train_ray`: an archive a package
# in OUT_DIR, of the environment's own packages, 60 MiB at most in all. Prints the bytes of each.
#   scripts/gpu_bundle.sh OUT_DIR [PACKAGE …]
# PACKAGE: what is there already, with what it needs itself; by default torch, numpy, pillow, numba, tensorboard, psutil
# and aiohttp. PyAV, 36 MB, is left out: a run on pictures and text does without it. Compiled packages serve the minor
# version of Python that made them, which their names end with: PYTHON=… takes another environment. There:
#   mkdir SITE && for one in OUT_DIR/*.tar.xz; do tar -xJf "$one" -C SITE; done && export PYTHONPATH=SITE
set -euo pipefail
out=$(mkdir -p "${1:?the folder for the archives}" && cd "$1" && pwd)
shift
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if [ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
most=$((60 << 20))
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
rm -f "$out"/*.tar.xz
"$python" scripts/gpu_bundle.py "$folder" "$@" | while read -r name; do
  tar -C "$folder/$name" -c . | xz -6 -T0 > "$out/$name.tar.xz"
  rm -r "${folder:?}/$name"
  printf '%11d  %s\n' "$(stat -c %s "$out/$name.tar.xz")" "$name"
done
total=$(cat "$out"/*.tar.xz | wc -c)
printf '%11d  of %d\n' "$total" "$most"
if [ "$total" -gt "$most" ]; then
  echo "more than 60 MiB: name more packages that are there already" >&2
  exit 1
fi
