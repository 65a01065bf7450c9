"""Damaged files, and files of other ranks and saves: each load raises an error on every rank that
names a file, or nothing has changed."""

from __future__ import annotations

import itertools
import random
import shutil
import struct
import zipfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist

from deepspeed_ext.checkpoint import file as checkpoint_file
from deepspeed_ext.checkpoint.file import SavedFile
from deepspeed_ext.errors import CheckpointError
from tests.support.models import batches, two_groups
from tests.support.ranks import run_ranks
from tests.support.resharded import Model
from tests.support.same import first_difference
from tests.support.zenflow import make_engine, masters_of, train, weights_of, zenflow_config

pytestmark = pytest.mark.sampled()

KINDS = (
    *("flip", "flip", "zeros", "cut", "swap", "swap", "copy", "copy"),
    *("other save", "other rank", "missing", "marker"),
)


def damaged(content: bytes, kind: str, rng: random.Random) -> bytes:
    """A flipped bit, a range of zeros, or an end that is missing."""
    # Every other draw hits the directory at the end or the first bytes, which are few.
    edge = (
        rng.randrange(max(1, len(content) - 2500), len(content))
        if rng.random() < 0.5
        else rng.randrange(600)
    )
    place = rng.randrange(len(content)) if rng.random() < 0.5 else min(edge, len(content) - 1)
    if kind == "cut":
        return content[:place]
    changed = bytearray(content)
    if kind == "flip":
        changed[place] ^= 1 << rng.randrange(8)
    else:
        end = min(len(changed), place + rng.choice((1, 4, 16, 512, 4096)))
        changed[place:end] = bytes(end - place)
    return bytes(changed)


def put(folder: Path, kind: str, rng: random.Random) -> tuple[str, bool]:
    """Damage a checkpoint beside which there is another one, "other"; return what was done, and
    whether any byte has changed."""
    names = sorted(path.name for path in folder.glob("*_states.pt"))
    name = rng.choice(names)
    path, another = folder / name, folder / rng.choice([each for each in names if each != name])
    content, there = path.read_bytes(), another.read_bytes()
    if kind == "missing":
        path.unlink()
    elif kind in ("swap", "copy"):
        path.write_bytes(there)
        if kind == "swap":
            another.write_bytes(content)
    elif kind == "other save":
        shutil.copyfile(folder.parent / "other" / name, path)
    elif kind == "other rank":  # all that one rank wrote is of the other save
        rank = rng.choice("01")
        for stale in (folder.parent / "other").glob(f"*zero_pp_rank_{rank}_*"):
            shutil.copy(stale, folder)
    elif kind == "marker":
        (folder / "deepspeed_ext_save.json").write_text(rng.choice(("", "{}", '{"save_id": "a"}')))
    else:
        path.write_bytes(changed := damaged(content, kind, rng))
        return f"{kind} {name}", changed != content
    return f"{kind} {name} {another.name if kind in ('swap', 'copy') else ''}", True


def state(engine: Any) -> dict[str, Any]:
    stage_3 = engine.zero_optimization_stage() == 3
    key = "optimizer_state_dict" if stage_3 else "base_optimizer_state"
    frozen = [getattr(each, "ds_tensor", each) for each in engine.module.parameters()]
    return {
        "weights": weights_of(engine),
        "masters": masters_of(engine),
        "optimizer": engine.optimizer.state_dict()[key],
        "frozen": [each.detach().clone() for each in frozen if not each.requires_grad],
        "buffers": {name: each.clone() for name, each in engine.module.named_buffers()},
        "steps": engine.global_steps,
    }


