"""A port to another DeepSpeed is a change of one folder, and the contract says what has moved."""

from __future__ import annotations

import pytest

from tools.rehearse_port import rehearsed


@pytest.mark.full  # test_contract.py and tests/shape hold both properties for what is there now
def test_renamed_members_are_named_and_only_the_adapter_uses_them() -> None:
    for name, told, files in rehearsed(seed=11, renames=12):
        assert told, f"the contract does not notice that {name} has moved"
        assert files, name
        assert [file for file in files if not file.startswith("adapter/")] == [], name
