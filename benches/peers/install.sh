#!/bin/sh
# Installs the peers of the native comparison into build/peers: Open MPI from the system's
# packages (needs root, skipped where mpicc.openmpi exists), Intel MPI and oneCCL from PyPI.
# PIP_ARGS is passed to pip.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
to=$here/../../build/peers
mkdir -p "$to"
command -v mpicc.openmpi >/dev/null || apt-get install -y -q openmpi-bin libopenmpi-dev
[ -x "$to/venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$to/venv"
# shellcheck disable=SC2086
"$to/venv/bin/python" -m pip install --quiet --disable-pip-version-check ${PIP_ARGS:-} \
    impi-devel==2021.18.1 oneccl-devel==2022.1.2
intel="-I$to/venv/include -L$to/venv/lib -Wl,-rpath,$to/venv/lib -Wl,-rpath-link,$to/venv/lib"
mpicc.openmpi -O2 "$here/mpi.c" -o "$to/openmpi"
# shellcheck disable=SC2086
cc -O2 "$here/mpi.c" $intel -lmpi -o "$to/intelmpi"
# shellcheck disable=SC2086
c++ -O2 -std=c++17 "$here/oneccl.cpp" $intel -l:libccl.so.1 -lmpi -o "$to/oneccl" 2>/dev/null
echo "peers installed in $to"
