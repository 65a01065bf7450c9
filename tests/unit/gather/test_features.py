"""Features that change how a parameter is gathered: each equals upstream to the bit, or is left to
upstream."""

from __future__ import annotations

import copy
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

import deepspeed_ext
from deepspeed_ext.adapter.gather_hooks import SingleParameterGather, attach, detach
from deepspeed_ext.adapter.upstream import OffloadDeviceEnum
from deepspeed_ext.adapter.zero_config import ZeroConfig
from deepspeed_ext.errors import ConfigError, PlanMismatchError
from deepspeed_ext.gather.launch import PendingParameter, gather_singles, gather_together
from deepspeed_ext.gather.plan import GatherMode, ParameterFacts, plan_gather
from deepspeed_ext.runtime.ranks import RankGroup
from tests.support.collectives import Collectives
from tests.support.compare import train
from tests.support.gather import OURS, engine_for, garbage_is_nan, way_config
from tests.support.models import batches, on_device
from tests.support.ranks import run_fresh_ranks, run_ranks
from tests.support.same import assert_same, first_difference
from tests.support.zero3 import ZooModel, fetch, gathered

pytestmark = pytest.mark.sampled(3)


def feature_body(
    zero: dict[str, Any], other: dict[str, Any], dtype: str
) -> tuple[list[float], SingleParameterGather]:
    upstream = way_config("plain", dtype, 1) | other
    upstream["zero_optimization"] |= zero
    extension = copy.deepcopy(upstream)
    extension["zero_optimization"] |= OURS | {"stage3_single_param_min_numel": 600}
    data = batches(8, dist.get_rank())
    probe = lambda engine: (gathered(engine), getattr(engine, "parameter_gather", None))  # noqa: E731
    with garbage_is_nan():
        expected = train(upstream, ZooModel, data, extended=False, probe=probe)
        actual = train(extension, ZooModel, data, extended=True, probe=probe)
    for record in (expected, actual):
        record.tensors |= record.probe[0]
    assert_same(expected, actual)
    assert expected.probe[1] is None
    return actual.losses, actual.probe[1].num_collectives


AUTOCAST = {
    "torch_autocast": {
        "enabled": True,
        "dtype": "bfloat16",
        "lower_precision_safe_modules": ["torch.nn.Linear"],
    }
}


def test_equals_upstream_when_two_dtypes_travel() -> None:
    for losses, num_collectives in run_ranks(3, feature_body, {}, AUTOCAST, "fp32"):
        assert losses[-1] < losses[0]
        assert num_collectives > 20


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [
        pytest.param(2, "bf16", id="one-node", marks=pytest.mark.full),
        pytest.param(4, "fp32", id="two-nodes"),
    ],
)
def test_equals_upstream_with_hpz(world_size: int, dtype: str) -> None:
    # in processes of their own: DeepSpeed keeps the
    # groups of hpZ, and uses them for every later engine
    for outcome in run_fresh_ranks(
        world_size, feature_body, {"zero_hpz_partition_size": 2}, {}, dtype
    ):
        assert outcome.error is None
        losses, num_collectives = outcome.value
        assert losses[-1] < losses[0]
        assert num_collectives > 20


