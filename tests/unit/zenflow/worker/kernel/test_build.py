"""The compiled kernel on disk: made once, loaded only if nobody else could have written it and it is whole."""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deepspeed_ext.runtime import cache as _cache
from deepspeed_ext.zenflow.worker.kernel import build, library_path
from deepspeed_ext.zenflow.worker.kernel.native import ABI_VERSION
from deepspeed_ext.zenflow.worker.kernel.sealed import is_whole_elf, is_whole_sealed, seal
from tests.support.paths import ROOT

STRANGER = 12345  # a user id that is neither ours nor root's
FUNCTIONS = ("dsext_adam_pass", "dsext_mean_pass", "dsext_first_touch", "dsext_thread_ids")
STUB = "".join(f'extern "C" void {name}() {{}}\n' for name in FUNCTIONS)
STUB += f'extern "C" int dsext_adam_pass_version() {{ return {ABI_VERSION}; }}\n'
COMPILER = shutil.which("c++")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here")


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was warned of."""
    said: list[str] = []
    monkeypatch.setattr(build, "warn_once", said.append)
    return said


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> Path:
    """An empty cache, for a kernel that compiles in no time and does nothing."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "stub.cpp").write_text(STUB)
    monkeypatch.setattr(build, "FOLDER", sources)
    monkeypatch.setattr(build, "COMPILE_FLAGS", ("-fPIC",))
    monkeypatch.setenv("DSEXT_CACHE_DIR", str(tmp_path / "parent" / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv("CXX", raising=False)
    build._temporary_folder.cache_clear()
    return tmp_path / "parent" / "cache"


def made(cache: Path) -> Path:
    """The cached library, compiled now."""
    path = library_path()
    assert path is not None
    assert Path(path).parent == cache
    return Path(path)


def test_compiled_once_into_a_private_folder(cache: Path, warnings: list[str]) -> None:
    library = made(cache)
    assert [stat.S_IMODE(place.stat().st_mode) for place in (cache, cache.parent)] == [0o700, 0o700]
    stamp = library.stat().st_mtime_ns
    assert made(cache) == library
    assert library.stat().st_mtime_ns == stamp
    assert os.listdir(cache) == [library.name]
    assert not warnings


def test_on_disk_before_it_has_its_name(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    sync, replace = os.fsync, Path.replace

    def record_sync(descriptor: int) -> None:
        order.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).suffix)
        sync(descriptor)

    def record_replace(self: Path, target: Path) -> Path:
        order.append("replace")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Path, "replace", record_replace)
    made(cache)
    assert order == [".so", "replace", ""]  # the file, its name, the folder


def plant(library: Path) -> Path:
    """Replace the library by one that leaves a mark when it is loaded, sealed as ours are; returns the mark's path."""
    mark = library.parent.parent.parent / "mark"
    source = mark.with_name("planted.cpp")
    source.write_text(
        f'{STUB}#include <cstdio>\n__attribute__((constructor)) static void run() {{ fopen("{mark}", "w"); }}\n'
    )
    library.unlink()
    subprocess.run([str(COMPILER), "-fPIC", "-shared", str(source), "-o", str(library)], check=True)
    seal(library)
    return mark


def link_elsewhere(library: Path) -> None:
    library.rename(library.with_suffix(".elsewhere"))
    library.symlink_to(library.with_suffix(".elsewhere"))


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
HAZARDS = [
    pytest.param(lambda library: os.chown(library, STRANGER, -1), True, marks=needs_root, id="another's file"),
    pytest.param(lambda library: library.chmod(0o722), True, id="file that others can write"),
    pytest.param(link_elsewhere, True, id="symbolic link"),
    pytest.param(
        lambda library: os.chown(library.parent, STRANGER, -1), False, marks=needs_root, id="another's folder"
    ),
    pytest.param(lambda library: library.parent.chmod(0o1777), False, id="folder that others can write"),
    pytest.param(lambda library: library.parent.parent.chmod(0o777), False, id="folder that others can rename"),
]


@pytest.mark.parametrize(("expose", "cache_is_used"), HAZARDS)
def test_what_others_could_have_written_is_not_loaded(
    expose: Callable[[Path], object], cache_is_used: bool, cache: Path, warnings: list[str]
) -> None:
    library = made(cache)
    mark = plant(library)
    expose(library)
    path = library_path()
    assert path is not None
    assert not mark.exists()
    assert (Path(path) == library) == cache_is_used
    assert is_whole_sealed(Path(path))
    assert library_path() == path
    assert len(set(warnings)) == 1
    reasons = ("belongs to", "can write", "symbolic link")
    assert any(reason in warnings[0] for reason in reasons)


