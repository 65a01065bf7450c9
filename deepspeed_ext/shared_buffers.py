"""DeepSpeed's buffers in /dev/shm, 69 MB per rank on a machine without accelerator, that nobody ever removes.

DeepSpeed's communication makes ``deepspeed_allreduce_buffer_<uid>_<MASTER_ADDR>_<MASTER_PORT>_<rank>`` as soon as it
starts if ``LOCAL_SIZE`` says that all ranks are on this host. Only the all-reduce of inference and of tensor
parallelism on CPUs uses them. No process id is in the name: a buffer counts as left over once no process maps it.
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
    """Let DeepSpeed's communication start without these buffers: call ``init_distributed`` within.

    For training without tensor parallelism: DeepSpeed's all-reduce for inference cannot run on CPUs afterwards.
    """
    local_size = os.environ.pop("LOCAL_SIZE", None)  # what the buffers are made by; other readers need it later
    try:
        yield
    finally:
        if local_size is not None:
            os.environ["LOCAL_SIZE"] = local_size


def left_over() -> list[Path]:
    """Buffers of this user (as root: of everybody) that no process maps.

    A process of another container that shares ``/dev/shm`` is not seen.
    """
    found = [path for path in sorted(_FOLDER.glob(f"{_PREFIX}*")) if _is_ours(path)]
    mapped = _mapped(str(_FOLDER / _PREFIX)) if found else set()
    return [path for path in found if str(path) not in mapped]


def _is_ours(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.geteuid() in (0, path.lstat().st_uid)
    return False


def _mapped(prefix: str) -> set[str]:
    """Files whose path begins so and that processes map, as far as we may see."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            fields = (line.split(maxsplit=5) for line in maps.read_text(errors="replace").splitlines())
            found |= {one[5] for one in fields if len(one) == 6 and one[5].startswith(prefix)}
    return found
