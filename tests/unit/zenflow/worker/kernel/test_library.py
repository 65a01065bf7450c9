"""The native kernel on disk: loaded, or else the reference runs and says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepspeed_ext.zenflow.worker.kernel import library, library_path

HERE = pytest.mark.skipif(
    not library.BUILT.exists(), reason="deepspeed_ext was installed without a C++ compiler"
)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was warned of."""
    warnings: list[str] = []
    monkeypatch.setattr(library, "warn_once", warnings.append)
    return warnings


def of(path: Path, monkeypatch: pytest.MonkeyPatch) -> str | None:
    monkeypatch.setattr(library, "BUILT", path)
    return library_path()


@HERE
def test_the_library_that_was_built_is_found(said: list[str]) -> None:
    assert library_path() == str(library.BUILT)
    assert said == []


def test_without_a_library_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    assert of(tmp_path / "none.so", monkeypatch) is None
    assert "installed without a C++ compiler" in said[0]
    assert "Install the wheel" in said[0]


def test_what_does_not_load_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    other = tmp_path / "other.so"
    other.write_text("no library, and no ELF file")
    assert of(other, monkeypatch) is None
    assert "does not load" in said[0]


def test_a_library_of_another_version_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    if not library.BUILT.exists():
        pytest.skip("deepspeed_ext was installed without a C++ compiler")
    monkeypatch.setattr("deepspeed_ext.zenflow.worker.kernel.native.ABI_VERSION", -1)
    copy = tmp_path / "copy.so"
    copy.write_bytes(library.BUILT.read_bytes())
    assert of(copy, monkeypatch) is None
    assert "ABI version -1" in said[0]


def test_it_can_be_disabled(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    monkeypatch.setenv("DSEXT_NATIVE_KERNEL", "0")
    assert library_path() is None
    assert said == []
