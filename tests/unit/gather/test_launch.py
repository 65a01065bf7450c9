"""What a fetch hands to the collectives: no copy that is not needed, and buckets without waste."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_ext.gather import launch
from deepspeed_ext.gather.launch import PendingParameter, gather_singles, gather_together
from deepspeed_ext.runtime.ranks import RankGroup

CPU = torch.device("cpu")
SECOND_OF_TWO = RankGroup(None, 1, 2, CPU)


class Sent:
    """As `deepspeed.comm`: notes what a collective gets."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.Tensor, ...]] = []

    def allgather_fn(self, output: torch.Tensor, part: torch.Tensor, **options: Any) -> None:
        self.calls.append((output, part))

    def all_reduce(self, bucket: torch.Tensor, **options: Any) -> None:
        self.calls.append((bucket,))


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    monkeypatch.setattr(launch, "dist", found := Sent())
    return found


def pending(
    numel: int, dtype: torch.dtype, communication: torch.dtype | None = None
) -> PendingParameter:
    """The second half of a parameter whose last element is padding if `numel` is odd."""
    part = torch.arange(-(-numel // 2)).to(dtype) + 1
    return PendingParameter(numel, part, communication or dtype)


def test_a_partition_is_sent_from_where_it_lies(sent: Sent) -> None:
    each = pending(6, torch.float32)
    gather_singles([each], SECOND_OF_TWO, grouped=False)
    ((output, part),) = sent.calls
    assert part.data_ptr() == each.partition.data_ptr()
    assert (output.numel(), each.storage.numel()) == (6, 6)


def test_a_partition_of_another_dtype_is_converted_into_its_place(sent: Sent) -> None:
    each = pending(5, torch.float32, torch.bfloat16)
    gather_singles([each], SECOND_OF_TWO, grouped=False)
    ((output, part),) = sent.calls
    assert (output.dtype, output.numel(), each.storage.numel()) == (torch.bfloat16, 6, 5)
    assert part.data_ptr() == output.data_ptr() + 3 * 2
    assert part.tolist() == [1, 2, 3]


def test_a_bucket_has_each_parameter_at_the_next_multiple_of_64_bytes(sent: Sent) -> None:
    several = [pending(5, torch.float32), pending(64, torch.bfloat16), pending(33, torch.bfloat16)]
    gather_together(several, SECOND_OF_TWO)
    ((bucket,),) = sent.calls
    assert bucket.dtype == torch.int64
    assert bucket.nbytes == 64 + 128 + 128
    starts = [each.storage.data_ptr() - bucket.data_ptr() for each in several]
    assert starts == [0, 64, 192]
    assert several[0].storage.tolist() == [0, 0, 0, 1, 2], (
        "the padding is left out, and the other rank's part is 0"
    )
    assert several[2].storage.tolist() == [0] * 17 + list(range(1, 17))
