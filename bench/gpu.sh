#!/usr/bin/env bash
# Tests and benchmarks on a machine with a CUDA GPU and no network:
#
#     bash bench/gpu.sh [OUTDIR=bench/results] [BUDGET_SECONDS=400]
#
# Needs python3 with torch, Triton, PyG, pytest and hypothesis, and installs qgnn itself without dependencies. Records
# and logs appear under OUTDIR as it goes; one compact table comes last. Exit status 1 if a test or a measurement failed.
# Without a GPU the same script rehearses on the CPU with tiny shapes.
#
# Variables: PYTHON (python3); TESTS and SUITES, what to run, in this order (empty: nothing; suites joined by a comma share
# a process; `sanitize` is no suite but each kernel once under compute-sanitizer); SANITIZER, that tool, looked for if
# not given; QGNN_COMMIT, the commit of a copy without .git, with a + at its end if it was modified.
set -uo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-}
budget=${2:-400}
python=${PYTHON:-python3}
tests=${TESTS-tests/kernels tests/ops tests/nn}
suites=${SUITES-device train layer attention spmm matmul quantize sanitize sddmm,softmax,activation blocks,codes memory}
started=$(date -u +%Y-%m-%dT%H:%M:%S)
failures=()

left() { echo $((budget - SECONDS)); }

device=$("$python" -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")') || exit 2
quick=()
if [ "$device" = cuda ]; then
    out=${out:-$root/bench/results}
else
    out=${out:-$(mktemp -d)} # a rehearsal's numbers mean nothing
    quick=(--quick)
fi
out=$(mkdir -p "$out" && cd "$out" && pwd) || exit 2
cd "$root" || exit 2

# The package, importable as qgnn with kernels/ as qgnn.kernels: this checkout's editable install, or else a folder of links.
isolated=()
origin() { (cd / && "$python" -c 'import importlib.util as u; s = u.find_spec("qgnn"); print(s.origin if s else "")'); }
if [ "$(origin)" != "$root/qgnn/__init__.py" ] &&
    ! "$python" -m pip install -q -e . --no-deps --no-build-isolation --disable-pip-version-check >"$out/install.log" 2>&1; then
    echo "pip could not install the package (see install.log); using a folder of links instead"
    links=$(mktemp -d)
    trap 'rm -rf "$links"' EXIT
    mkdir "$links/qgnn"
    ln -s "$root"/qgnn/* "$links/qgnn/"
    ln -s "$root/kernels" "$links/qgnn/kernels"
    ln -s "$root/bench" "$links/bench"
    export PYTHONPATH=$links
    isolated=(-P)
fi

echo "== $device, $budget s, records in $out"
if [ -n "$tests" ]; then
    workers=()
    if [ "$device" = cuda ] && "$python" -c 'import xdist' 2>/dev/null; then
        workers=(-n "$(($(nproc) < 16 ? $(nproc) : 16))") # compiling kernels takes the time
    fi
    # Other versions than CI's warn about other things; here only the results count.
    # shellcheck disable=SC2086
    timeout --signal=INT --kill-after=10 $((budget * 45 / 100)) "$python" "${isolated[@]}" -m pytest -c pyproject.toml --rootdir . \
        -W default --tb=short --ignore=tests/kernels/test_aot.py "${workers[@]}" $tests >"$out/tests.log" 2>&1
    status=$?
    [ $status -eq 0 ] || failures+=("tests (exit status $status)")
    grep -E '^(FAILED|ERROR) ' "$out/tests.log" | cut -c1-160 | head -n 20
    tail -n 1 "$out/tests.log"
fi

# Out-of-bounds accesses: torch's cache of memory would hide them. Without a GPU the same calls run in the interpreter.
sanitize() {
    if [ "$device" = cpu ]; then
        TRITON_INTERPRET=1 timeout --kill-after=5 "$1" "$python" "${isolated[@]}" -m bench.sanitize
        return
    fi
    local tool
    tool=${SANITIZER-$(command -v compute-sanitizer || ls -d /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1)}
    if [ -z "$tool" ]; then
        echo "compute-sanitizer: not on this machine, memory accesses were not checked"
        return 0
    fi
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout --kill-after=5 "$1" "$tool" --tool memcheck --error-exitcode 86 \
        "$python" "${isolated[@]}" -m bench.sanitize
}

for suite in $suites; do
    if [ "$(left)" -lt 15 ]; then
        failures+=("$suite (no time left)")
        continue
    fi
    if [ "$suite" = sanitize ]; then
        limit=$(($(left) < 90 ? $(left) : 90))
        sanitize "$limit" >"$out/sanitize.log" 2>&1
        status=$?
        echo "== sanitize: exit status $status after $SECONDS s"
        tail -n $((status == 0 ? 2 : 12)) "$out/sanitize.log" | cut -c1-160
        [ $status -eq 0 ] || failures+=("sanitize (exit status $status)")
        continue
    fi
    # A case is not started in the last fifth of the time, and whatever hangs is ended; layers leave half to the others.
    share=$([ "$suite" = layer ] && echo 50 || echo 80)
    timeout --kill-after=5 "$(left)" "$python" "${isolated[@]}" -m bench ${suite//,/ } --device "$device" "${quick[@]}" \
        --results "$out" --seconds $(($(left) * share / 100)) >>"$out/bench.log" 2>&1
    status=$?
    echo "== $suite: exit status $status after $SECONDS s"
    if [ $status -ne 0 ]; then
        failures+=("$suite (exit status $status)")
        tail -n 12 "$out/bench.log" | cut -c1-160
    fi
done

echo
"$python" "${isolated[@]}" -m bench report --results "$out" --since "$started"
if [ ${#failures[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failures[@]}"
    exit 1
fi
echo "all passed in $SECONDS s"
