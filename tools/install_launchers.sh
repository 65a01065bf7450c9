#!/usr/bin/env bash
# Installs the launchers of docs/multi_node.md for `make test-launchers`: Debian's or Ubuntu's packages (as root), and Ray
# into the Python that is named (default: that of .venv, if there is one). torchrun, deepspeed and accelerate are there already.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:-.venv/bin/python}

export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y --no-install-recommends pdsh openssh-server openssh-client slurm-wlm openmpi-bin mpich
if [ -x "$python" ]; then
    "$python" -m pip --disable-pip-version-check install --quiet 'ray[train]'
else
    echo "note: no $python, so Ray is not installed; run 'make test-launchers' once, or name a Python" >&2
fi
