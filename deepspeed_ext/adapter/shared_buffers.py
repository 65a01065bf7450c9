"""Avoids and finds the buffers that DeepSpeed leaves in /dev/shm on hosts without an accelerator:
69 MB per rank.

DeepSpeed's communication compiles an operator when it starts. If ``LOCAL_SIZE`` says that all ranks
are on this host, the operator creates
``deepspeed_allreduce_buffer_<uid>_<MASTER_ADDR>_<MASTER_PORT>_<rank>``. Only all-reduce for
inference and tensor parallelism on CPUs uses it. The name contains no process id, so a buffer
counts as left over if no process maps it.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["left_over", "not_made"]

_FOLDER = Path("/dev/shm")
_PREFIX = "deepspeed_allreduce_buffer_"


@contextlib.contextmanager
def not_made() -> Iterator[None]:
    """Start DeepSpeed's communication without these buffers and their operator, which takes most of
    a minute to compile: call ``init_distributed`` inside the block.

    After `deepspeed_ext.enable` this holds everywhere. DeepSpeed's all-reduce for inference on CPUs
    then uses torch's.
    """
    # `doctor` calls left_over without DeepSpeed
    from deepspeed_ext.adapter.upstream import no_shared_buffers, swapped

    with swapped(no_shared_buffers()):
        yield


def left_over() -> list[Path]:
    """Find buffers of this user (for root: of all users) that no process maps.

    Processes of other containers that share ``/dev/shm`` are not visible.
    """
    found = [path for path in sorted(_FOLDER.glob(f"{_PREFIX}*")) if _is_ours(path)]
    mapped = _mapped(str(_FOLDER / _PREFIX)) if found else set()
    return [path for path in found if str(path) not in mapped]


def _is_ours(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.geteuid() in (0, path.lstat().st_uid)
    return False


def _mapped(prefix: str) -> set[str]:
    """Return the files with this prefix that any visible process maps."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # the process has ended or belongs to another user
            fields = (
                line.split(maxsplit=5) for line in maps.read_text(errors="replace").splitlines()
            )
            found |= {one[5] for one in fields if len(one) == 6 and one[5].startswith(prefix)}
    return found
