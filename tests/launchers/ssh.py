"""A private sshd on loopback addresses, with keys of its own; nothing of the user's or the
machine's is touched."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.launchers.processes import Daemons, answers, free_ports

NODES = ("127.0.0.2", "127.0.0.3")
EMPTY = Path("/run/sshd")
"""The folder into which root's sshd locks its children. Its place is compiled in, and only the
service makes it."""


def sshd() -> str | None:
    """The path of sshd, which must be started by its full name; None if it is not installed."""
    return shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


class PrivateSsh:
    """sshd for this user on `NODES`, and a folder `bin` whose ``ssh`` knows its port and keys.

    Args:
        folder: an empty folder.
        environment: of the nodes, beside what sshd sets.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.bin = folder / "bin"
        self._daemons = Daemons(folder)
        (port,) = free_ports(1)
        for key in ("host_key", "user_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
            subprocess.run(command, check=True, timeout=30, stdin=subprocess.DEVNULL)
        variables = " ".join(f'{name}="{value}"' for name, value in environment.items())
        listen = [f"ListenAddress {node}" for node in NODES]
        self._write(
            folder / "sshd_config",
            f"Port {port}",
            *listen,
            f"HostKey {folder}/host_key",
            f"AuthorizedKeysFile {folder}/user_key.pub",
            f"PidFile {folder}/sshd.pid",
            "StrictModes no",  # the folder lies in /tmp
            "UsePAM no",
            "PermitRootLogin prohibit-password",
            "PasswordAuthentication no",
            f"SetEnv {variables}",
        )
        self._write(
            folder / "ssh_config",
            f"Host {' '.join(NODES)}",
            f"Port {port}",
            f"IdentityFile {folder}/user_key",
            "IdentitiesOnly yes",
            "BatchMode yes",
            "StrictHostKeyChecking accept-new",
            f"UserKnownHostsFile {folder}/known_hosts",
            "LogLevel ERROR",
        )
        self.bin.mkdir()
        client = self.bin / "ssh"
        self._write(client, "#!/bin/sh", f'exec {shutil.which("ssh")} -F {folder}/ssh_config "$@"')
        client.chmod(0o700)
        self._makes_empty = os.geteuid() == 0 and not EMPTY.exists()
        if self._makes_empty:
            EMPTY.mkdir()
        self._daemons.start("sshd", str(sshd()), "-D", "-e", "-f", str(folder / "sshd_config"))
        self._daemons.wait_for(lambda: all(answers(node, port) for node in NODES), "sshd")

    def _write(self, path: Path, *lines: str) -> None:
        path.write_text("\n".join(lines) + "\n")

    def close(self) -> None:
        self._daemons.close()
        if self._makes_empty:
            EMPTY.rmdir()
