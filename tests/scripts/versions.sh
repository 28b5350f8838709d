#!/usr/bin/env bash
# The fast tests with the lowest versions that work or with the newest on the index, in an environment of their own.
# Usage: versions.sh lowest|newest [arguments of pytest]
set -euo pipefail
which=${1:?usage: versions.sh lowest|newest}
shift
environment=.venv-$which
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
# What the tests use is as in constraints.txt; what the package builds on is the lowest, or free. torch is one build.
grep -vE '^(#|trl|transformers|peft|accelerate|datasets|bitsandbytes|evaluate|huggingface_hub)' constraints.txt >"$constraints"
if [ "$which" = lowest ]; then
  sed -nE 's/^  "(trl|transformers|peft|accelerate|datasets|bitsandbytes|evaluate)>=([0-9.]+),.*/\1==\2.*/p' pyproject.toml >>"$constraints"
fi
"${PYTHON:-python3}" -m venv "$environment"
pip=("$environment/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade --constraint "$constraints")
"${pip[@]}" torch
"${pip[@]}" --editable ".[test]"
"$environment/bin/python" -m pip list 2>/dev/null | grep -E '^(trl|transformers|peft|accelerate|datasets|bitsandbytes|evaluate|torch) '
export MARFT_NEWEST=1 # newer versions than `TESTED` names are what this is for
exec "$environment/bin/python" -m pytest -n 2 --dist worksteal -q -m "not slow and not exhaustive" "$@"
