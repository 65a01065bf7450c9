"""The notebook trains, in one process and without Jupyter: its cells of code are run in order."""

from __future__ import annotations

import contextlib
import io
import json
import socket
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.paths import ROOT
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.cpu(reason='the Trainer chooses the device by itself, and knows no "sim"')

NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"
SAVED = {
    "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "mp_rank_00_model_states.pt",
    "trainer_state.json",
}


def cells() -> list[str]:
    notebook = json.loads(NOTEBOOK.read_text())
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run_cells() -> tuple[dict[str, Any], str]:
    """What the notebook has measured at its end, and what it has printed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    names: dict[str, Any] = {"__name__": "__main__"}
    said = io.StringIO()
    with patch.dict("os.environ", {"MASTER_PORT": port}), contextlib.redirect_stdout(said):
        for number, text in enumerate(cells()):
            exec(compile(text, f"cell {number}", "exec"), names)
    found = {"losses": names["losses"], "measured": dict(names["measured"])}
    return found, said.getvalue()


def test_the_cells_train_overlap_and_save() -> None:
    pytest.importorskip("transformers")
    ((found, said),) = run_ranks(1, run_cells)
    assert len(found["losses"]) == 3
    assert found["losses"][-1] < 0.7 * found["losses"][0]
    assert found["measured"]["zenflow_bytes_down"] > 0
    assert all(name in said for name in SAVED), said
    assert "largest difference" in said
