"""Gradients and y that pass through a few places on the host: the bits of whole gradients there, in
every phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from deepspeed import comm as dist

from deepspeed_ext.zenflow.plan import chunks, decide
from tests.support.compare import allow_fp16
from tests.support.models import batches, two_groups
from tests.support.ranks import run_ranks
from tests.support.resuming import failed_resumes, resume_from_each, train_and_save
from tests.support.same import first_difference
from tests.support.zenflow import full_masters_of, make_engine, train, weights_of, zenflow_config

pytestmark = pytest.mark.sampled()

CHUNK = 512


@contextmanager
def small_chunks(*, whole: bool = False) -> Iterator[None]:
    """Partitions of many chunks, which pass through slots, or lie in `whole` gradients."""
    # slots of chunks would take more than whole gradients
    without = patch.object(decide, "SLOTS_OF_CHUNKS", 1 << 40)
    with patch.object(chunks, "CHUNK_NUMEL", CHUNK):
        if not whole:
            yield
            return
        with without:
            yield


def trained(
    config: dict[str, Any], between: Callable[[Any], None] | None, whole: bool
) -> dict[str, Any]:
    allow_fp16()
    accumulation = config["gradient_accumulation_steps"]
    with small_chunks(whole=whole):
        engine = make_engine(config, groups=two_groups)
        adam, losses = engine.optimizer.host_optimizer, []
        assert adam.decided.is_in_transit is not whole
        for batch in batches(7 * accumulation, dist.get_rank()):
            losses += train(engine, [batch])
            if between is not None and engine.is_gradient_accumulation_boundary():
                between(engine)
        found = {
            "losses": losses,
            "weights": weights_of(engine),
            "masters": full_masters_of(engine),
        }
        engine.destroy()
    return found


def differs(config: dict[str, Any], between: Callable[[Any], None] | None = None) -> str:
    return first_difference(
        trained(config, None, whole=True), trained(config, between, whole=False)
    )


def away_and_back(engine: Any) -> None:
    engine.offload_states()
    engine.reload_states()


def exposed(engine: Any) -> None:
    engine.optimizer.host_optimizer.state.expose()


def away_and_exposed(engine: Any) -> None:
    away_and_back(engine)
    exposed(engine)


def drained(engine: Any) -> None:
    engine.optimizer.host_optimizer.state.drain()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("between", [None, away_and_back, exposed, away_and_exposed, drained])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_bits_are_those_of_whole_gradients(
    stage: int, between: Callable[[Any], None] | None
) -> None:
    config = zenflow_config(stage, full_warm_up_rounds=2, prediction_error_factor=1e6)
    assert run_ranks(2, differs, config, between, device="sim", pool=f"chunks {stage == 3}") == [
        "",
        "",
    ]


def save_in_chunks(config: dict[str, Any], *more: Any) -> str:
    with small_chunks():
        return train_and_save(config, *more)


def resume_in_chunks(config: dict[str, Any], *more: Any) -> list[str]:
    with small_chunks():
        return resume_from_each(config, *more)


@pytest.mark.parametrize("loads_chunks", [True, False])
def test_a_checkpoint_does_not_know_of_it(loads_chunks: bool, tmp_path: Path) -> None:
    config = zenflow_config(2, full_warm_up_rounds=2)
    bodies = (
        (train_and_save, resume_in_chunks) if loads_chunks else (save_in_chunks, resume_from_each)
    )
    assert failed_resumes(1, config, 2, 4, str(tmp_path), "sim", bodies) == []
