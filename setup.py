"""Package metadata of deepspeed_ext; tool settings are in pyproject.toml."""

import re
import runpy
from pathlib import Path

from setuptools import Extension, find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "deepspeed_ext" / "_version.py").read_text(), re.MULTILINE)[1]

KERNEL = Path("deepspeed_ext/zenflow/kernel")
# Passes over host memory. Optional: without a compiler the package installs all the same and torch does the work.
NATIVE_KERNEL = Extension(
    "deepspeed_ext.zenflow.kernel._adam_pass",
    sources=sorted(str(KERNEL / path.name) for path in (ROOT / KERNEL).glob("*.cpp")),
    depends=sorted(str(KERNEL / path.name) for path in (ROOT / KERNEL).glob("*.h")),
    extra_compile_args=list(runpy.run_path(str(ROOT / KERNEL / "compile_flags.py"))["COMPILE_FLAGS"]),
    extra_link_args=["-fopenmp"],
    optional=True,
)

# The site of the manual, which `make check` builds.
SITE = ["mkdocs>=1.6", "mkdocs-material>=9.5.20"]

setup(
    name="deepspeed-ext",
    version=VERSION,
    description="Offload and ZeRO extensions for DeepSpeed: tiered flattening, single-parameter all-gather, "
    "an overlapped optimizer process and automatic CPU core separation",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.14",
    packages=find_packages(include=["deepspeed_ext", "deepspeed_ext.*"]),
    package_data={"deepspeed_ext": ["py.typed", "zenflow/kernel/*.cpp", "zenflow/kernel/*.h"]},
    ext_modules=[NATIVE_KERNEL],
    install_requires=[
        "torch>=2.6",
        "deepspeed>=0.19.8,<0.20",
        "psutil>=5.9",
        "pydantic>=2.5",
        "tqdm",
    ],
    extras_require={
        "transformers": ["transformers>=4.45", "accelerate>=1.0"],
        "plots": ["matplotlib"],
        "trainers": ["peft>=0.21.2"],
        "docs": SITE,
        "dev": [
            *SITE,
            "pytest>=8",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "mypy",
            "types-psutil",
            "types-tqdm",
        ],
    },
    entry_points={"console_scripts": ["deepspeed-ext = deepspeed_ext.cli:main"]},
)
