"""Compiles the DeepSpeed operators that training on a CPU needs, before anything waits for them.

    python -m tools.build_operators

DeepSpeed would compile them in the first process that wants them, while the other ranks wait. Where the result goes is
`TORCH_EXTENSIONS_DIR`; a second run finds it there. A lock that a killed build has left there is removed: torch would
wait for it for ever.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

from deepspeed.accelerator import get_accelerator
from torch.utils.cpp_extension import get_default_build_root


def open_files() -> set[str]:
    """Paths of the files that processes of this user hold open."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            found.add(os.readlink(link))
    return found


def remove_stale_locks() -> None:
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    locks = list(root.glob("**/lock"))
    held = open_files() if locks else set()
    for lock in locks:
        if str(lock.resolve()) not in held:
            sys.stderr.write(f"note: removing {lock}, left by a build that was killed\n")
            lock.unlink(missing_ok=True)


def main() -> None:
    remove_stale_locks()
    for name in ("ShareMemCommBuilder", "CPUAdamBuilder"):
        builder = get_accelerator().create_op_builder(name)
        if builder is None:
            continue
        try:
            builder.load(verbose=False)
        except Exception as error:
            sys.stderr.write(f"note: {builder.NAME} does not compile here ({error}); what needs it will fail\n")


if __name__ == "__main__":
    main()
