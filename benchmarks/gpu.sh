#!/usr/bin/env bash
# All that needs GPUs, in one command of at most 30 minutes on one node; the result is one JSON file.
#
#   benchmarks/gpu.sh gpu.json               with the GPUs that there are, one or more
#   benchmarks/gpu.sh gpu.json --beside "torchrun ... -m torchtitan.train ..."    and another trainer beside the scaffold
#   benchmarks/gpu.sh gpu.json --rehearse    the same on a machine without GPUs, at small sizes
#
# It needs a Python with torch ($PYTHON, default python3) and changes nothing there: packages that are missing go to build/gpu.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:?the file for the result, such as gpu.json}")
python=${PYTHON:-python3}
site=$PWD/build/gpu
"$python" -c 'import torch' || { echo "$python cannot import torch: set PYTHON to one that can" >&2; exit 2; }
mkdir -p "$site"
ln -sfn "$PWD" "$site/verified_fsdp2"
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
"$python" -c 'import jinja2, yaml, jsonschema' 2>/dev/null || "$python" -m pip install --quiet --target "$site" jinja2 pyyaml jsonschema
exec "$python" -u benchmarks/gpu.py "$out" "${@:2}"
