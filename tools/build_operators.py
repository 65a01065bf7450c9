"""Compiles the DeepSpeed operators that training on a CPU needs, before anything waits for them.

    python -m tools.build_operators

DeepSpeed would compile them in the first process that wants them, while the other ranks wait. Where the result goes is
`TORCH_EXTENSIONS_DIR`; a second run finds it there.
"""

import sys

from deepspeed.accelerator import get_accelerator


def main() -> None:
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
