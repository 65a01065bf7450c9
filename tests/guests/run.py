"""Plans and binds on hosts with more sockets: a real kernel in qemu, without KVM, for each of
`tests.guests.hosts`.

    python -m tests.guests.run [--only two-sockets four-nodes unplugged cpuset] [--kernel-package
    linux-image-*.deb]
                               [--keep FOLDER]

Needs qemu-system-x86_64, a static busybox, and a kernel: that of this machine, or of a Debian
package, which is unpacked into a temporary folder. The guest sees this machine's files read-only,
and runs its Python. Shown are plans and masks; an emulated processor's times mean nothing.
``--keep`` keeps what each guest has found, with the files of its sysfs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.guests.hosts import GUESTS, Guest
from tests.support.paths import ROOT

MODULES = ("virtio_pci", "9pnet_virtio", "9p")
TIMEOUT_SECONDS = 500.0
EXIT_SKIPPED = 77

INIT = """#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /host
for module in $(/bin/busybox cat /modules/order); do /bin/busybox insmod /modules/$module; done
/bin/busybox mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=262144 host /host
/bin/busybox mount -t proc proc /host/proc
/bin/busybox mount -t sysfs sys /host/sys
/bin/busybox mount -t devtmpfs dev /host/dev
/bin/busybox mount -t 9p -o trans=virtio,version=9p2000.L out /host/mnt
/bin/busybox chroot /host /bin/sh /mnt/script
/bin/busybox poweroff -f
"""
SCRIPT = """
export HOME=/mnt TMPDIR=/mnt PYTHONDONTWRITEBYTECODE=1 PYTHONPATH={root}
for cpu in {offline}; do echo 0 > /sys/devices/system/cpu/cpu$cpu/online; done
if [ -n "{cpuset}" ]; then
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
    echo +cpuset > /sys/fs/cgroup/cgroup.subtree_control
    mkdir /sys/fs/cgroup/job
    echo {cpuset} > /sys/fs/cgroup/job/cpuset.cpus
    echo $$ > /sys/fs/cgroup/job/cgroup.procs
