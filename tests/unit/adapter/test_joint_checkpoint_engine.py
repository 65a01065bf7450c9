"""Checkpoint files on one rank: loss of power at any moment, mixtures, tags that name no folder,
foreign files."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from deepspeed_ext.adapter import joint_checkpoint_engine as joint
from deepspeed_ext.adapter.joint_checkpoint_engine import JointCheckpointEngine
from deepspeed_ext.checkpoint import folder as checkpoint_folder
from deepspeed_ext.checkpoint.folder import CheckpointFolder, FolderState, choose_save
from deepspeed_ext.errors import CheckpointError
from deepspeed_ext.runtime import files as _files
from deepspeed_ext.runtime.ranks import RankGroup
from tests.support.crash.driver import MODES, Disks, commit_save, load, make_engine, save

ALONE = RankGroup(None, 0, 1, torch.device("cpu"))


class Recorder:
    """Records what a save does to files, in order, as functions that do it again to another
    folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.root = root
        self.operations: list[tuple[str, tuple[str, ...], bytes]] = []
        for name in ("rename", "replace", "mkdir"):
            monkeypatch.setattr(os, name, self._recording(name, getattr(os, name)))
        monkeypatch.setattr(_files, "remove_tree", self._recording("remove", _files.remove_tree))
        fsync = os.fsync

        def recorded(descriptor: int) -> None:
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            fsync(descriptor)
            if path.is_dir():
                self._note("sync folder", str(path))
            else:
                self._note("write", str(path), content=path.read_bytes())

        monkeypatch.setattr(os, "fsync", recorded)

    def _recording(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*paths: str, **how: Any) -> Any:
            result = original(*paths, **how)
            self._note(name, *(str(path) for path in paths if isinstance(path, (str, Path))))
            return result

        return recorded

    def _note(self, name: str, *paths: str, content: bytes = b"") -> None:
        self.operations.append(
            (name, tuple(os.path.relpath(path, self.root) for path in paths), content)
        )


def after_power_loss(
    operations: list[tuple[str, tuple[str, ...], bytes]], folder: Path, draw: random.Random
) -> None:
    """Carry out what may be on the disk after `operations`: names up to the last synced one and
    perhaps some more, in order, as file systems with a journal keep it; content that was not synced
    is lost or not."""
    synced = max(
        (place for place, (name, *_) in enumerate(operations) if name == "sync folder"), default=-1
    )
    kept = draw.randint(synced + 1, len(operations))
    for name, paths, content in operations[:kept]:
        targets = [folder / path for path in paths]
        # it was created and written before; the sync is the moment from which it is sure
        if name == "write":
            targets[0].write_bytes(content)
        elif name in ("rename", "replace"):
            os.rename(*targets)
        elif name == "mkdir":
            targets[0].mkdir(exist_ok=True)
        elif name == "remove":
            shutil.rmtree(targets[0], ignore_errors=True)