def bits_body() -> int:
    ranks = RankGroup.of(
        dist.get_world_group(), torch.device(get_accelerator().current_device_name())
    )
    specials = [-0.0, float("nan"), -float("nan"), float("inf"), -float("inf"), 1e-40, -1e-40, 1.0]
    checked = 0
    for dtypes in (
        (torch.float32,),
        (torch.bfloat16,),
        (torch.bfloat16, torch.float32, torch.float16),
    ):
        wholes = []
        for index, numel in enumerate((1, 2, 0, 3, 8, 64, 1001)):
            values = (
                torch.tensor(specials)
                .repeat(numel // len(specials) + 1)[:numel]
                .to(dtypes[index % len(dtypes)])
            )
            values.view(torch.int32 if values.itemsize == 4 else torch.int16)[-1:] |= (
                5  # NaN with a payload, or odd bits
            )
            wholes.append(values.to(ranks.device))
        for gather in ("together", "singles", "grouped"):
            arrivals = [arrival_of(whole, ranks) for whole in wholes]
            if gather == "together":
                gather_together(arrivals, ranks).wait()
            else:
                for work in gather_singles(arrivals, ranks, grouped=gather == "grouped"):
                    work.wait()
            for whole, arrival in zip(wholes, arrivals, strict=True):
                assert arrival.storage is not None
                assert torch.equal(arrival.storage.view(torch.uint8), whole.view(torch.uint8)), (
                    gather,
                    whole,
                )
                assert arrival.storage.data_ptr() % 64 == 0
                checked += 1
    return checked


def arrival_of(whole: torch.Tensor, ranks: RankGroup) -> PendingParameter:
    """This rank's part of `whole`, padded with NaN, as ZeRO-3 would hold it."""
    part_numel = -(-whole.numel() // ranks.size)
    padded = torch.full(
        (part_numel * ranks.size,), float("nan"), dtype=whole.dtype, device=whole.device
    )
    padded[: whole.numel()] = whole
    part = padded[part_numel * ranks.rank :][:part_numel].clone()
    return PendingParameter(whole.numel(), part, whole.dtype)


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_bit_arrives(world_size: int) -> None:
    assert run_ranks(world_size, bits_body) == [63] * world_size


def collectives_body(grouped: bool) -> list[list[str]]:
    engine = engine_for(OURS | {"stage3_single_param_min_numel": 600})
    gather = engine.parameter_gather
    gather.grouped = grouped
    parameters = sorted(engine.module.parameters(), key=lambda parameter: parameter.ds_id)
    before = gathered(engine)
    seen = []
    for some in (parameters, parameters[:1], [p for p in parameters if p.ds_numel < 600]):
        for parameter in parameters:
            parameter.partition()
        with Collectives() as collectives:
            fetch(some[::-1])
        seen.append(collectives.names)
    fetch([p for p in parameters if p.ds_status.name == "NOT_AVAILABLE"])
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(parameter.cpu(), before[name]), name
    return seen


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_launch_for_singles_where_the_backend_groups_and_one_collective_for_a_bucket(
    world_size: int,
) -> None:
    for grouped, singles in (
        (False, ["_allgather_base_"] * 9),
        (True, ["allgather_into_tensor_coalesced_"]),
    ):
        for everything, one, small in run_ranks(world_size, collectives_body, grouped):
            assert everything == [*singles, "allreduce_"]
            assert one == ["_allgather_base_"]
            assert small == ["allreduce_"]


def fallback_body() -> tuple[list[str], dict[str, int]]:
    engine = engine_for(OURS | {"stage3_single_param_min_numel": 0})
    parameters = sorted(engine.module.parameters(), key=lambda parameter: parameter.ds_id)
    facts = [
        ParameterFacts(p.ds_id, p.ds_numel, 2, is_on_nvme=index in (0, 3))
        for index, p in enumerate(parameters)
    ]
    stock = {p.ds_id: p.all_gather_coalesced.stock(p) for p in parameters}
    mixed = SingleParameterGather(plan_gather(facts, 0), stock, grouped=False)
    before = gathered(engine)
    for parameter in parameters:
        parameter.partition()
    with Collectives() as collectives, torch.no_grad():
        handle = mixed(parameters)
        assert {p.ds_status.name for p in parameters} == {"INFLIGHT"}
        handle.wait()
        handle.wait()
    assert {p.ds_status.name for p in parameters} == {"AVAILABLE"}
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(parameter.cpu(), before[name]), name
    with pytest.raises(RuntimeError, match="expected a partitioned parameter"):
        mixed(parameters[1:2])
    return collectives.names, {
        mode.value: list(mixed.plan.modes.values()).count(mode) for mode in GatherMode
    }


def test_what_is_left_to_upstream_shares_its_coalesced_gather() -> None:
    for names, modes in run_ranks(2, fallback_body):
        assert modes["upstream"] == 2
        assert names == ["_allgather_base_"] * (modes["single"] + 1)


def inference_body() -> int:
    outputs = []
    for zero, through in (({}, deepspeed.initialize), (OURS, deepspeed_ext.initialize)):
        config = way_config("plain", "fp32", 1)
        del config["optimizer"]
        config["zero_optimization"] |= zero
        torch.manual_seed(0)
        engine = through(model=ZooModel(), config=config)[0]
        engine.eval()
        with torch.no_grad():
            outputs.append(
                torch.stack([engine(on_device(batch)) for batch in batches(4, dist.get_rank())])
            )
    assert torch.equal(*outputs)
    return engine.parameter_gather.num_collectives


def test_inference_without_an_optimizer_equals_upstream() -> None:
    assert min(run_ranks(2, inference_body)) > 0


def reasons_body() -> list[str]:
    model = engine_for({}).module
    group = dist.get_world_group()
    parameters = list(model.parameters())
    parameters[0].ds_tensor.final_location = OffloadDeviceEnum.nvme
    parameters[1].ds_tensor.ds_quant_scale = torch.ones(1)
    gather = attach(model, ZeroConfig(**OURS), group)
    assert gather is not None
    assert set(gather.plan.reasons) == {p.ds_id for p in parameters[:2]}
    found = [gather.plan.reasons[p.ds_id] for p in parameters[:2]]
    assert attach(model, ZeroConfig(**OURS, zero_quantized_weights=True), group) is None
    assert not any(
        isinstance(vars(p)["all_gather_coalesced"], SingleParameterGather) for p in parameters
    )
    return found


def test_nvme_and_quantized_parameters_are_left_to_upstream_for_a_reason() -> None:
    for on_nvme, quantized in run_ranks(2, reasons_body):
        assert on_nvme == "its partition is on NVMe, and upstream swaps it in"
        assert quantized.startswith("its weights are communicated quantized")


def off_body() -> None:
    stock = engine_for({}, through=deepspeed.initialize)
    plain = engine_for({})
    for parameter, other in zip(stock.module.parameters(), plain.module.parameters(), strict=True):
        assert parameter.all_gather_coalesced.__code__ is other.all_gather_coalesced.__code__
    assert plain.parameter_gather is None

    model = ZooModel()
    engine = engine_for(OURS, model)
    assert {vars(p)["all_gather_coalesced"] for p in model.parameters()} == {
        engine.parameter_gather
    }
    again = engine_for(OURS, model)  # as the HF Trainer does for a second `train`
    assert {vars(p)["all_gather_coalesced"] for p in model.parameters()} == {again.parameter_gather}
    engine.destroy()
    assert {vars(p)["all_gather_coalesced"] for p in model.parameters()} == {again.parameter_gather}
    engine_for({}, model)
    assert not any(
        isinstance(vars(p)["all_gather_coalesced"], SingleParameterGather)
        for p in model.parameters()
    )

    last = engine_for(OURS, model)
    last.destroy()
    assert not any(
        isinstance(vars(p)["all_gather_coalesced"], SingleParameterGather)
        for p in model.parameters()
    )
    detach(torch.nn.Linear(2, 2))


def test_off_means_upstreams_own_closures_before_after_and_again() -> None:
    run_ranks(2, off_body)


def before_initialize_body(config_at_init: bool) -> list[str]:
    config = way_config("plain", "fp32", 1)
    config["zero_optimization"] |= OURS
    if config_at_init:
        deepspeed_ext.enable()
    try:
        with deepspeed.zero.Init(
            config_dict_or_path=config if config_at_init else None, dtype=torch.float32
        ):
            model = ZooModel()
        engine = engine_for(OURS, model)
    finally:
        deepspeed_ext.disable()
    modes = {vars(p)["all_gather_coalesced"] for p in engine.module.parameters()}
    assert modes == {engine.parameter_gather}
    for batch in batches(3, dist.get_rank()):
        engine.backward(engine(on_device(batch)))
        engine.step()
    assert engine.parameter_gather.num_collectives > 0
    return engine.parameter_gather.plan.describe()


@pytest.mark.parametrize("config_at_init", [True, False])
def test_serves_a_model_made_under_zero_init_with_or_without_a_config(config_at_init: bool) -> None:
    first, second = run_ranks(2, before_initialize_body, config_at_init)
    assert first == second


def mismatch_body() -> str:
    model = engine_for({}).module
    settings = ZeroConfig(**OURS, stage3_single_param_min_numel=100 * dist.get_rank())
    with pytest.raises(PlanMismatchError) as error:
        attach(model, settings, dist.get_world_group())
    assert not any(
        isinstance(vars(p)["all_gather_coalesced"], SingleParameterGather)
        for p in model.parameters()
    )
    return str(error.value)


def test_ranks_that_disagree_get_an_error_that_shows_the_plans() -> None:
    for message in run_ranks(2, mismatch_body):
        assert "min_numel=0" in message
        assert "min_numel=100" in message


@pytest.mark.parametrize(
    "rival", ["stage3_allgather_sequential", "stage3_use_all_reduce_for_fetch_params"]
)
def test_two_ways_of_gathering_contradict(rival: str) -> None:
    with pytest.raises(ConfigError, match=f"single_param = True and {rival} = True"):
        ZeroConfig(**OURS, **{rival: True})
    assert ZeroConfig(**{rival: True}).stage3_allgather_single_param is False


def all_left_to_upstream() -> str:
    """A fetch that only upstream can make; the first difference of what the caller's stream then
    sees."""
    engine = engine_for(OURS)
    expected = gathered(engine)
    parameters = list(engine.module.parameters())
    with torch.no_grad():
        parameters[0].all_gather_coalesced(parameters, safe_mode=True).wait()
    found = {
        name: parameter.detach().cpu().clone()
        for name, parameter in engine.module.named_parameters()
    }
    engine.destroy()
    return first_difference(expected, found, "parameter")


def test_a_fetch_left_to_upstream_is_waited_for() -> None:
    assert run_ranks(2, all_left_to_upstream, device="sim", pool="simulated, stage 3") == ["", ""]
