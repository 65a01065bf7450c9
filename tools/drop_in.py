"""Writes docs/drop_in.md from the rows that tests/unit/zenflow/test_drop_in.py tries.

python -m tools.drop_in
"""

from pathlib import Path

from tests.support.drop_in import ROWS, Row

__all__ = ["PAGE", "markdown"]

PAGE = Path(__file__).resolve().parent.parent / "docs" / "drop_in.md"

INTRODUCTION = """# What ZeRO-Offload accepts

<!-- Written by `make docs` from tests/support/drop_in.py; edit that. -->

You have a config with CPU offload, and want to know what becomes of a setting.

What ZenFlow does with each setting that DeepSpeed 0.19.8 reads beside CPU offload. A test tries every row on two CPU
ranks, at each stage in the table and under the predictive and the selective rule: a section `"zenflow": {"overlap_step": false}` is added to a
config of ZeRO-Offload, and nothing else.

- **works**: losses and weights are ZeRO-Offload's. In fp32 they are equal but for the last bits, because ZenFlow's pass
  rounds once where a product and a sum round twice (fused multiply-adds); in 16 bit such a bit can turn a weight to the
  neighbouring value.
- **replaced**: ZenFlow does at least as much in its own way. A warning says so, and the run is ZeRO-Offload's without
  the setting.
- **accepted**: `initialize` succeeds, and nothing else is tested: ZeRO-Offload itself does not train with it where the
  tests run.
- **refused**: `initialize` (or `engine.compile`) raises an error that names the setting.
- **refused by DeepSpeed**: with CPU offload DeepSpeed refuses it as well.

Every field of `zero_optimization`, `offload_optimizer` and `offload_param` has a test. The table has what needs a word; all
other {works} settings of `tests/support/drop_in.py` work.

| setting | stages | with ZenFlow | |
|---|---|---|---|
"""
NOT_SETTINGS = """
[Expert groups](rules.md#experts) have a test of their own.
"""


def markdown() -> str:
    """The page."""
    plain = [row for row in ROWS if row.outcome.word == "works" and not row.says]
    lines = "".join(_line(row) for row in ROWS if row not in plain)
    return INTRODUCTION.replace("{works}", str(len(plain))) + lines + NOT_SETTINGS


def _line(row: Row) -> str:
    stages = ", ".join(map(str, row.stages))
    return f"| `{row.setting}` | {stages} | {row.outcome.word} | {row.says} |\n"


def main() -> None:
    PAGE.write_text(markdown())


if __name__ == "__main__":
    main()
