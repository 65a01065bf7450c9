"""Prints what tests of trainers have measured."""

from __future__ import annotations

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    lines = [
        value
        for report in terminalreporter.getreports("passed")
        if report.when == "call"
        for key, value in report.user_properties
        if key == "seconds"
    ]
    if lines:
        terminalreporter.section("time from the command to the first step")
        for line in lines:
            terminalreporter.write_line(line)
