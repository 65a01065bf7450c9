"""Several saves in one folder of tags: none touches another that goes on, and none loses the only
copy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from deepspeed_ext.checkpoint import folder as checkpoint_folder
from deepspeed_ext.checkpoint.folder import CheckpointFolder
from deepspeed_ext.errors import CheckpointError
from deepspeed_ext.runtime import files as _files
from deepspeed_ext.runtime.ranks import RankGroup
from tests.support.crash.driver import MODES, Disks, commit_save, load, make_engine, save

ALONE = RankGroup(None, 0, 1, torch.device("cpu"))
HOUR = 3600


class LastOnly(set[str]):
    """Holds what was put into it last."""

    def add(self, item: str) -> None:
        self.clear()
        super().add(item)


@pytest.fixture
def of_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the newest save is known to be of this process."""
    monkeypatch.setattr(checkpoint_folder, "_in_use", LastOnly())


def begun(folder: Path, tag: str, save_id: str) -> CheckpointFolder:
    """A save that goes on: its files are written."""
    found = CheckpointFolder(str(folder), tag, save_id)
    found.begin()
    Path(found.staging, "mp_rank_00_model_states.pt").write_text(save_id)
    found.mark()
    return found


def saved(folder: Path, tag: str, save_id: str) -> CheckpointFolder:
    found = begun(folder, tag, save_id)
    found.swap()
    found.end()
    return found


def make_older(folder: Path, hours: float) -> None:
    """As if nothing had been written for so long."""
    for path in folder.rglob("*"):
        then = path.stat().st_mtime - hours * HOUR
        os.utime(path, (then, then))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_two_engines_of_one_process_save_beside_training(tmp_path: Path) -> None:
    """Also if the first one makes no step for a long time, so that its save waits."""
    disks = Disks(tmp_path, False)
    engine, state = make_engine(ALONE, True, MODES[1])
    commit_save(engine, state.fill_(1), ALONE, disks, "first")
    make_older(tmp_path, 9)
    save(ALONE, disks, "second", 2, None, MODES[1])
    engine.finish()
    assert load(ALONE, disks, "first") == {1}
    assert load(ALONE, disks, "second") == {2}
    assert names(tmp_path / "disk0") == ["first", "latest", "second"]


@pytest.mark.usefixtures("of_another_job")
@pytest.mark.parametrize(("hours", "is_left"), [(0.5, True), (1.5, False)])
def test_what_another_job_writes_is_left_to_it(hours: float, is_left: bool, tmp_path: Path) -> None:
    begun(tmp_path, "theirs", "a")
    make_older(tmp_path, hours)
    saved(tmp_path, "ours", "b")
    assert names(tmp_path) == (["ours", "theirs.dsext-saving.a"] if is_left else ["ours"])


@pytest.mark.usefixtures("of_another_job")
@pytest.mark.parametrize("hours", [0.5, 1.5])
def test_a_swap_of_another_job(hours: float, tmp_path: Path) -> None:
    """Between its renames; after an hour it was interrupted there. Then the new save is whole."""
    saved(tmp_path, "theirs", "older")
    theirs = begun(tmp_path, "theirs", "new")
    os.rename(theirs.path, theirs._replaced)
    make_older(tmp_path, hours)
    saved(tmp_path, "ours", "b")
    assert names(tmp_path) == (
        ["ours", "theirs"]
        if hours > 1
        else ["ours", "theirs.dsext-replaced.new", "theirs.dsext-saving.new"]
    )
    theirs.finish_swap()
    assert theirs.state().saved == "new"


@pytest.mark.usefixtures("of_another_job")
def test_a_rest_that_cannot_be_removed_stops_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = begun(tmp_path, "theirs", "a")
    make_older(tmp_path, 9)
    rename = os.rename

    def refuse(path: str, target: str) -> None:
        if path == theirs.staging:
            raise PermissionError(13, "Permission denied", path)
        rename(path, target)

    monkeypatch.setattr(os, "rename", refuse)
    saved(tmp_path, "ours", "b")
    assert names(tmp_path) == ["ours", "theirs.dsext-saving.a"]


@pytest.mark.parametrize(
    ("older", "swaps", "is_gone", "left"),
    [
        (False, False, False, []),
        (False, True, False, []),
        (True, True, False, ["older"]),
        (True, True, True, ["new"]),
    ],
)
def test_a_save_that_is_given_up_leaves_the_older_one_or_else_the_only_copy(
    older: bool, swaps: bool, is_gone: bool, left: list[str], tmp_path: Path
) -> None:
    """Whoever has removed the older save."""
    if older:
        saved(tmp_path, "t", "older")
    ours = begun(tmp_path, "t", "new")
    if swaps:
        ours.swap()
    if is_gone:
        _files.remove_tree(ours._replaced)
    ours.give_up()
    assert names(tmp_path) == ["t"] * len(left)
    assert ours.state().saved == (left[0] if left else None)


@pytest.mark.parametrize("name", ["notes.txt", "mp_rank_00_model_states.pt"])
def test_a_folder_that_appears_during_a_save_is_replaced_unless_it_holds_a_save(
    name: str, tmp_path: Path
) -> None:
    """A save of plain DeepSpeed has no marker; a person's folder has neither marker nor model."""
    ours = begun(tmp_path, "t", "new")
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / name).write_text("theirs")
    if name == "notes.txt":
        ours.swap()
        ours.end()
        assert ours.state().saved == "new"
        assert (tmp_path / "t" / name).read_text() == "theirs"
    else:
        with pytest.raises(CheckpointError, match="another job has saved under"):
            ours.swap()
        assert (tmp_path / "t" / name).read_text() == "theirs"


@pytest.mark.usefixtures("of_another_job")
def test_a_save_removes_what_an_earlier_one_of_its_tag_has_replaced(tmp_path: Path) -> None:
    """The earlier one has swapped and has not ended."""
    saved(tmp_path, "t", "older")
    begun(tmp_path, "t", "new").swap()
    assert names(tmp_path) == ["t", "t.dsext-replaced.new"]
    saved(tmp_path, "t", "newest")
    assert names(tmp_path) == ["t"]
