"""The page of what fits is current, and its tables hold what the plan of memory says."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from deepspeed_ext.commands.memory.plan import plan_memory
from deepspeed_ext.commands.memory.setup import Model, Ranks
from deepspeed_ext.commands.memory.traffic import Machine
from deepspeed_ext.zenflow.plan.phases import Phase
from deepspeed_ext.zenflow.plan.places import Place
from tests.support.paths import ROOT
from tools import deepspeed_zenflow as upstream
from tools import fits
from tools.fits import GIB, OURS, ZENFLOW, ZERO_OFFLOAD, Shape

SEVEN_B = Model(7 * 10**9, 10**8, "bfloat16")
OCTET = Ranks(8, 8)


@pytest.mark.full  # a minute and a half; a change of any size shows in README's part of it, too
def test_the_page_is_current() -> None:
    assert fits.PAGE.read_text() == fits.markdown(), "run `make docs`"


@pytest.mark.parametrize(("width", "billions"), [(4096, 6.7), (5120, 12.9), (8192, 52.1)])
def test_shapes_follow_their_rule(width: int, billions: float) -> None:
    shape = Shape(width)
    assert shape.layers == width // 128
    assert shape.params == 12 * shape.layers * width**2 + 2 * 32768 * width
    assert shape.params / 1e9 == pytest.approx(billions, abs=0.05)


@pytest.mark.parametrize("name", [ZERO_OFFLOAD, ZENFLOW, OURS])
@pytest.mark.parametrize("stage", [2, 3])
def test_the_largest_model_fits_and_the_next_does_not(name: str, stage: fits.Stage) -> None:
    found = fits.largest(name, stage, 8, 40, 512)
    assert found is not None
    following = fits.SHAPES[fits.SHAPES.index(found) + 1]
    tiers = fits.TIERS if stage == 2 else (None,)

    def is_fitting(shape: Shape) -> bool:
        needs = [fits.needed(name, stage, 8, tier, shape) for tier in tiers]
        return any(device <= 40 * GIB and host <= 512 * GIB for device, host in needs)

    assert is_fitting(found)
    assert not is_fitting(following)


@pytest.mark.parametrize("name", [ZERO_OFFLOAD, ZENFLOW, OURS])
def test_more_memory_or_more_gpus_at_stage_3_never_hold_less(name: str) -> None:
    def size(gpus: int, gpu: int, host: int) -> int:
        shape = fits.largest(name, 3, gpus, gpu, host)
        return shape.params if shape else 0

    sizes = [[size(8, gpu, host) for host in fits.HOST_GIB] for gpu in fits.GPU_GIB]
    assert all(row == sorted(row) for row in sizes)
    assert all(list(column) == sorted(column) for column in zip(*sizes, strict=True))
    by_gpus = [size(gpus, 24, 2048) for gpus in fits.GPUS]
    assert by_gpus == sorted(by_gpus)


def test_nothing_fits_where_there_is_no_room() -> None:
    assert fits.largest(ZENFLOW, 3, 8, 24, 8) is None


def test_needs_are_those_of_the_plan_with_activations_and_what_stays_free() -> None:
    shape = Shape(4096)
    device, host = fits.needed(OURS, 3, 8, None, shape)
    plan = plan_memory(shape.model, OCTET, fits.setup_of(OURS, 3))
    backward = plan.nbytes(Place.ACCELERATOR, Phase.BACKWARD) + fits.activation_bytes(shape)
    assert device == max(plan.peak(Place.ACCELERATOR), backward) + 2 * GIB
    assert host == plan.host_peak() + 12 * GIB


def test_activations_grow_with_layers_and_hold_the_logits_of_small_models() -> None:
    small, large = Shape(512), Shape(8192)
    assert fits.activation_bytes(small) == 2 * 4 * 4096 * 512 + 10 * 4096 * 32768
    assert fits.activation_bytes(large) == 2 * 64 * 4096 * 8192 + 72 * 4096 * 8192


def test_deepspeeds_zenflow_holds_what_was_measured() -> None:
    """36.37 bytes per parameter between steps, on one rank and on CPU ranks, where what is on the
    GPU counts as well; 1 % are constants of processes."""
    one = Ranks(1, 1)
    plan = plan_memory(SEVEN_B, one, replace(upstream.setup(2), rounds_pinned=False))
    nbytes = plan.on_host(Phase.BETWEEN) + upstream.host_extra(SEVEN_B, one, 2)
    nbytes += upstream.device_extra(SEVEN_B, one, 2)
    table = (ROOT / "docs" / "results" / "zenflow_step.md").read_text()
    (measured,) = re.findall(r"\| upstream ZenFlow, overlapped \| (3\d\.\d+) \|", table)
    assert nbytes / SEVEN_B.params == pytest.approx(float(measured), rel=0.01)


def test_what_is_on_the_gpu_is_partitioned_only_at_stage_3() -> None:
    whole, part = (upstream.device_extra(SEVEN_B, OCTET, stage) for stage in (2, 3))
    assert whole == pytest.approx(0.6 * SEVEN_B.params)
    assert part == pytest.approx(whole / 8, rel=1e-6)


def test_a_step_of_deepspeeds_zenflow_moves_what_its_source_says() -> None:
    """Three 16-bit sums go up and down, then fp32 goes down. Unscaling and an fp32 copy are
    exposed."""
    machine = Machine(link=10e9, host=1e15)
    numel = SEVEN_B.params / 8
    found = upstream.step(SEVEN_B, OCTET, 2, machine)
    assert found.transfer == pytest.approx((4 + 3 * 2) * numel / 10e9, rel=1e-6)
    assert found.exposed == pytest.approx(4 * numel / 10e9, rel=1e-3)
    bound = upstream.step(SEVEN_B, OCTET, 2, Machine(link=1e15, host=100e9))
    assert bound.exposed == pytest.approx(8 * SEVEN_B.params / 100e9, rel=1e-3)
    assert bound.beside == bound.host > bound.exposed


@pytest.mark.parametrize("source", ["page", "two of each setting"])
def test_the_verdict_counts_every_case_once(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, expected = fits.PAGE.read_text(), 2 * 4 * 4 * 6
    if source != "page":
        for name in ("GPUS", "GPU_GIB", "HOST_GIB"):
            monkeypatch.setattr(fits, name, getattr(fits, name)[::3][:2])
        text, expected = fits._verdict(), 2 * 2 * 2 * 2
    (cases,) = map(int, re.findall(r"In (\d+) cases", text))
    assert cases == expected
    triples = re.findall(r"in (\d+), as large in (\d+) and smaller in (\d+)", text)
    assert [sum(map(int, triple)) for triple in triples] == [cases, cases]
    ((more, machines, less),) = re.findall(r"On (\d+) of (\d+) machines .* smaller on (\d+) ", text)
    assert int(machines) == cases / 2
    assert int(more) + int(less) <= int(machines)


def test_what_a_link_exposes_goes_up_and_what_it_hides_comes_down() -> None:
    slow_down = fits.Link(Machine(link=1e9, host=1e15), 4e9, 8, "")
    slow_up = fits.Link(Machine(link=4e9, host=1e15), 1e9, 8, "")
    times = [
        link.time(SEVEN_B, OCTET, fits.setup_of(ZERO_OFFLOAD, 3)) for link in (slow_down, slow_up)
    ]
    numel = SEVEN_B.params / 8
    assert [time.exposed for time in times] == [
        pytest.approx(2 * numel / speed, rel=1e-3) for speed in (4e9, 1e9)
    ]
    assert [time.beside for time in times] == [
        pytest.approx(4 * numel / speed, rel=1e-3) for speed in (1e9, 4e9)
    ]


def test_flash_optim_fits_by_its_seven_bytes_and_the_next_shape_does_not() -> None:
    def needs(shape: Shape) -> int:
        return 7 * shape.params + fits.activation_bytes(shape) + 2 * GIB

    found = fits.flash_largest(2, 1, 80)
    assert found is not None
    following = fits.SHAPES[fits.SHAPES.index(found) + 1]
    assert needs(found) <= 80 * GIB < needs(following)
    assert fits.flash_largest(2, 8, 80) == found, "each GPU holds everything"
    divided = fits.flash_largest(3, 8, 80)
    assert divided is not None
    assert 6 * found.params < divided.params < 8 * found.params


def test_machines_that_people_own_are_on_the_page_each_with_its_hosts() -> None:
    text = fits.PAGE.read_text()
    for machine in fits.OWNED:
        for host in machine.host_gib:
            assert f"| {machine.name} | {host:,} GB |" in text
