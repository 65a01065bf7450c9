"""Draws the tuning result."""

import io
from pathlib import Path
from typing import Any

from deepspeed_ext.errors import ConfigError, UnsupportedError
from deepspeed_ext.runtime.words import counted

__all__ = ["plot_format", "plot_result"]


def plot_format(path: str) -> str:
    """Return the picture format of a file name, lower case; PNG if it has no suffix. Call it before
    measuring.

    Raises:
        UnsupportedError: matplotlib is not installed.
        ConfigError: matplotlib cannot write the format of this ending.
    """
    try:
        import matplotlib  # noqa: F401
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise UnsupportedError(
            "--plot needs matplotlib; install it with: pip install 'deepspeed-ext[plots]'"
        ) from None
    ending = Path(path).suffix.removeprefix(".").lower() or "png"
    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if ending not in known:
        raise ConfigError(
            f"--plot {path!r}: the format {ending!r} is not supported; "
            f"use one of {', '.join(known)}"
        )
    return ending


def plot_result(result: dict[str, Any], format: str) -> bytes:
    """Draw bandwidth against cores, the chosen point, and the step time of PyTorch beside the
    optimizer."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    bandwidth, training = figure.subplots(1, 2, width_ratios=(3, 2))
    points = [point for point in result["points"] if point["gb_per_s"]]
    cores = [point["cores"] for point in points]
    values = [point["gb_per_s"] for point in points]
    errors = [point["gb_per_s"] * point["spread"] / 2 for point in points]
    bandwidth.errorbar(
        cores, values, yerr=errors, marker="o", capsize=3, label="median, interquartile range"
    )
    noisy = [point for point in points if point["noise"]]
    if noisy:
        noisy_cores = [point["cores"] for point in noisy]
        bandwidth.plot(
            noisy_cores,
            [point["gb_per_s"] for point in noisy],
            "o",
            mfc="white",
            zorder=5,
            label="noisy",
        )
    chosen = result["opt_cores_per_rank"]
    bandwidth.axvline(chosen, color="tab:green", linestyle="--", label=f"chosen: {chosen}")
    bandwidth.set(
        xlabel="optimizer cores per rank",
        ylabel="GB/s per rank",
        title=f"CPU Adam, {counted(result['ranks'], 'rank')}",
    )
    bandwidth.set_xlim(0, max(cores) + 1)
    bandwidth.set_ylim(0, 1.15 * max(values, default=1.0))
    bandwidth.xaxis.set_major_locator(MaxNLocator(integer=True))
    bandwidth.legend(fontsize=8)
    splits = result["training"]["splits"]
    labels = [
        "alone",
        *(f"{split['pytorch_cores']} + {split['optimizer_cores']}" for split in splits),
    ]
    times = [result["training"]["alone_seconds"], *(split["step_seconds"] for split in splits)]
    colours = [
        "tab:gray",
        *("tab:green" if split["optimizer_cores"] == chosen else "tab:blue" for split in splits),
    ]
    training.bar(labels, [seconds * 1e3 for seconds in times], color=colours)
    training.set(
        xlabel="PyTorch + optimizer cores",
        ylabel="ms per training step",
        title="PyTorch beside the optimizer",
    )
    content = io.BytesIO()
    figure.savefig(content, format=format, dpi=120)
    return content.getvalue()
