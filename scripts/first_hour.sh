#!/bin/sh
# Print the minutes of a newcomer's first commands, in a new clone of this repository with empty caches:
#
#     scripts/first_hour.sh          # installation and make run
#     scripts/first_hour.sh --test   # also make test
#
# The clone and the caches lie in a new folder below TMPDIR, which is removed. State the load with the figures.
set -eu
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/home"
export XDG_CACHE_HOME="$folder/home" UV_CACHE_DIR="$folder/home/uv" PIP_CACHE_DIR="$folder/home/pip"
git clone -q . "$folder/trinity"
cd "$folder/trinity"

timed() {
  began=$(date +%s)
  make "$1" > "$folder/$2.log" 2>&1 || { tail -40 "$folder/$2.log"; echo "$2 failed"; exit 1; }
  echo "$2: $(( $(date +%s) - began )) s"
}
echo "$(nproc) cores; load $(cut -d' ' -f1-3 /proc/loadavg); commit $(git rev-parse --short HEAD)"
timed .venv/bin/.running "installation for make run"
timed build/quickstart/.made "model and data"
timed run "the run"
grep -E "stage .* is finished" "$folder/the run.log" || true
if [ "${1:-}" = --test ]; then
  timed .venv/bin/.installed "installation for make test"
  timed test "make test"
fi
echo "load afterwards $(cut -d' ' -f1-3 /proc/loadavg)"
