#!/bin/sh
# install.sh DEVICE REQUIREMENT...: the build stage of every image. Makes the virtual environment /opt/trinity.
# DEVICE is cpu or cuda, or none for services without torch. Versions and hashes are those of requirements/; a package
# that is in no lock fails the build. /opt/trinity/sbom.cdx.json lists the installed packages (CycloneDX).
set -eu
device=$1
shift
export UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never

python3 -m venv /opt/tools
/opt/tools/bin/pip install --quiet --no-deps --require-hashes -r requirements/build.txt
uv=/opt/tools/bin/uv
$uv venv --quiet --python python3 /opt/trinity
export VIRTUAL_ENV=/opt/trinity

locks="requirements/image-cpu.txt requirements/alfworld.txt"
options="--excludes requirements/excluded.txt --excludes requirements/excluded-running.txt"
case $device in
  none) ;;
  cpu)
    # PyTorch's own index has the CPU builds; where it cannot be reached, the package index may have them.
    torch="install --quiet --no-deps --require-hashes --compile-bytecode -r requirements/torch-cpu.txt"
    $uv pip $torch || $uv pip $torch --extra-index-url https://download.pytorch.org/whl/cpu
    locks="$locks requirements/torch-cpu.txt"
    options="$options -r requirements/cpu.in"
    ;;
  cuda) locks=requirements/cuda.txt options= ;;
  *) echo "install.sh: DEVICE is cpu, cuda or none, not '$device'" >&2; exit 2 ;;
esac
for lock in $locks; do options="$options -c $lock"; done
# shellcheck disable=SC2086 # words
$uv pip install --compile-bytecode -b requirements/build.txt $options "$@"

# No process reads these: tests, headers, and a protocol of pyarrow that Trinity does not speak.
site=$(echo /opt/trinity/lib/python3*/site-packages)
rm -rf "$site"/pandas/tests "$site"/pyarrow/tests "$site"/pyarrow/include "$site"/pyarrow/*flight*
[ ! -d "$site/numpy" ] || find "$site/numpy" -depth -type d -name tests -exec rm -rf {} +

$uv pip freeze | grep -v " @ file:" | sort > /tmp/installed
# shellcheck disable=SC2086
sed -n 's/^\([a-z0-9._-]*==[^ ;]*\).*/\1/p' $locks | sort > /tmp/locked
unlocked=$(comm -23 /tmp/installed /tmp/locked)
[ -z "$unlocked" ] || { echo "install.sh: not in $locks: $unlocked; make lock" >&2; exit 1; }
/opt/tools/bin/cyclonedx-py environment --output-reproducible -o /opt/trinity/sbom.cdx.json /opt/trinity/bin/python
