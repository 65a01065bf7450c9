"""Package metadata of deepspeed_ext; tool settings are in pyproject.toml."""

import copy
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.modified import newer_group

ROOT = Path(__file__).parent
VERSION = re.search(
    r'^__version__ = "(.+)"$', (ROOT / "deepspeed_ext" / "__init__.py").read_text(), re.MULTILINE
)[1]

KERNEL = Path("deepspeed_ext/zenflow/worker/kernel")
# Passes over host memory. Optional: without a compiler the
# package installs all the same and torch does the work.
NATIVE_KERNEL = Extension(
    "deepspeed_ext.zenflow.worker.kernel._adam_pass",
    sources=sorted(str(KERNEL / path.name) for path in (ROOT / KERNEL).glob("*.cpp")),
    depends=sorted(str(KERNEL / path.name) for path in (ROOT / KERNEL).glob("*.h")),
    # Whatever Python itself was compiled with: nothing
    # that debugs, and nothing that other CPUs lack.
    # No -ffast-math: results must equal the reference's, up to rounding. No -march: the library
    # must load on every CPU of the architecture, and picks instructions when it is loaded.
    extra_compile_args=[
        *("-O3", "-std=c++17", "-fPIC", "-pthread", "-fno-math-errno", "-fno-trapping-math"),
        "-g0",
    ],
    extra_link_args=["-pthread"],
    language="c++",
    optional=True,
)


class BuildKernel(build_ext):
    """Builds a library that ctypes loads: no version of Python in its name, because it uses nothing
    of Python."""

    def build_extension(self, ext: Extension) -> None:
        """Compile the files beside each other, because one after the other takes twice as long on
        two cores, and link them."""
        library = self.get_ext_fullpath(ext.name)
        if self.force or newer_group([*ext.sources, *ext.depends], library, "newer"):
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = [*pool.map(lambda source: self.compile_one(ext, source), ext.sources)]
            ext = copy.copy(ext)
            ext.sources, ext.extra_objects, ext.depends = [], objects, objects
        super().build_extension(ext)

    def compile_one(self, ext: Extension, source: str) -> str:
        """Compile a file and return the path of its object."""
        (compiled,) = self.compiler.compile(
            [source], output_dir=self.build_temp, extra_postargs=ext.extra_compile_args
        )
        return compiled

    def get_ext_filename(self, fullname: str) -> str:
        """Return the library's path, relative to the packages."""
        return "/".join(fullname.split(".")) + ".so"


class WithConfigs(build_py):
    """Puts the ready configs, which are beside the package, into it
    (deepspeed_ext/commands/main.py)."""

    def run(self) -> None:
        """Copy the package, then the configs, to where an earlier build has left nothing: a module
        that is gone, and was installed again, would hide a new one of its name."""
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib, "deepspeed_ext"), ignore_errors=True)
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib, "deepspeed_ext", "configs")
            self.mkpath(str(folder))
            for path in (ROOT / "configs").glob("*.json"):
                self.copy_file(str(path), str(folder / path.name))


class PlatformWheel(bdist_wheel):
    """A wheel for every Python, and for every platform if there was no compiler."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of Python, ABI and platform."""
        platform = super().get_tag()[2]
        built = all(
            Path(path).exists() for path in self.get_finalized_command("build_ext").get_outputs()
        )
        return "py3", "none", platform if built else "any"


# The site of the manual, which `make check` builds.
SITE = ["mkdocs>=1.6", "mkdocs-material>=9.5.20"]

setup(
    name="deepspeed-ext",
    version=VERSION,
    description="Offload and ZeRO extensions for DeepSpeed: tiered flattening, single-parameter "
    "all-gather, an overlapped optimizer process and automatic CPU core separation",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    keywords="deepspeed zero zenflow offload optimizer training pytorch",
    # When this project has public addresses, they belong here: the checklist in CONTRIBUTING.md.
    project_urls={"DeepSpeed": "https://github.com/deepspeedai/DeepSpeed"},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C++",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 15)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.10,<3.15",
    packages=find_packages(include=["deepspeed_ext", "deepspeed_ext.*"]),
    package_data={
        "deepspeed_ext": [
            "py.typed",
            "adapter/contract.json",
            "commands/memory/known.json",
            "adapter/*.json",
            "zenflow/worker/kernel/*.cpp",
            "zenflow/worker/kernel/*.h",
        ]
    },
    ext_modules=[NATIVE_KERNEL],
    cmdclass={"build_ext": BuildKernel, "build_py": WithConfigs, "bdist_wheel": PlatformWheel},
    install_requires=[
        "torch>=2.6",
        "deepspeed>=0.19.6,<0.20",
        "hjson",
        "psutil>=5.9",
        "pydantic>=2.5",
        "tqdm",
    ],
    extras_require={
        "transformers": ["transformers>=4.48.3,<6", "accelerate>=1.3,<2"],
        "plots": ["matplotlib"],
        "docs": SITE,
        # The lowest versions that `make test-trainers` has run with. TRL needs Python 3.11.
        "trainers": [
            "peft>=0.21.2",
            "trl>=1.16.0; python_version >= '3.11'",
            "datasets>=5.2.0",
            "lightning>=2.6.6",
            "ray[train]>=2.60.0",
        ],
        "dev": [
            *SITE,
            "pytest>=8",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "triton>=3.2; sys_platform == 'linux'",
            # Exact, since a new release of them finds faults in files that nobody has changed.
            "ruff==0.17.6",
            "mypy==2.4.1",
            "types-psutil==7.2.2.20261111",
            "types-tqdm==4.70.0.20261106",
            # Of `make test-mutants`.
            "cosmic-ray>=8.7",
            "coverage>=7",
        ],
    },
    entry_points={
        "console_scripts": ["deepspeed-ext = deepspeed_ext.commands.main:main"],
        # torch calls it when it is imported
        "torch.backends": ["deepspeed_ext = deepspeed_ext.autoload:autoload"],
    },
)