@pytest.mark.parametrize("tag", ["a", "b"])
def test_power_loss_at_any_moment(
    tag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "base"
    save(ALONE, Disks(base, False), "a", 1)
    shutil.copytree(base, tmp_path / "saved", symlinks=True)
    with monkeypatch.context() as patched:
        recorder = Recorder(patched, base)
        save(ALONE, Disks(base, False), tag, 2)
    operations = recorder.operations
    names = [name for name, *_ in operations]
    assert {"write", "sync folder", "rename", "replace", "mkdir"} <= set(names)
    for seed in range(3):
        for moment in range(len(operations) + 1):
            folder = tmp_path / "crashed"
            shutil.copytree(tmp_path / "saved", folder)
            after_power_loss(operations[:moment], folder, random.Random(seed * 1000 + moment))
            found = load(ALONE, Disks(folder, False))
            assert found in ({1}, {2}), f"seed {seed}, after {names[:moment]}"
            assert moment < len(operations) or found == {2}, (
                "what commit has returned for is on the disk"
            )
            shutil.rmtree(folder)


NO_FOLDER_OF_ITS_OWN = ("..", "../x", ".", "", "a/../..")
RESERVED = (
    *("latest", "latest_universal", "zero_to_fp32.py", "latest/x", "./latest"),
    *("a.dsext-removing", "a.dsext-saving.0123", "b/a.dsext-replaced/c", "x.dsext-tmp.1"),
)
NOT_KEPT_BY_LATEST = (" a", "a ", "a\n", "\ta", "a\u2003", "a\rb", "a\0b", "a\x7f", "\udc80")
USABLE = (
    *("7", "run/epoch 3/best", "...", ".hidden", "v1.2..3", "latest.1", "a/latest", "x" * 200),
    *("schöner Stand", "模型", "🙂", "-x", "~", "%d", "a//b", "a/", "zero_to_fp32.pyc"),
)


def refusal(folder: Path, tag: str) -> str:
    """What is said of a save under a tag that cannot be made."""
    with pytest.raises(CheckpointError) as refused:
        save(ALONE, Disks(folder, False), tag, 1)
    return str(refused.value)


def test_tags_under_which_a_save_could_not_be_found_are_refused_at_the_save(tmp_path: Path) -> None:
    (tmp_path / "disk0").mkdir()
    for tag in NO_FOLDER_OF_ITS_OWN:
        assert "not inside the checkpoint folder" in refusal(tmp_path, tag), tag
    for tag in (*RESERVED, *NOT_KEPT_BY_LATEST, "a/../b", "a/b/.."):
        said = refusal(tmp_path, tag)
        assert "the tag " in said, tag
        assert "save under another tag" in said, tag
    assert list((tmp_path / "disk0").iterdir()) == []


def test_other_tags_are_saved_found_by_latest_and_kept_by_the_next_save(tmp_path: Path) -> None:
    disks = Disks(tmp_path, False)
    for value, tag in enumerate(USABLE):
        save(ALONE, disks, tag, value)
        assert (tmp_path / "disk0/latest").read_text() == tag
        assert load(ALONE, disks) == {value}
    for value, tag in enumerate(USABLE):
        assert load(ALONE, disks, tag) == {value}


def test_what_is_under_the_tags_name_and_is_no_save_of_ours_stays(tmp_path: Path) -> None:
    folder = tmp_path / "disk0"
    folder.mkdir()
    (folder / "file").write_text("the user's")
    assert "not a folder" in refusal(tmp_path, "file")
    assert (folder / "file").read_text() == "the user's"
    for text in ("", "[]", "{}", '{"save_id"', "\x00\xff"):
        (folder / "t").mkdir(exist_ok=True)
        (folder / "t" / checkpoint_folder._MARKER).write_text(text)
        with pytest.raises(CheckpointError, match="damaged"):
            CheckpointFolder(str(folder), "t", "model_states.pt").state()
        said = refusal(tmp_path, "t")
        assert said.startswith("checkpoint 't' was not saved: ")
        assert "damaged" in said
        assert "save under another tag" in said
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "disk0").write_text("not a folder")
    assert "was not saved" in refusal(tmp_path / "other", "t")


def test_what_others_put_beside_the_files_stays(tmp_path: Path) -> None:
    """Files of the older save go, also those of ranks that are no more: tools read every file that
    matches."""
    disks = Disks(tmp_path, False)
    save(ALONE, disks, "a", 1)
    folder = tmp_path / "disk0" / "a"
    (folder / "notes").mkdir()
    (folder / "notes" / "readme.txt").write_text("mine")
    (folder / "zero_pp_rank_7_mp_rank_00_optim_states.pt").write_bytes(b"of an eighth rank")
    save(ALONE, disks, "a", 2)
    assert (folder / "notes" / "readme.txt").read_text() == "mine"
    assert sorted(path.name for path in folder.glob("*.pt")) == [
        "mp_rank_00_model_states.pt",
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    ]


