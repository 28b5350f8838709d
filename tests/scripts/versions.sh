#!/usr/bin/env bash
# The fast tests with the lowest versions that work, with the newest on the index, or with another Python, in an
# environment of their own.
# Usage: versions.sh lowest|newest|python3.13 [arguments of pytest]
set -euo pipefail
which=${1:?usage: versions.sh lowest|newest|python3.13}
shift
environment=.venv-$which
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
built_on='trl|transformers|peft|accelerate|datasets|bitsandbytes|evaluate'
case "$which" in
python*)
  PYTHON=$which
  if ! "$which" -c "" 2>/dev/null; then
    echo "NOT RUN: there is no $which"
    exit "${MARFT_MISSING:-0}" # a nightly run has all of them
  fi
  cp constraints.txt "$constraints"
  ;;
lowest | newest)
  # What the tests use is as in constraints.txt; what the package builds on is the lowest, or free. torch is one build.
  grep -vE "^(#|$built_on|huggingface_hub)" constraints.txt >"$constraints"
  if [ "$which" = lowest ]; then
    sed -nE "s/^  \"($built_on)>=([0-9.]+),.*/\1==\2.*/p" pyproject.toml >>"$constraints"
    # What the extras need, too
    extras=$(sed -nE '/^\[project.optional-dependencies\]/,/^test = /p' pyproject.toml | grep -oE '"[a-z-]+>=[0-9.]+' | sort -u)
    for need in ${extras//\"/}; do
      sed -i "/^${need%%>=*}==/d" "$constraints"
      echo "${need%%>=*}==${need##*>=}.*" >>"$constraints"
    done
  fi
  export MARFT_NEWEST=1 # newer versions than `TESTED` names are what this is for
  ;;
*)
  echo "lowest, newest or the name of an interpreter, got $which"
  exit 2
  ;;
esac
"${PYTHON:-python3}" -m venv "$environment"
pip=("$environment/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager)
pip+=(--constraint "$constraints")
"${pip[@]}" torch
"${pip[@]}" --editable ".[test]"
"$environment/bin/python" --version
"$environment/bin/python" -m pip list 2>/dev/null | grep -E "^($built_on|torch) "
run=("$environment/bin/python" -m pytest -n 2 --dist worksteal -q)
"${run[@]}" -m "not slow and not exhaustive" "$@"
case "$which" in
python*) "${run[@]}" tests/test_examples.py -k "test_quickstart_prints_a_complete_report" ;; # slow, and the first thing to run
esac
