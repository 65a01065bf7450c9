"""Sandboxes a process that reads untrusted input: no network, no new processes, no files but those
of its libraries.

# Note: [What confinement is for]

It is the second line of defence. The first is that the input never decides what is loaded. Python
code that already runs can bypass an audit hook; the hook stops the call that would bring such code
in: a download, an import, a pickle or a shared library.
"""

from __future__ import annotations

import os
import resource
import signal
import site
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["confine", "offline"]

_NETWORK = frozenset(
    f"socket.{name}"
    for name in (
        "bind",
        "connect",
        "getaddrinfo",
        "gethostbyaddr",
        "gethostbyname",
        "sendmsg",
        "sendto",
    )
)
_PROCESSES = frozenset(
    {
        "subprocess.Popen",
        "os.system",
        "os.exec",
        "os.spawn",
        "os.posix_spawn",
        "os.fork",
        "os.forkpty",
    }
)
_SIGNALS = frozenset({"os.kill", "os.killpg"})
_CHANGES = {
    **dict.fromkeys(
        ("os.chmod", "os.chown", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.utime"), 1
    ),
    **dict.fromkeys(("os.link", "os.rename", "os.symlink"), 2),
}
"""Events that change a file, with the number of paths that they begin with."""
_REFUSED = _NETWORK | _PROCESSES | _SIGNALS | {"pickle.find_class"}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_FILE_BYTES = 1 << 26
_OF_THE_SYSTEM = ("/dev/null", "/dev/urandom", "/etc", "/lib", "/lib64", "/proc", "/sys", "/usr")
_TOKENS = (
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "HUGGINGFACE_HUB_TOKEN",
    "HF_TOKEN_PATH",
    "HF_ENDPOINT",
)


def offline(folder: str) -> dict[str, str]:
    """This process's environment without access tokens, for a process without network. An empty
    `folder` is its home, cache and temporary folder, so that Hugging Face libraries find neither a
    stored token nor a model."""
    kept = {name: value for name, value in os.environ.items() if name not in _TOKENS}
    found = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    homes = (
        "HOME",
        "HF_HOME",
        "HF_HUB_CACHE",
        "HF_MODULES_CACHE",
        "HF_XET_CACHE",
        "HF_ASSETS_CACHE",
        "TORCH_HOME",
    )
    return {
        **kept,
        **dict.fromkeys(
            (*homes, "TRANSFORMERS_CACHE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "TMPDIR"), folder
        ),
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, found)),
        "PYTHONSAFEPATH": "1",
        "PYTHONUSERBASE": site.getuserbase(),  # otherwise it follows the home
        "HF_TOKEN_PATH": os.path.join(folder, "token"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "USE_HUB_KERNELS": "NO",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }


def confine(cpu_seconds: float, nbytes: int) -> None:
    """Confine this process for the rest of its life. Call it after its libraries are imported, in
    an empty working folder.

    Network, new processes, signals, pickles that name classes, and code from outside the search
    path raise PermissionError; so does reading a file that belongs neither to Python nor to the
    system. Libraries may read and write small files below the working folder.

    Args:
        cpu_seconds: CPU time after which SIGPROF ends the process.
        nbytes: limit of additional memory; more raises MemoryError.
    """
    folders = [*sys.path, sys.prefix, sys.base_prefix]
    for module in list(sys.modules.values()):  # an editable install is not on the search path
        if (
            isinstance(file := getattr(module, "__file__", None), str)
            and "." not in module.__name__
        ):
            folders.append(os.path.dirname(file))
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    for limit, value in (
        (resource.RLIMIT_AS, pages * resource.getpagesize() + nbytes),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        most = resource.getrlimit(limit)[1]
        resource.setrlimit(
            limit, (value if most == resource.RLIM_INFINITY else min(value, most), most)
        )
    sys.dont_write_bytecode = True
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    sys.addaudithook(_Watch(_both(folders), _both([os.getcwd()])))


def _both(folders: Iterable[str]) -> tuple[str, ...]:
    """Each folder as written and with links resolved, with a slash at its end; without ``/``."""
    found = {
        form(folder)
        for folder in filter(None, folders)
        for form in (os.path.abspath, os.path.realpath)
    }
    return tuple(f"{folder}/" for folder in found if folder != "/")


class _Watch:
    """The audit hook.

    Args:
        code: folders whose files may be run and read.
        scratch: folders whose files may be read and changed.
    """

    def __init__(self, code: tuple[str, ...], scratch: tuple[str, ...]) -> None:
        self._code = code
        self._scratch = scratch
        self._readable = (*code, *scratch, *(f"{path}/" for path in _OF_THE_SYSTEM))

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _REFUSED:
            raise PermissionError(f"{event} is not allowed in a confined process")
        if event in _CHANGES:
            for path in arguments[: _CHANGES[event]]:
                _require_inside(self._scratch, path, event)
        elif event == "open":
            path, _, flags = arguments
            is_writing = isinstance(flags, int) and flags & _WRITING and path != os.devnull
            _require_inside(self._scratch if is_writing else self._readable, path, event)
        elif event == "exec":
            if not (name := getattr(arguments[0], "co_filename", "<")).startswith("<"):
                _require_inside(self._code, name, event)
        elif event == "ctypes.dlopen" and isinstance(path := arguments[0], str) and "/" in path:
            _require_inside((*self._code, "/lib/", "/lib64/", "/usr/"), path, event)


def _require_inside(folders: tuple[str, ...], path: Any, event: str) -> None:
    if not isinstance(path, str | bytes):  # an open descriptor
        return
    if "\0" in (name := os.fsdecode(path)):  # the call is about to fail
        return
    found = os.path.abspath(name), os.path.realpath(name)
    if not any(f"{each}/".startswith(folders) for each in found):
        raise PermissionError(f"{event} of {name[:200]!r} is not allowed in a confined process")
