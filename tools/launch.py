"""Starts the ranks of `make train` with DeepSpeed's launcher, and ends them when it is interrupted.

    python -m tools.launch 2 examples/train.py --mode zero2     # two ranks
    python -m tools.launch auto examples/train.py               # one an accelerator, or two on a
    machine without

DeepSpeed's launcher answers Ctrl-C with a traceback and leaves before its ranks have saved. Here
the ranks get SIGTERM, and the command ends after them. A second Ctrl-C kills everything.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil

from tools.stale_locks import remove_stale_locks

INTERRUPTED = 130
"""Exit status of a command that Ctrl-C has ended."""


class Job:
    """DeepSpeed's launcher and what it starts, in a session of its own: the terminal's signals do
    not go there."""

    def __init__(self, command: list[str], environment: dict[str, str] | None) -> None:
        self.signals = 0
        self._launcher: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._note)
        self._launcher = subprocess.Popen(command, env=environment, start_new_session=True)
        if self.signals:  # meanwhile
            self._end()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signals += 1
        if self._launcher is not None:
            self._end()

    def _end(self) -> None:
        assert self._launcher is not None
        if self.signals > 1:
            with suppress(ProcessLookupError):
                os.killpg(self._launcher.pid, signal.SIGKILL)
            return
        # All but the launcher, which waits for them: it would leave at once.
        with suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self._launcher.pid)
            for process in launcher.children(recursive=True) or [launcher]:
                with suppress(psutil.NoSuchProcess):
                    process.terminate()
        # what reads this output may have ended, too: `make train | tee log`
        with suppress(OSError):
            os.write(
                2,
                b"\nending the ranks, which first save if they train; Ctrl-C again ends them at "
                b"once\n",
            )

    def wait(self) -> int:
        """Wait for its end; returns its exit status."""
        assert self._launcher is not None
        status = self._launcher.wait()
        return INTERRUPTED if self.signals else status


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is something to end
    import torch

    environment, accelerators = dict(os.environ), torch.accelerator.device_count()
    if not accelerators:
        environment.setdefault("DS_ACCELERATOR", "cpu")  # otherwise every process warns that it is
    if root := os.environ.get("TORCH_EXTENSIONS_DIR"):
        remove_stale_locks(Path(root))
    ranks, *script = sys.argv[1:]
    ranks = str(accelerators or 2) if ranks == "auto" else ranks
    where = "accelerators" if accelerators else "the CPU: no accelerator was found"
    sys.stderr.write(f"starting ranks ({ranks}) on {where}\n")
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--log_level", "error"]
    sys.exit(Job([*launcher, "--num_accelerators", ranks, *script], environment).wait())


if __name__ == "__main__":
    main()
