"""The native kernel on disk: loaded, or else the reference runs and says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from deepspeed_ext.zenflow.worker.kernel import load_kernel, native
from deepspeed_ext.zenflow.worker.kernel.lion_pass import LionPasses
from deepspeed_ext.zenflow.worker.kernel.native import library_path
from deepspeed_ext.zenflow.worker.kernel.passes import Passes
from tests.support.kernels import needs_native


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was warned of."""
    warnings: list[str] = []
    monkeypatch.setattr(native, "warn_once", warnings.append)
    return warnings


@needs_native
def test_the_library_that_was_built_is_found_unless_it_is_disabled(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert library_path() == library_path(LionPasses) == str(native.BUILT)
    assert library_path(Passes) is None  # without a function in it
    monkeypatch.setenv("DSEXT_NATIVE_KERNEL", "0")
    assert library_path() is None
    assert said == []


BUILT = native.BUILT


def cut(share: float) -> Callable[[Path], None]:
    """Leave this share of the library, as an interrupted copy does. Loading it ends a process."""

    def write(path: Path) -> None:
        whole = BUILT.read_bytes()
        path.write_bytes(whole[: int(share * len(whole))])

    return write


@needs_native
@pytest.mark.parametrize(
    ("write", "says"),
    [
        (lambda path: None, "installed without a C++ compiler. Install the wheel"),
        (lambda path: path.write_text("no library, and no ELF file"), "does not load"),
        (lambda path: path.write_bytes(BUILT.read_bytes()), "ABI version -1"),
        *((cut(share), "bytes: install it again") for share in (0.01, 0.3, 0.5, 0.9, 0.999)),
    ],
)
def test_what_cannot_be_used_is_named_and_the_reference_runs(
    write: Callable[[Path], None],
    says: str,
    said: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "ABI_VERSION", -1)
    monkeypatch.setattr(native, "BUILT", tmp_path / "library.so")
    write(tmp_path / "library.so")
    path = library_path()
    assert path is None
    assert says in said[0]
    assert load_kernel(path, 1).name == "reference"
