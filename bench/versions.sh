#!/usr/bin/env bash
# The tests under the oldest versions that pyproject.toml allows, and under the newest ones:
#
#     bash bench/versions.sh [ENVIRONMENT...]      # oldest, newest; both without arguments
#
# Each gets a virtual environment of its own, and a line in bench/results/versions.jsonl: versions, numbers of tests that
# passed, failed and were skipped, seconds, commit. Exit status 1 if a test failed, 2 if an environment could not be made.
# Environments stay in FOLDER, and what is installed there is not installed again.
#
# Variables: PYTHON (python3); FOLDER (a temporary one, removed at the end); TESTS, which (tests); RECORDS, the file of
# the lines; OLDEST and NEWEST, requirements in place of those below. Of old versions PyPI has torch for CUDA alone,
# some gigabytes: on a machine without a GPU name a CPU build, or its index with PIP_EXTRA_INDEX_URL.
set -uo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
records=${RECORDS:-$root/bench/results/versions.jsonl}
folder=${FOLDER:-}
if [ -z "$folder" ]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
fi
cd "$root" || exit 2

# The lower bounds of pyproject.toml. Triton 3.6's interpreter fails with NumPy 2.4 and newer.
bound() { sed -nE "s/^ *\"$1>=([0-9.]+).*/$1==\1/p" pyproject.toml | head -n 1; }
oldest=${OLDEST:-$(bound torch) $(bound torch_geometric) $(bound triton) numpy<2.4}
newest=${NEWEST:-torch torch_geometric triton numpy}
status=0
commit=$(git rev-parse HEAD) || exit 2
changed=$(git status --porcelain) # before there are records

for name in "${@:-oldest newest}"; do
    for environment in $name; do
        case $environment in
        oldest) requirements=$oldest ;;
        newest) requirements=$newest ;;
        *) echo "'versions.sh' expects oldest or newest (got '$environment')" >&2 && exit 2 ;;
        esac
        venv=$folder/$environment
        mkdir -p "$folder"
        # shellcheck disable=SC2086
        if ! { "$python" -m venv "$venv" && "$venv/bin/pip" install -q $requirements pip &&
            "$venv/bin/pip" install -q -e '.[test]' $requirements; } >"$folder/$environment.log" 2>&1; then
            echo "$environment: pip could not install $requirements:" >&2
            tail -n 5 "$folder/$environment.log" >&2
            exit 2
        fi
        echo "== $environment: $requirements"
        # Other versions than CI's warn about other things; here only the results count.
        rm -f "$folder/$environment.xml"
        # shellcheck disable=SC2086
        "$venv/bin/pytest" -c pyproject.toml --rootdir . -o filterwarnings=default --disable-warnings \
            --junitxml "$folder/$environment.xml" ${TESTS:-tests} || status=1
        "$venv/bin/python" -P - "$environment" "$folder/$environment.xml" "${TESTS:-tests}" "$records" \
            "$commit" "$changed" <<'PYTHON' || exit 2
import json, platform, sys
from datetime import datetime, timezone
from importlib.metadata import version
from xml.etree import ElementTree

name, report, tests, records, commit, changed = sys.argv[1:]
suite = ElementTree.parse(report).getroot().find("testsuite")
total, failures, errors, skipped = (int(suite.get(key)) for key in ("tests", "failures", "errors", "skipped"))
packages = ("qgnn", "torch", "torch_geometric", "triton", "numpy", "pytest")
record = {
    "environment": name,
    "tests": tests,
    "passed": total - failures - errors - skipped,
    "failed": failures + errors,
    "skipped": skipped,
    "seconds": round(float(suite.get("time")), 1),
    "versions": {"python": platform.python_version(), **{package: version(package) for package in packages}},
    "commit": commit,
    "dirty": bool(changed),
    "utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
}
with open(records, "a") as file:
    file.write(json.dumps(record) + "\n")
print(json.dumps(record))
PYTHON
    done
done
exit $status
