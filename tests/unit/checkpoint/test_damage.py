"""Damaged files: each load raises an error that names the file, or the damage has changed
nothing."""

from __future__ import annotations

import random
import shutil
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist

from deepspeed_ext.checkpoint import sums
from deepspeed_ext.checkpoint.sums import checking, records, require_sound
from deepspeed_ext.errors import CheckpointError
from tests.support.models import batches, two_groups
from tests.support.ranks import run_ranks
from tests.support.same import first_difference
from tests.support.zenflow import make_engine, masters_of, train, weights_of, zenflow_config

pytestmark = pytest.mark.sampled()

DRAWS = 60
"""Damages per file."""


def damaged(content: bytes, rng: random.Random) -> bytes:
    """A flipped bit, a range of zeros, or an end that is missing."""
    kind = rng.choice(("flip", "flip", "flip", "zeros", "zeros", "cut"))
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


def state(engine: Any) -> dict[str, Any]:
    return {
        "weights": weights_of(engine),
        "masters": masters_of(engine),
        "optimizer": engine.optimizer.state_dict()[
            "optimizer_state_dict"
            if engine.zero_optimization_stage() == 3
            else "base_optimizer_state"
        ],
        "steps": engine.global_steps,
    }


def loads(folder: str, saving: dict[str, Any], loading: dict[str, Any], seed: int) -> Counter[str]:
    """Save, then load each damaged copy; what came of it."""
    engine = make_engine(saving, groups=two_groups)
    train(engine, batches(3, dist.get_rank()))
    engine.save_checkpoint(folder, tag="t", client_state={"mine": torch.arange(3)})
    engine.destroy()
    engine = make_engine(loading, groups=two_groups)
    engine.load_checkpoint(folder, "t")
    sound = state(engine)
    rng, found = random.Random(seed), Counter[str]()
    for path in sorted(Path(folder, "t").iterdir()):
        whole = path.read_bytes()
        for draw in range(DRAWS):
            path.write_bytes(changed := damaged(whole, rng))
            try:
                engine.load_checkpoint(folder, "t")
            except CheckpointError as error:
                found[
                    "refused, the file named"
                    if path.name in str(error)
                    else f"refused: {error}"[:300]
                ] += 1
            else:
                difference = first_difference(sound, state(engine), "state")
                found["unchanged" if not difference else f"{path.name}, {draw}: {difference}"] += 1
                found["equal bytes"] += changed == whole
        path.write_bytes(whole)
    engine.load_checkpoint(folder, "t")
    assert first_difference(sound, state(engine), "state") == ""
    engine.destroy()
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("stage", "beside", "other"),
    [(1, False, 1), (2, True, 2), (3, False, 3), (3, True, 3), (2, False, 3), (3, True, 1)],
)
def test_damage_is_found_or_changes_nothing(
    stage: int, beside: bool, other: int, tmp_path: Path
) -> None:
    configs = [zenflow_config(each, torch.bfloat16, async_save=beside) for each in (stage, other)]
    (found,) = run_ranks(1, loads, str(tmp_path / "saves"), *configs, stage + 10 * beside)
    known = {"refused, the file named", "unchanged", "equal bytes"}
    elsewhere = {
        what for what in found if what.startswith("refused: ") and "different saves" in what
    }
    assert set(found) - known - elsewhere == set(), found
    assert found["refused, the file named"] > DRAWS


def written(folder: Path, **how: Any) -> Path:
    path = folder / "file_states.pt"
    torch.save(
        {"a": torch.randn(5000), "b": torch.arange(3 << 18), "c": torch.empty(0)}, path, **how
    )
    return path


def test_a_large_record_is_compared_beside_the_load_and_what_the_load_says_of_it_is_not_asked(
    tmp_path: Path,
) -> None:
    path = written(tmp_path)
    (large,) = (record for record in records(str(path)) if record.nbytes > sums.SMALL_BYTES)
    content = bytearray(path.read_bytes())
    content[large.offset + large.nbytes - 1] ^= 1
    path.write_bytes(content)
    damage = f"{path} is damaged in its record '{large.name}'"
    with pytest.raises(CheckpointError, match=damage), checking(str(path)):
        raise ValueError("what torch made of it")
    require_sound(str(path), most_bytes=sums.SMALL_BYTES)


def test_files_without_sums_are_loaded_and_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(sums, "warn_once", said.append)
    with checking(str(written(tmp_path))):
        assert said == []
    with checking(str(written(tmp_path, _use_new_zipfile_serialization=False))):
        assert said.pop() == (
            f"{tmp_path}: files such as file_states.pt "
            "have no checksums, so damage would go unnoticed"
        )
    path = written(tmp_path)
    content = bytearray(path.read_bytes())
    for record in records(str(path)):
        for place in record.crc_offsets:
            content[place : place + 4] = bytes(4)
    path.write_bytes(content)
    with checking(str(path)):
        assert len(said) == 1


def test_a_sum_that_is_gone_in_one_of_its_places_is_damage(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole = path.read_bytes()
    for record in records(str(path)):
        for place in record.crc_offsets:
            path.write_bytes(whole[:place] + bytes(4) + whole[place + 4 :])
            if record.crc:
                with pytest.raises(CheckpointError, match="is damaged"):
                    require_sound(str(path))


def test_sums_of_a_save_stand_the_test_of_zip_files(tmp_path: Path) -> None:
    for stage, beside in ((1, True), (2, False), (3, True)):
        folder = tmp_path / f"{stage}{beside}"
        run_ranks(
            2, saved_only, str(folder), zenflow_config(stage, torch.bfloat16, async_save=beside)
        )
        for path in folder.rglob("*.pt"):
            assert zipfile.ZipFile(path).testzip() is None, path
            assert all(record.has_sum for record in records(str(path))), path
        shutil.rmtree(folder)


def saved_only(folder: str, config: dict[str, Any]) -> None:
    engine = make_engine(config, groups=two_groups)
    train(engine, batches(2, dist.get_rank()))
    engine.save_checkpoint(folder, tag="t")
    train(engine, batches(2, dist.get_rank()))
    engine.destroy()
