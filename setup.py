"""Installation: ``pip install -e .[test] -c constraints.txt``."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
MKDOCS = "mkdocs>=1.6,<2"
PLOT = ["matplotlib>=3.9"]  # PNGs of schedules


def version() -> str:
    """The package's version, read without importing it."""
    source = (HERE / "puzzle_align" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'__version__ = "([^"]+)"', source)
    assert match is not None
    return match.group(1)


setup(
    name="puzzle-align",
    version=version(),
    description="A Megatron-style runtime that aligns large language models",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["puzzle_align", "puzzle_align.*"]),
    package_data={"puzzle_align.commands.report": ["page.css", "page.js"]},
    data_files=[
        (
            "share/puzzle-align/configs",
            sorted(str(path.relative_to(HERE)) for path in (HERE / "configs").glob("*.yaml")),
        )
    ],
    python_requires=">=3.11,<3.14",
    install_requires=[
        "torch>=2.8",
        # Its private names are used on CPU. pip takes 0.16.1 on Python 3.11, else 0.19.
        "megatron-core>=0.16.1,<0.20; platform_system == 'Linux'",
        "megatron-core~=0.16.1; platform_system != 'Linux'",
        # 0.19 imports it; torch for CUDA brings its own.
        "triton>=3.4; platform_system == 'Linux' and python_version >= '3.12'",
        "psutil>=5.9",  # Megatron-core saves checkpoints with it and does not ask for it
        "numpy>=1.26",
        "pyyaml>=6.0",
        "transformers>=4.52",  # Qwen3, render_jinja_template
        "tokenizers>=0.21",
        "datasets>=4.0",  # runs no code of a data set
        "safetensors>=0.4.3",
        "tensorboard>=2.16",
        "xxhash>=3.4",
    ],
    extras_require={
        "test": [
            "pytest>=8.0",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "ruff>=0.12",
            "pyright>=1.1.400",
            "import-linter>=2.3",
            "tqdm>=4.66",
            "triton>=3.4; platform_system == 'Linux'",  # torch for CUDA brings its own
            *PLOT,
            MKDOCS,
        ],
        "plot": PLOT,
        "docs": [MKDOCS, "mkdocs-material>=9.5,<10"],
        "peft": ["peft>=0.17"],  # of slow tests: tests/dist/test_lora*.py
        "gpu": [
            "torch>=2.11",
            # Megatron-core 0.16 goes with 2.9 to 2.11, 0.19 with 2.14 to 2.20 (see training.md).
            "transformer-engine[pytorch]>=2.9,<2.12; python_version < '3.12'",
            "transformer-engine[pytorch]>=2.9,<2.21; python_version >= '3.12'",
        ],
        "wandb": ["wandb>=0.17"],
    },
    entry_points={"console_scripts": ["puzzle-align = puzzle_align.cli.main:run"]},
)
