"""Compiles the DeepSpeed operators that training on a CPU needs, before anything waits for them.

    python -m tools.build_operators
    python -m tools.build_operators CPULionBuilder    # of other builders, one or several

DeepSpeed would compile them in the first process that wants them, while the other ranks wait. Where
the result goes is `TORCH_EXTENSIONS_DIR`; a second run finds it there. A lock that a killed build
has left there is removed: torch would wait for it for ever.
"""

import os
import sys
from pathlib import Path

from deepspeed.accelerator import get_accelerator
from torch.utils.cpp_extension import get_default_build_root

from deepspeed_ext.adapter.upstream import announced_builds, swapped
from tools.stale_locks import remove_stale_locks


def main() -> None:
    remove_stale_locks(Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()))
    for name in sys.argv[1:] or ("ShareMemCommBuilder", "CPUAdamBuilder"):
        builder = get_accelerator().create_op_builder(name)
        if builder is None:
            continue
        try:
            with swapped(announced_builds()):
                builder.load(verbose=False)
        except Exception as error:
            sys.stderr.write(
                f"note: {builder.NAME} does not compile here ({error}); what needs it will fail\n"
            )


if __name__ == "__main__":
    main()
