"""Draws runs for tests of the memory plan, as settings: nothing runs."""

from __future__ import annotations

from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from deepspeed_ext.commands.memory.plan import MemoryPlan, plan_memory
from deepspeed_ext.commands.memory.setup import Machine, Model, Setup
from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE
from deepspeed_ext.zenflow.worker.kernel.lion_pass import LION_STATE

DTYPES = st.sampled_from(["bfloat16", "float16", "float32"])
PARAMS = st.integers(1, 10**10)


def model_of(params: int, dtype: str = "bfloat16") -> Model:
    return Model(params, max(1, params // 20), dtype)


def planned(setup: Setup, params: int, ranks: int = 1, dtype: str = "bfloat16") -> MemoryPlan:
    """The plan of a drawn run, if its section allows one."""
    try:
        return plan_memory(model_of(params, dtype), Machine(ranks, ranks), setup)
    except ValueError:  # Lion has fewer intervals, and an open interval may contradict a section
        assume(False)
        raise


@st.composite
def sections(draw: Any, stage: int) -> ZenFlowConfig:
    """A ``zenflow`` section."""
    given: dict[str, Any] = {"async_save": draw(st.booleans())}
    if stage > 1:
        given["gradients_on_host"] = draw(st.sampled_from([None, None, True, False]))
    if draw(st.booleans()):
        dtypes = st.sampled_from(["float32", "bfloat16", "int8"])
        given |= {
            "update_rule": "predictive",
            "update_interval": draw(st.sampled_from([None, 1, 2, 5])),
            "overlap_step": draw(st.sampled_from([None, False])),
            "state_dtype": draw(dtypes),
        }
    else:
        given |= {
            "update_rule": "selective",
            "update_interval": draw(st.sampled_from([None, 2, 4])),
            "topk_ratio": draw(st.floats(0.01, 0.9)),
            "overlap_step": draw(st.booleans()),
            "select_interval": draw(st.sampled_from([None, 4])),
        }
    return ZenFlowConfig(**{name: value for name, value in given.items() if value is not None})


@st.composite
def setups(draw: Any) -> Setup:
    """Settings of a run."""
    stage = draw(st.sampled_from([1, 2, 3]))
    zenflow = draw(st.one_of(st.none(), sections(stage)))
    predicts = zenflow is not None and zenflow.rule == "predictive"
    stays = predicts and not zenflow.gradients_on_host
    offload = zenflow is None and draw(st.booleans())
    offloads_weights = stage == 3 and (offload or zenflow is not None) and draw(st.booleans())
    adam_only = not predicts or zenflow.state_dtype != "float32"
    return Setup(
        stage=stage,
        offload=offload,
        zenflow=zenflow,
        accumulation=draw(st.sampled_from([1, 4])),
        fused_adam=draw(st.booleans()),
        pins=draw(st.booleans()),
        rounds_pinned=False,
        offload_param=offloads_weights,
        host_share=draw(st.sampled_from([1.0, 0.5])) if stays and not offloads_weights else 1.0,
        layout=ADAM_STATE if adam_only else draw(st.sampled_from([ADAM_STATE, LION_STATE])),
        reduce_bucket_size=draw(st.integers(1, 10**9)),
        overlap_comm=draw(st.sampled_from([None, True, False])),
        sub_group_size=draw(st.integers(1, 10**10)),
        stage3_allgather_single_param=draw(st.booleans()),
        flatten_tier=draw(st.sampled_from([None, "accelerator", "distributed", "host"])),
        gathers_on_save=draw(st.booleans()),
    )