def test_a_link_to_another_disk_is_replaced_and_its_target_stays(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("yes")
    (tmp_path / "disk0").mkdir()
    (tmp_path / "disk0" / "a").symlink_to(elsewhere)
    save(ALONE, Disks(tmp_path, False), "a", 1)
    assert load(ALONE, Disks(tmp_path, False), "a") == {1}
    assert (elsewhere / "kept").exists()


@pytest.mark.parametrize(
    ("states", "chosen"),
    [
        ([("x",)], "x"),
        ([(None,)], None),
        ([("",), ("",)], ""),
        ([("new", (), ("old",)), ("old", ("new",))], "new"),
        ([("new",), (None, ("new",))], "new"),
        ([("new",), ("old", ("interrupted", "new"))], "new"),
        ([("new", (), ("old",)), ("old",)], "old"),
        ([("new", (), ("older", "old")), ("old",)], "old"),
        ([("new", (), ("",)), ("",)], ""),
        ([("",), (None,)], CheckpointError),
        ([("a",), ("b",)], CheckpointError),
        ([("a",), (None,)], CheckpointError),
    ],
)
def test_the_save_that_every_node_has(states: list[tuple], chosen: Any) -> None:
    found = [FolderState(*state) for state in states]
    if chosen is CheckpointError:
        with pytest.raises(CheckpointError):
            choose_save(found)
    else:
        assert choose_save(found) == chosen


INTERRUPTIONS: dict[str, tuple[Any, str, Any]] = {
    "created": (JointCheckpointEngine, "makedirs", (None, KeyboardInterrupt())),
    "folder made": (JointCheckpointEngine, "save", KeyboardInterrupt()),
    "a file failed": (torch, "save", OSError(errno.ENOSPC, "no space")),
    "a file saved": (JointCheckpointEngine, "commit", KeyboardInterrupt()),
    "committing": (CheckpointFolder, "swap", KeyboardInterrupt()),
}
"""What raises in a save, and which error: as if Ctrl-C had been pressed, or on a full disk."""


@pytest.mark.parametrize("at", INTERRUPTIONS)
@pytest.mark.parametrize("tag", ["a", "b"])
def test_an_interrupted_save_does_not_affect_the_next(
    tag: str, at: str, tmp_path: Path, monkeypatch: Any
) -> None:
    engine, state = make_engine(ALONE, True, MODES[0])
    disks = Disks(tmp_path, False)
    owner, name, error = INTERRUPTIONS[at]
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, Mock(side_effect=error))
        with pytest.raises((KeyboardInterrupt, CheckpointError)):
            commit_save(engine, state.fill_(1), ALONE, disks, "a")
    commit_save(engine, state.fill_(2), ALONE, disks, tag)
    assert load(ALONE, disks) == {2}
    assert (tmp_path / "disk0/latest").read_text() == tag
    assert not (tmp_path / "disk0" / ("b" if tag == "a" else "a")).exists()


class Named(Disks):
    """One folder for all ranks, also a relative one."""

    def of(self, rank: int) -> str:
        return str(self.folder)


@pytest.mark.parametrize("name", [".", "a/..", "a"])
def test_a_folder_that_is_relative_to_the_current_one(
    name: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """The script may change that while a save goes on."""
    (tmp_path / "a").mkdir()
    there = Named(Path(name), False)
    for value, ends in ((1, None), (2, False), (3, True)):  # each replaces the one before
        monkeypatch.chdir(tmp_path)
        engine, state = make_engine(ALONE, True, MODES[0 if ends is None else 1])
        commit_save(engine, state.fill_(value), ALONE, there, "t")
        monkeypatch.chdir("/")
        engine.finish(ends=bool(ends))
        monkeypatch.chdir(tmp_path)
        assert load(ALONE, there) == {value}
    assert (tmp_path / name / "latest").read_text() == "t"


@pytest.mark.parametrize(("ranks", "copies"), [(1, True), (8, False)])
def test_copies_of_all_ranks_find_room(
    ranks: int, copies: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    """The other ranks of the host copy at the same time."""
    engine, state = make_engine(ALONE, True, MODES[1])
    fill, waits = joint.fill_holes, list[int]()

    def noted(path: str, holes: list[Any]) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        waits.append(len(holes) if is_main else 0)
        fill(path, holes)

    monkeypatch.setattr(joint, "fill_holes", noted)
    monkeypatch.setattr(joint, "available_host_bytes", lambda: 2 * state.nbytes)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    commit_save(engine, state.fill_(1), ALONE, Disks(tmp_path, False), "t")
    engine.finish()
    assert any(waits) is not copies, "without copies, training waits until the files are written"
    assert load(ALONE, Disks(tmp_path, False)) == {1}