def loads(
    folder: str, saving: dict[str, Any], loading: dict[str, Any], seed: str, draws: int
) -> Counter[str]:
    """Save twice, then load damaged copies; what came of it."""
    rank = dist.get_rank()
    good, other, bad = (Path(folder, name) for name in ("good", "other", "bad"))
    engine = make_engine(saving, model=partial(Model, 1.0), groups=two_groups)
    for path in (other, good):
        train(engine, batches(3, rank))
        engine.save_checkpoint(folder, tag=path.name, client_state={"mine": torch.arange(3)})
    engine.destroy()
    for path in Path(folder).rglob("*.pt"):  # the sums are those of zip files
        assert zipfile.ZipFile(path).testzip() is None, path
        assert all(record.CRC or not record.file_size for record in records(path)), path
    engine = make_engine(loading, model=partial(Model, 1.0), groups=two_groups)
    engine.load_checkpoint(folder, "good")
    sound = state(engine)
    rng, found = random.Random(seed), Counter[str]()
    for _ in range(draws):
        kind, told = rng.choice(KINDS), [("", False)]
        draw_seed = rng.randrange(1 << 30)
        if rank == 0:
            shutil.copytree(good, bad)
            told = [put(bad, kind, random.Random(draw_seed))]
        dist.broadcast_object_list(told, 0)
        what, has_changed = told[0]
        try:
            engine.load_checkpoint(folder, "bad")
            told = [(first_difference(sound, state(engine), "state"), False)]
            outcome = f"{what}: {told[0][0]}" if told[0][0] else "unchanged"
        except CheckpointError as error:
            names_it = str(bad) in str(error) and has_changed
            outcome = "refused" if names_it else f"{what}: {error}"[:300]
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, outcome)
        found[f"{kind}: {outcome}" if outcome in ("refused", "unchanged") else outcome] += 1
        if set(every) not in ({"refused"}, {"unchanged"}):
            found[f"the ranks differ: {every}"[:400]] += 1
        if rank == 0:
            shutil.rmtree(bad)
        dist.barrier()
    engine.load_checkpoint(folder, "good")
    assert first_difference(sound, state(engine), "state") == ""
    engine.destroy()
    return found


@pytest.mark.sampled(8)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("rule", "moments"),
    [*itertools.product(("predictive", "exact"), ("float32", "int8")), ("selective", "float32")],
)
def test_damage_is_found_or_changes_nothing(
    rule: str, stage: int, moments: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Of a checkpoint of two ranks with a frozen parameter, loaded in its layout or in another."""
    draws = 60 if request.config.getoption("--full") else 16
    how = {"update_rule": rule, "state_dtype": moments, "async_save": stage == 2}
    configs = [
        zenflow_config(each, torch.bfloat16, **how)
        for each in (stage, stage if rule != "selective" else 3 - stage % 2)
    ]
    args = str(tmp_path), *configs, f"{rule} {stage} {moments}", draws
    found, _ = run_ranks(2, loads, *args, timeout_seconds=600, pool="damage")
    assert {what.partition(": ")[2] for what in found} <= {"refused", "unchanged"}, found
    assert sum(found.values()) == draws
    assert sum(found[f"{kind}: refused"] for kind in set(KINDS)) > draws // 2


def written(folder: Path, **how: Any) -> Path:
    path = folder / "file_states.pt"
    torch.save(
        {"a": torch.randn(5000), "b": torch.arange(3 << 18), "c": torch.empty(0)}, path, **how
    )
    return path


def records(path: Path) -> list[zipfile.ZipInfo]:
    with zipfile.ZipFile(path) as archive:
        return archive.infolist()


def test_small_records_are_verified_at_once_and_large_ones_before_they_are_used(
    tmp_path: Path,
) -> None:
    for small in (True, False):
        path = written(tmp_path)
        sizes = {record.filename: record for record in records(path)}
        record = (min if small else max)(sizes.values(), key=lambda each: each.file_size or 9)
        content = bytearray(path.read_bytes())
        lengths = struct.unpack_from("<HH", content, record.header_offset + 26)
        content[record.header_offset + 30 + sum(lengths) + record.file_size - 1] ^= 1
        path.write_bytes(content)
        damage = f"{path} is damaged or incomplete .*{record.filename}"
        if small:
            with pytest.raises(CheckpointError, match=damage):
                SavedFile(str(path))
        else:
            file = SavedFile(str(path))
            for _ in range(2):
                with pytest.raises(CheckpointError, match=damage):
                    _ = file.sound


def test_files_without_sums_are_loaded_and_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(checkpoint_file, "warn_once", said.append)
    assert SavedFile(str(written(tmp_path))).sound
    assert said == []
    assert SavedFile(str(written(tmp_path, _use_new_zipfile_serialization=False))).sound
    message = f"{tmp_path}: files such as file_states.pt have no checksums, so damage would go unno"
    assert all(line.startswith(message) for line in said)
    assert said
    said.clear()
    path = written(tmp_path)
    content = path.read_bytes()
    for record in records(path):  # in the directory, and behind the record
        content = content.replace(struct.pack("<I", record.CRC), bytes(4))
    path.write_bytes(content)
    assert SavedFile(str(path)).sound
    assert said
