"""Checkpoint files on one rank: loss of power at any moment, mixtures, tags that name no folder,
foreign files."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from deepspeed_ext.adapter import joint_checkpoint_engine as joint
from deepspeed_ext.adapter.joint_checkpoint_engine import JointCheckpointEngine
from deepspeed_ext.adapter.saved_checkpoint import SAVED_NAMES
from deepspeed_ext.checkpoint import folder as checkpoint_folder
from deepspeed_ext.checkpoint.folder import CheckpointFolder, FolderState, choose_save
from deepspeed_ext.errors import CheckpointError
from deepspeed_ext.runtime import files as _files
from deepspeed_ext.runtime.ranks import RankGroup
from tests.support.crash.driver import CONFIG, MODES, Disks, commit_save, load, make_engine, save

STATE = "mp_rank_00_model_states.pt"
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


def test_files_of_two_saves_are_refused(tmp_path: Path) -> None:
    disks = Disks(tmp_path, False)
    for value, tag in ((1, "a"), (2, "b")):
        save(ALONE, disks, tag, value)
    name = "mp_rank_00_model_states.pt"
    shutil.copy(tmp_path / "disk0" / "b" / name, tmp_path / "disk0" / "a" / name)
    with pytest.raises(CheckpointError, match="files of different saves"):
        load(ALONE, disks, "a")
    assert load(ALONE, disks, "b") == {2}


@pytest.mark.parametrize("tag", ["..", "../x", ".", "", "a/../.."])
def test_tags_that_name_no_folder_of_their_own(tag: str, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(CheckpointError, match="not inside the checkpoint folder"):
        CheckpointFolder(str(tmp_path / "saves"), tag, SAVED_NAMES).require_savable()


@pytest.mark.parametrize(
    "tag",
    [
        *("latest", "latest_universal", "zero_to_fp32.py", "latest/x", "./latest"),
        *(
            "a.dsext-removing",
            "a.dsext-saving.0123456789abcdef",
            "b/a.dsext-replaced/c",
            "x.dsext-tmp.1",
        ),
        *(
            " a",
            "a ",
            "a\n",
            "\ta",
            "a\u2003",
            "a\rb",
            "a\0b",
            "a\x7f",
            "a/../b",
            "a/b/..",
            "\udc80",
        ),
    ],
)
def test_tags_under_which_a_save_could_not_be_found_are_refused_at_the_save(
    tag: str, tmp_path: Path
) -> None:
    engine = JointCheckpointEngine(CONFIG, ALONE, leads=True)
    engine.begin_save(names_latest=True)
    with pytest.raises(CheckpointError, match=r"the tag .*save under another tag"):
        engine.create(
            type("Info", (), {"tag": tag, "save_dir": str(tmp_path), "save_latest": True})
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "tag",
    [
        *(
            "global_step7",
            "7",
            "run/epoch 3/best",
            "...",
            ".hidden",
            "v1.2..3",
            "latest.1",
            "a/latest",
            "x" * 200,
        ),
        *(
            "schöner Stand",
            "模型",
            "🙂",
            "a b",
            "-x",
            "~",
            "%d",
            "a//b",
            "a/",
            "zero_to_fp32.pyc",
            "dsext-removing",
        ),
    ],
)
def test_other_tags_are_saved_found_by_latest_and_kept_by_the_next_save(
    tag: str, tmp_path: Path
) -> None:
    disks = Disks(tmp_path, False)
    save(ALONE, disks, tag, 1)
    assert (tmp_path / "disk0/latest").read_text() == tag
    assert load(ALONE, disks) == {1}
    save(ALONE, disks, "another", 2)
    assert load(ALONE, disks, tag) == {1}
    assert load(ALONE, disks) == {2}


def test_a_file_under_the_tags_name_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("a file of the user's")
    engine = JointCheckpointEngine(CONFIG, ALONE, leads=True)
    engine.begin_save(names_latest=True)
    with pytest.raises(CheckpointError, match="not a folder"):
        engine.create(
            type("Info", (), {"tag": "t", "save_dir": str(tmp_path), "save_latest": True})
        )
    assert (tmp_path / "t").read_text() == "a file of the user's"


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


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"save_id"', "\x00\xff"])
def test_a_damaged_marker_is_a_checkpoint_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / checkpoint_folder._MARKER).write_text(text)
    with pytest.raises(CheckpointError, match="damaged"):
        CheckpointFolder(str(tmp_path), "t", SAVED_NAMES).state()


def test_a_damaged_marker_under_the_saves_own_tag_is_an_error_of_the_save(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / checkpoint_folder._MARKER).write_text("[]")
    engine = JointCheckpointEngine(CONFIG, ALONE, leads=True)
    engine.begin_save(names_latest=True)
    with pytest.raises(
        CheckpointError, match=r"'t' was not saved: .*damaged.*save under another tag"
    ):
        engine.create(SimpleNamespace(tag="t", save_dir=str(tmp_path)))


INTERRUPTIONS = ("created", "folder made", "a file failed", "a file saved", "committing")


def interrupted_save(
    engine: JointCheckpointEngine, folder: Path, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save under tag a that ends `at` this point, as if Ctrl-C had been pressed there."""
    info = SimpleNamespace(tag="a", save_dir=str(folder))
    engine.begin_save(names_latest=True)
    engine.makedirs(str(folder), exist_ok=True)
    engine.create(info)
    if at == "created":
        return
    engine.makedirs(f"{folder}/a", exist_ok=True)
    if at == "folder made":
        return
    with monkeypatch.context() as patched:
        if at == "a file failed":
            patched.setattr(torch, "save", Mock(side_effect=OSError(errno.ENOSPC, "no space")))
        engine.save({"state": torch.ones(3)}, f"{folder}/a/{STATE}")
        assert (engine.kept.error is not None) == (at == "a file failed")
        if at == "committing":
            patched.setattr(CheckpointFolder, "swap", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                engine.commit(info)


@pytest.mark.parametrize("at", INTERRUPTIONS)
@pytest.mark.parametrize("tag", ["a", "b"])
def test_an_interrupted_save_does_not_affect_the_next(
    tag: str, at: str, tmp_path: Path, monkeypatch: Any
) -> None:
    engine = JointCheckpointEngine(CONFIG, ALONE, leads=True)
    interrupted_save(engine, tmp_path, at, monkeypatch)
    info = SimpleNamespace(tag=tag, save_dir=str(tmp_path))
    engine.begin_save(names_latest=True)
    engine.makedirs(str(tmp_path), exist_ok=True)
    engine.create(info)
    engine.makedirs(f"{tmp_path}/{tag}", exist_ok=True)
    engine.save({"state": torch.full((3,), 2)}, f"{tmp_path}/{tag}/{STATE}")
    engine.commit(info)
    reader = JointCheckpointEngine(CONFIG, ALONE, leads=True)
    assert reader.begin_load(str(tmp_path), None) == tag
    assert reader.load(f"{tmp_path}/{tag}/{STATE}")["state"].tolist() == [2, 2, 2]
    assert not (tmp_path / ("b" if tag == "a" else "a")).exists()


def test_an_error_of_the_folder_of_all_tags_refuses_its_own_save(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    engine = JointCheckpointEngine(CONFIG, ALONE, leads=True)
    engine.begin_save(names_latest=True)
    engine.makedirs(f"{tmp_path}/file", exist_ok=True)
    with pytest.raises(CheckpointError, match="was not saved"):
        engine.create(SimpleNamespace(tag="a", save_dir=f"{tmp_path}/file"))


class Named(Disks):
    """One folder for all ranks, also a relative one."""

    def of(self, rank: int) -> str:
        return str(self.folder)


@pytest.mark.parametrize("name", [".", "a/..", "a"])
def test_a_folder_that_is_relative_to_the_current_one(
    name: str, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path)
    for value in (1, 2):  # the second replaces the first
        save(ALONE, Named(Path(name), False), "t", value)
        assert load(ALONE, Named(Path(name), False)) == {value}
    assert (tmp_path / name / "latest").read_text() == "t"


@pytest.mark.parametrize("alone", [False, True])
def test_the_script_may_change_its_folder_while_a_save_goes_on(
    alone: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    folders = [tmp_path / name for name in ("before", "after")]
    for folder in folders:
        folder.mkdir()
    monkeypatch.chdir(folders[0])
    engine, state = make_engine(ALONE, True, MODES[1])
    commit_save(engine, state.fill_(1), ALONE, Named(Path("saves"), False), "t")
    monkeypatch.chdir(folders[1])
    engine.finish(alone=alone)
    assert load(ALONE, Named(folders[0] / "saves", False)) == {1}
    assert list(folders[1].iterdir()) == []


@pytest.mark.parametrize(("ranks", "copies"), [(1, True), (8, False)])
def test_copies_of_all_ranks_find_room(
    ranks: int, copies: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    """The other ranks of the host copy at the same time."""
    engine, state = make_engine(ALONE, True, MODES[1])
    copy = Mock(wraps=joint.host_copy)
    monkeypatch.setattr(joint, "host_copy", copy)
    monkeypatch.setattr(joint, "available_host_bytes", lambda: 2 * state.nbytes)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    commit_save(engine, state.fill_(1), ALONE, Disks(tmp_path, False), "t")
    engine.finish()
    assert copy.called == copies
    assert load(ALONE, Disks(tmp_path, False)) == {1}
