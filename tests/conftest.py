"""Shared by all tests: the CPU accelerator in this process, and the whole matrix only when asked
for."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.support import rank_nursery
from tests.support.matrix import beyond_one_in, beyond_the_sample, further_cases

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Keep compiled modules, tests with their rewritten assertions too: else each process compiles all.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

SIMULATED_GPU_TESTS_ONE_IN = 36
"""`make test-sim` and `make test-full` run all of them."""
ACCEPTANCE_ONE_IN = 12
"""Of tests/acceptance in `make test`; run by its name it is whole."""
_ON_SIM: set[str] = set()
"""Names of the tests that `--some-simulated` has chosen."""
_RUN_RANKS = {"run_ranks", "run_fresh_ranks", "failed_resumes"}
_LONGEST_FIRST = {"faults", "manual", "harness", "commands"}
"""Folders."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`")
    parser.addoption(
        "--simulated",
        action="store_true",
        help="run the tests marked `gpu` on the simulated accelerator",
    )
    parser.addoption(
        "--all-simulated",
        action="store_true",
        help="run the ranks of all tests on the simulated accelerator, but for those marked `cpu`",
    )
    parser.addoption(
        "--some-simulated",
        type=int,
        metavar="N",
        help="run the ranks of one test in N on the simulated accelerator instead of the CPU, of "
        "those of which another case stays on the CPU",
    )


def pytest_configure(config: pytest.Config) -> None:
    with suppress(ImportError):  # a machine with a GPU may not have it
        from hypothesis import settings

        # no deadline: the machine may be busy
        many = 300 if config.getoption("full") else 50
        settings.register_profile("untimed", deadline=None, max_examples=many)
        settings.load_profile("untimed")
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        # it shares out files among others and needs no torch
        os.environ[rank_nursery.ADDRESS] = rank_nursery.start("cpu", "sim")
    else:
        import deepspeed_ext.zenflow.worker.kernel.definition  # noqa: F401 (makes the first calls)
        from tests.support import ranks

        ranks.fork_workers()
        gc.disable()  # a tenth of a collection of tests, whose objects all stay


def pytest_collection_finish() -> None:
    gc.freeze()  # else each garbage collection walks all tests, and hypothesis causes many
    gc.enable()


@pytest.fixture
def started_workers() -> Iterator[None]:
    """For tests of how an optimizer process starts and what its rank then has as children."""
    from tests.support import ranks

    with ranks.started_workers():
        yield


@pytest.hookimpl(tryfirst=True)  # before any fixture runs ranks
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.config.getoption("--some-simulated"):
        from tests.support import ranks

        ranks.simulate("accelerator", *(["cpu"] if item.nodeid in _ON_SIM else []))


def _may_be_simulated(item: pytest.Item) -> bool:
    """Whether a test of the package has ranks on the CPU that may have the simulated accelerator
    instead. One with a setting `device` chooses by itself."""
    if "unit" not in item.path.parts or any(map(item.get_closest_marker, ("gpu", "cpu"))):
        return False
    names_device = hasattr(item, "callspec") and "device" in item.callspec.params
    return not names_device and not _RUN_RANKS.isdisjoint(vars(item.module))  # type: ignore


@pytest.hookimpl(trylast=True)  # samples are of what -m and -k have left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    from tests.support import ranks

    if config.getoption("--all-simulated"):
        ranks.simulate("cpu", "accelerator")
    elif config.getoption("--simulated"):
        ranks.simulate("accelerator")
    else:
        for item in items:
            if item.get_closest_marker("gpu") and not torch.accelerator.is_available():
                item.add_marker(pytest.mark.skip(reason="no accelerator on this machine"))
    # With several processes (-n), the files with the longest
    # tests come first: none of them is left for the end.
    items.sort(key=lambda item: _LONGEST_FIRST.isdisjoint(item.path.parts))
    left_out: set[pytest.Item] = set()
    if config.getoption("--all-simulated"):
        reasons = {item: [m.kwargs["reason"] for m in item.iter_markers("cpu")] for item in items}
        left_out |= {item for item in items if any(reasons[item])}
    if not config.getoption("--full"):
        left_out |= {item for item in items if item.get_closest_marker("full")}
        if config.getoption("--some-simulated"):
            for item in items:
                if "acceptance" in item.path.parts:
                    item.add_marker(pytest.mark.sampled(ACCEPTANCE_ONE_IN))
        if config.getoption("--simulated"):
            on_gpu = [item for item in items if item.get_closest_marker("gpu")]
            left_out |= beyond_one_in(SIMULATED_GPU_TESTS_ONE_IN, on_gpu)
        # last: a sample must hold each value among the cases that can still run
        left_out |= beyond_the_sample([item for item in items if item not in left_out])
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]
    if number := config.getoption("--some-simulated"):
        further = further_cases(filter(_may_be_simulated, items))
        _ON_SIM.update(item.nodeid for item in set(further) - beyond_one_in(number, further))
