# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Packaging of torchrl_ext; tool settings are in pyproject.toml, exact tested versions in constraints.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def read_version() -> str:
    """Returns ``__version__`` without importing the package (torch may not be installed yet)."""
    source = (ROOT / "torchrl_ext" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    if match is None:
        raise RuntimeError('setup.py: torchrl_ext/__init__.py must have one line __version__ = "X.Y.Z".')
    return match.group(1)


EXTRAS = {
    # What the scripts in sota_implementations/ use.
    "sota": [
        # EnvPool 1.2.5, the first release with the next-step reset that EnvPoolEnv relies on, needs Python 3.11.
        'envpool>=1.2.5; python_version >= "3.11"',
        # Where EnvPool is missing, DMC tasks come from here.
        'dm-control>=1.0.20; python_version < "3.11"',
        "gymnasium>=1.0",
        "hydra-core>=1.3",
        "matplotlib>=3.8",
        'onnx>=1.17; python_version >= "3.11"',
        'onnxruntime>=1.20; python_version >= "3.11"',
        'onnxscript>=0.5; python_version >= "3.11"',
        "rich>=13",
        "tensorboard>=2.16",
        "tqdm>=4.66",
    ],
    "test": [
        "hypothesis>=6.100",
        # The notebooks of docs/notebooks are run.
        "ipykernel>=6.29",
        "nbclient>=0.10",
        "nbformat>=5.10",
        "pytest>=8",
        "pytest-cov>=5",
        "pytest-timeout>=2.3",  # first with --session-timeout
        "pytest-xdist>=3.6",
    ],
    "lint": [
        "mypy>=1.15",
        "pre-commit>=4",
        "pre-commit-hooks>=5",
        "ruff>=0.12",
    ],
    "docs": [
        "furo>=2024.8.6",
        "sphinx>=8.1",
    ],
    "bench": [
        "pytest>=8",
        "pytest-benchmark>=5",
    ],
}
EXTRAS["dev"] = sorted({requirement for extra in EXTRAS.values() for requirement in extra})

setup(
    name="torchrl_ext",
    version=read_version(),
    description="Replay, collectors and training scripts for asynchronous off-policy RL with TorchRL",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="torchrl_ext contributors",
    license="MIT",
    license_files=["LICENSE"],
    packages=find_packages(include=["torchrl_ext", "torchrl_ext.*"]),
    package_data={"torchrl_ext": ["py.typed"]},
    zip_safe=False,
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.11",
        "torchrl>=0.14.1,<0.16",
        "tensordict>=0.14,<0.16",
        "numpy",
        "cloudpickle",
        "nvidia-ml-py",
        "psutil",
    ],
    extras_require=EXTRAS,
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
