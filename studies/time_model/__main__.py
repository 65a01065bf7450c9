"""python -m studies.time_model: writes the tables of docs/lab/archive/time_model.md and its
picture."""

from __future__ import annotations

from studies.time_model.inputs import read
from studies.time_model.page import PAGE, draw, written


def main() -> None:
    inputs = read()
    PAGE.write_text(written(PAGE.read_text(), inputs))
    draw(inputs)


if __name__ == "__main__":
    main()
