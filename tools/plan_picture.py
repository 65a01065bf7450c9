"""Draws docs/core_plan.svg: the core plan of a two-socket host with four accelerators.

    python -m tools.plan_picture

The host is invented: 2 x 16 cores with two hardware threads each, four ranks, two accelerators at
each socket.
"""

import tempfile
from pathlib import Path

from deepspeed_ext.commands import main as cli
from deepspeed_ext.cores.topology import Core
from tests.support.sysfs import write_host

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "core_plan.svg"
CORES, PER_SOCKET = 32, 16


def draw(picture: Path) -> int:
    """Write the host's files, and let the command line plan and draw it into `picture`; its exit
    status."""
    sockets = [core // PER_SOCKET for core in range(CORES)]
    cores = [
        Core(core, (core, core + CORES), node=socket, package=socket, cache=core // 8 * 8)
        for core, socket in enumerate(sockets)
    ]
    with tempfile.TemporaryDirectory() as folder:
        root = write_host(Path(folder), cores)
        nodes = [argument for node in (0, 0, 1, 1) for argument in ("--gpu-node", str(node))]
        return cli.main(["plan", "--root", str(root), *nodes, "--svg", str(picture)])


if __name__ == "__main__":
    raise SystemExit(draw(PICTURE))
