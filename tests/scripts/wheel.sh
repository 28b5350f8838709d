#!/usr/bin/env bash
# The wheel as users get it: built from the tree, installed into empty environments, each extra and none, with every
# Python that is installed. In each, a team of two is written, planned, trained for two steps and asked.
# Usage: wheel.sh [extras ...], by default none and each one
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git archive HEAD | tar -x -C "$(mkdir -p "$work/source" && echo "$work/source")"
"${PYTHON:-python3}" -m venv "$work/build"
"$work/build/bin/python" -m pip install --quiet --disable-pip-version-check build twine
"$work/build/bin/python" -m build --outdir "$work/dist" "$work/source" >"$work/build.log" 2>&1 || { tail -20 "$work/build.log"; exit 1; }
"$work/build/bin/python" -m twine check --strict "$work"/dist/*
wheel=$(echo "$work"/dist/*.whl)
extras=("$@")
[ $# -gt 0 ] || extras=(none math plots serve tasks vllm)
for python in python3.11 python3.12 python3.13; do
  if ! "$python" -c "" 2>/dev/null; then
    echo "NOT RUN: there is no $python"
    continue
  fi
  for extra in "${extras[@]}"; do
    [ "$extra" = none ] && what="$wheel" || what="$wheel[$extra]"
    begin=$SECONDS
    "$python" -m venv "$work/fresh"
    "$work/fresh/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch "$what"
    installed=$((SECONDS - begin))
    mkdir "$work/home" && pushd "$work/home" >/dev/null
    marft="env HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 XDG_CACHE_HOME=${CACHE:-$work/cache} $work/fresh/bin/marft"
    {
      $marft --version && $marft init duo && $marft plan && $marft train --max_steps 2 &&
        $marft chat duo --model tiny --question "Dan has 4 shells, buys 6 and sells 2. How many are left?"
    } >"$work/run.log" 2>&1 || { tail -30 "$work/run.log"; exit 1; }
    popd >/dev/null
    echo "$python, extra $extra: installed in ${installed} s, used in $((SECONDS - begin - installed)) s"
    rm -rf "$work/fresh" "$work/home"
    [ "$python" = python3.11 ] || break # other versions of Python: without extras
  done
done
