"""The tables of what fits are current, and hold what the plan of memory says."""

from __future__ import annotations

import pytest

from deepspeed_ext.commands.memory.fit import GPU_RESERVE
from deepspeed_ext.commands.memory.model import known
from tools import fits, front_tables
from tools.fits import GIB, OWNED, Owned

CARD = OWNED[0]


@pytest.mark.full  # half a minute; a change of any size shows in README's part of it, too
def test_the_page_is_current() -> None:
    assert fits.PAGE.read_text() == fits.page(), "run `make docs`"


def test_a_row_of_both_pages_is_what_the_plan_says() -> None:
    cells = fits.row(CARD, 96)
    assert f"| {CARD.name} | 96 GB | {' | '.join(cells)} |" in fits.PAGE.read_text()
    on_front = "".join(f" {billions}B |" for billions in cells)
    assert f"| RTX 4090, 24 GB | 96 GB |{on_front}" in front_tables.PAGE.read_text()


@pytest.mark.parametrize(("model", "host"), [("mistral-7b", 64), ("qwen2.5-7b", 96)])
def test_a_model_by_name_has_the_config_that_trains_it(model: str, host: int) -> None:
    """On a card of 24 GB: the letter of its cell is that of the config which the command writes."""
    section, seconds = fits.named(model, "rtx4090", host)
    text = fits.PAGE.read_text()
    (row,) = (line for line in text.splitlines() if line.startswith(f"| `rtx4090` | {model} |"))
    cell = row.split(" | ")[2 + fits.NAMED_HOST_GIB.index(host)]
    letter = cell.removeprefix(f"{seconds}<sup>").removesuffix("</sup>")
    assert f"| {letter} | `{section}` |" in text


def test_smaller_moments_and_larger_hosts_never_hold_less() -> None:
    rows = [
        [fits.largest(name, CARD, host) for name in list(fits.groups())[1:]] for host in (64, 96)
    ]
    assert all(row == sorted(row) for row in rows)
    assert all(few <= many for few, many in zip(*rows, strict=True))


def test_flash_optim_fits_by_its_seven_bytes() -> None:
    params = fits.flash_largest(CARD)
    left = 24 * GIB - GPU_RESERVE - fits.question(CARD, 64, params).activations(2)
    assert 7 * params <= left < 7 * (params + 10**8)
    several = fits.flash_largest(Owned("rtx4090", 8, ()))
    assert 4 * params < several < 8 * params + 8 * 10**9


def test_each_machine_card_and_model_is_on_the_page() -> None:
    text = fits.PAGE.read_text()
    for machine in OWNED:
        for host in machine.host_gib:
            assert f"| {machine.name} | {host:,} GB |" in text
    for section in ("models", "cards", "hosts"):
        assert all(f"| {name} |" in text or f"| `{name}` |" in text for name in known()[section])