def test_a_planted_library_would_have_run(cache: Path) -> None:
    """Without a hazard the same file is loaded: so the test above can fail."""
    mark = plant(made(cache))
    made(cache)
    assert mark.exists()


def test_a_sticky_parent_is_as_good_as_a_private_one(cache: Path) -> None:
    made(cache).parent.parent.chmod(0o1777)
    made(cache)


def test_a_linked_cache_folder_is_used_where_it_lies(cache: Path, tmp_path: Path) -> None:
    cache.parent.mkdir(mode=0o700)
    (tmp_path / "disk").mkdir(mode=0o700)
    cache.symlink_to(tmp_path / "disk")
    made(tmp_path / "disk")


def rewrite(library: Path, content: bytes) -> None:
    """As a new file: this process may have loaded the old one, and its pages must stay."""
    library.unlink()
    library.write_bytes(content)


DAMAGES = {
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "one byte short": lambda content: content[:-1],
    "one bit": lambda content: content[:4096] + bytes([content[4096] ^ 1]) + content[4097:],
    "no seal": lambda content: content[:-45],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_never_loaded_and_made_anew(
    damage: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = made(cache)
    rewrite(library, DAMAGES[damage](library.read_bytes()))
    loaded: list[Path] = []

    def note(path: Path) -> bool:
        loaded.append(path)
        return True

    monkeypatch.setattr(build, "_loads", note)
    assert made(cache) == library
    assert len(loaded) == 1, "what was compiled"
    assert library not in loaded
    assert is_whole_sealed(library)


def test_a_truncated_library_of_setup_py_is_not_loaded(cache: Path) -> None:
    library = made(cache)
    built = build.FOLDER / "_adam_pass.so"
    built.write_bytes(library.read_bytes())
    assert is_whole_elf(built)
    assert library_path() == str(built)
    rewrite(built, built.read_bytes()[:4096])
    assert not is_whole_elf(built)
    assert made(cache) == library


def test_the_library_of_setup_py_is_whole() -> None:
    for built in Path(build.__file__).parent.glob("_adam_pass*.so"):
        assert is_whole_elf(built)


def test_a_private_library_goes_with_its_process(cache: Path) -> None:
    """And not with a child that it forks."""
    cache.mkdir(mode=0o777, parents=True)
    cache.chmod(0o777)
    code = f"""
import os
from pathlib import Path
from deepspeed_ext.zenflow.worker.kernel import build
build.FOLDER, build.COMPILE_FLAGS = Path({str(build.FOLDER)!r}), ("-fPIC",)
path = build.library_path()
if (child := os.fork()) == 0:
    raise SystemExit
os.waitpid(child, 0)
print(path, os.path.exists(path))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    path, was_there = done.stdout.split()
    assert was_there == "True"
    assert not Path(path).parent.exists()


def test_a_compiler_with_arguments(cache: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    monkeypatch.setenv("CXX", f"env LANG=C '{COMPILER}'")
    made(cache)
    assert not warnings


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("false", "false exited with status 1"),
        ("no-such-compiler", "no-such-compiler"),
        ("'open", "No closing quotation"),
    ],
)
def test_why_the_slower_kernel_runs_is_said(
    compiler: str, reason: str, cache: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    monkeypatch.setenv("CXX", compiler)
    assert library_path() is None
    (warning,) = warnings
    assert "slower" in warning
    assert reason in warning


def test_an_interrupted_build_is_swept_up(cache: Path) -> None:
    old, young = cache / "build-old", cache / "build-young"
    for folder in (old, young):
        folder.mkdir(parents=True, mode=0o700)
    cache.chmod(0o700)
    cache.parent.chmod(0o700)
    os.utime(old, (0, 0))
    library = made(cache)
    assert sorted(os.listdir(cache)) == [library.name, "build-young"]


@pytest.mark.parametrize(("stated", "expected"), [(".", "."), ("below/it", "below/it"), ("~/kept", "home/kept")])
def test_the_cache_folder_is_absolute(
    stated: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DSEXT_CACHE_DIR", stated)
    assert _cache.cache_folder() == tmp_path / expected
    assert _cache.cache_folder().is_absolute()


def test_without_a_home_the_cache_is_temporary(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME", "DSEXT_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert _cache.cache_folder().name == f"deepspeed_ext-{os.getuid()}"
    assert _cache.cache_folder().is_absolute()
