#!/bin/sh
# Print the minutes of a newcomer's first commands, in a new clone of this repository's last commit with empty caches:
#
#     scripts/first_hour.sh          # installation and make run
#     scripts/first_hour.sh --test   # also make test
#
# The clone and the caches lie in a new folder below TMPDIR (5 GB, with --test 8 GB), which is removed. pip keeps its
# configuration. State the load with the figures: with other work on the machine they say little.
set -eu
case "${1:-}" in '' | --test) ;; *) sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2 ;; esac
cd "$(dirname "$0")/.."
folder=$(mktemp -d "${TMPDIR:-/tmp}/trinity-first-hour.XXXXXX")
trap 'rm -rf "$folder"' EXIT
trap 'exit 130' HUP INT TERM
git clone -q . "$folder/trinity"

# An empty home, and no variable that would bring in what a newcomer does not have.
for file in "${XDG_CONFIG_HOME:-$HOME/.config}/pip/pip.conf" "$HOME/.pip/pip.conf"; do
  [ -n "${PIP_CONFIG_FILE:-}" ] || [ ! -f "$file" ] || export PIP_CONFIG_FILE="$file"
done
for name in $(env | sed -n 's/^\(TRINITY_[A-Z_]*\|HF_[A-Z_]*\|VLLM_[A-Z_]*\)=.*/\1/p'); do unset "$name"; done
unset VIRTUAL_ENV PYTHONPATH PYTHONHOME MAKEFLAGS MFLAGS MAKELEVEL XDG_CONFIG_HOME XDG_DATA_HOME
mkdir "$folder/home"
export HOME="$folder/home" XDG_CACHE_HOME="$folder/home/.cache" UV_CACHE_DIR="$folder/home/uv" PIP_CACHE_DIR="$folder/home/pip"
cd "$folder/trinity"

seconds=0
total=0
timed() { # a target of make, and what to call it
  began=$(date +%s)
  make "$1" > "$folder/log" 2>&1 || { tail -40 "$folder/log"; echo "$2 failed (make $1)"; exit 1; }
  seconds=$(($(date +%s) - began))
  total=$((total + seconds))
  said "$2" "$seconds"
}
said() {
  printf '%-32s %2d min %02d s   load %s\n' "$1" $(($2 / 60)) $(($2 % 60)) "$(cut -d' ' -f1-3 /proc/loadavg)"
}
echo "$(nproc) cores; load $(cut -d' ' -f1-3 /proc/loadavg); commit $(git rev-parse --short HEAD)"
timed .venv/bin/.running "installation for make run"
timed build/quickstart/.made "model and data"
timed run "the run"
grep -hE "(stage .*|the run) is finished" "$folder/log" | sed 's/^/  /'
said "make run, all of it" "$total"
du -sh .venv | cut -f1 | sed 's/^/  .venv has /'
if [ "${1:-}" = --test ]; then
  total=0
  timed .venv/bin/.installed "installation for make test"
  timed test "the tests"
  said "make test, all of it" "$total"
fi