fi
cd {root} && {python} -m tests.guests.inside {name} /mnt/found.json
"""


@dataclass(frozen=True)
class Kernel:
    """A kernel image, and its modules in the order in which they must be loaded."""

    image: Path
    modules: tuple[Path, ...]

    @classmethod
    def find(cls, package: Path | None, folder: Path) -> Kernel | None:
        """The kernel of `package`, unpacked into `folder`; or this machine's; None if it has
        none."""
        root = Path("/")
        if package is not None:
            subprocess.run(["dpkg-deb", "-x", str(package), str(folder)], check=True)
            root = folder
        for image in sorted(root.glob("boot/vmlinuz-*"), reverse=True):
            version = image.name.removeprefix("vmlinuz-")
            if (tree := root / "lib/modules" / version).is_dir():
                if package is not None:
                    subprocess.run(["depmod", "-b", str(root), version], check=True)
                return cls(image, _with_needs(tree, MODULES))
        return None


def _with_needs(tree: Path, names: Sequence[str]) -> tuple[Path, ...]:
    """The files of these modules, each after those that it needs; what is built into the kernel has
    none."""
    needs = dict(line.split(":", 1) for line in (tree / "modules.dep").read_text().splitlines())
    paths = {Path(path).name.split(".")[0].replace("-", "_"): path for path in needs}
    order: list[str] = []
    for name in names:
        if path := paths.get(name):
            order += [need for need in [*reversed(needs[path].split()), path] if need not in order]
    return tuple(tree / path for path in order)


def initramfs(kernel: Kernel, busybox: str, folder: Path) -> Path:
    """An archive with busybox, the modules and the first process."""
    root, target = folder / "initramfs", folder / "initramfs.cpio"
    (root / "bin").mkdir(parents=True)
    (root / "modules").mkdir()
    shutil.copy(busybox, root / "bin/busybox")
    for path in kernel.modules:
        shutil.copy(path, root / "modules")
    (root / "modules/order").write_text("\n".join(path.name for path in kernel.modules))
    (root / "init").write_text(INIT)
    (root / "init").chmod(0o755)
    names = "\n".join(str(path.relative_to(root)) for path in sorted(root.rglob("*"))).encode()
    with open(target, "wb") as archive:
        pack = [busybox, "cpio", "-o", "-H", "newc"]
        subprocess.run(
            pack, cwd=root, input=names, stdout=archive, stderr=subprocess.DEVNULL, check=True
        )
    return target


def boot(guest: Guest, kernel: Kernel, archive: Path, folder: Path) -> dict[str, Any]:
    """What the guest has found.

    Raises:
        RuntimeError: it has found nothing; the message holds the end of its console.
    """
    out, console = folder / guest.name, folder / f"{guest.name}.console"
    out.mkdir()
    offline = " ".join(map(str, guest.offline))
    fields = {
        "root": ROOT,
        "python": sys.executable,
        "name": guest.name,
        "offline": offline,
        "cpuset": guest.cpuset,
    }
    (out / "script").write_text(SCRIPT.format(**fields))
    command = [
        "qemu-system-x86_64",
        "-accel",
        "tcg,thread=multi",
        "-cpu",
        "max,vendor=GenuineIntel",
        "-nodefaults",
        "-no-user-config",
    ]
    command += ["-display", "none", "-no-reboot", "-serial", f"file:{console}", *guest.qemu]
    command += [
        "-kernel",
        str(kernel.image),
        "-initrd",
        str(archive),
        "-append",
        "console=ttyS0 quiet panic=-1",
    ]
    shared = "security_model=none,multidevs=remap"
    command += ["-virtfs", f"local,path=/,mount_tag=host,readonly=on,{shared}"]
    command += ["-virtfs", f"local,path={out},mount_tag=out,{shared}"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS
    )
    if not (out / "found.json").exists():
        end = console.read_text(errors="replace")[-3000:] if console.exists() else ""
        raise RuntimeError(f"{guest.name} has found nothing: {done.stderr}\n{end}")
    found: dict[str, Any] = json.loads((out / "found.json").read_text())
    return found


def show(found: dict[str, Any]) -> bool:
    """Print what a guest has found; returns whether every thread is where the plan wants it."""
    print(f"\n{found['guest']}: {found['qemu']}, kernel {found['kernel']}\n\n{found['plan']}")
    print("| rank | role | our plan | the kernel's masks, thread by thread | upstream's split |")
    print("| --- | --- | --- | --- | --- |")
    right = True
    for number, rank in enumerate(found["ranks"]):
        for role in ("pytorch", "optimizer"):
            masks = rank[f"kernel says of {role}"]
            right &= set(masks) == {rank[role]}
            told = (
                f"{len(masks)} threads on {masks[0]}" if len(set(masks)) == 1 else ", ".join(masks)
            )
            print(
                f"| {number} | {role} | {rank[role]} | {told} | "
                f"{rank[f'upstream {role}'] or 'none'} |"
            )
    print(
        "\n| rank | nodes of the plan | pytorch's memory, touched before it was bound | after | "
        "optimizer's, after |"
    )
    print("| --- | --- | --- | --- | --- |")
    for number, rank in enumerate(found["ranks"]):
        ways = (
            "pytorch, touched before",
            "pytorch, touched when bound",
            "optimizer, touched when bound",
        )
        cells = [
            ", ".join(f"{mib} MiB on {node}" for node, mib in rank[f"MiB of {way}"].items())
            for way in ways
        ]
        print(f"| {number} | {' and '.join(map(str, rank['nodes']))} | {' | '.join(cells)} |")
    print(
        "\nevery thread is where the plan wants it"
        if right
        else "\nFAIL: threads are outside of the plan",
        flush=True,
    )
    return right


def missing() -> list[str]:
    """Programs that are needed and not here."""
    return [
        name for name in ("qemu-system-x86_64", "busybox", "depmod") if shutil.which(name) is None
    ]


def main() -> int:
    names = [guest.name for guest in GUESTS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="GUEST", help=f"of {names}"
    )
    parser.add_argument(
        "--kernel-package", type=Path, help="Debian package of a kernel (default: this machine's)"
    )
    parser.add_argument("--keep", type=Path, help="folder for what the guests have found")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # the guest is ended first
    if names := missing():
        print(
            f"SKIPPED: not installed: {', '.join(names)} "
            "(Debian: qemu-system-x86, busybox-static, kmod)"
        )
        return EXIT_SKIPPED
    with tempfile.TemporaryDirectory(prefix="dsext-guests-") as name:
        folder = Path(name)
        kernel = Kernel.find(args.kernel_package, folder / "kernel")
        if kernel is None:
            print("SKIPPED: this machine has no kernel image with modules; give --kernel-package")
            return EXIT_SKIPPED
        archive = initramfs(kernel, shutil.which("busybox") or "", folder)
        right = True
        for guest in (guest for guest in GUESTS if guest.name in args.only):
            found = boot(guest, kernel, archive, folder)
            right &= show(found)
            if args.keep:
                args.keep.mkdir(parents=True, exist_ok=True)
                (args.keep / f"{guest.name}.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
