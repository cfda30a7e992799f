"""Two processes on one machine do what one process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import distributed_run
from forerun.train.state import PROVENANCE
from tiny import tiny_folder

WORKER = Path(distributed_run.__file__)


def start_two(model: Path, folder: Path, kind: str, **environment: str) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    paths = [str(WORKER.parent), *sys.path]
    known = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(WORKER), str(model), str(folder), kind]
    done = subprocess.run(command, env={**known, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "medusa2"])
@pytest.mark.parametrize("wrapped", ["ddp", "fsdp"])
def test_two_processes_learn_what_one_does(tmp_path: Path, wrapped: str, kind: str) -> None:
    model = tiny_folder(tmp_path / "target", layers=4, seed=1)
    distributed_run.main(str(model), str(tmp_path / "one"), kind)
    fsdp = {"ACCELERATE_USE_FSDP": "true"} if wrapped == "fsdp" else {}
    start_two(model, tmp_path / "two", kind, **fsdp)
    curves = [
        torch.tensor(json.loads((tmp_path / name / PROVENANCE).read_text())["curve"])
        for name in ("one", "two")
    ]
    assert curves[0][-1] < curves[0][0]
    assert torch.allclose(curves[0], curves[1], atol=1e-4)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.allclose(tensor, two[name], atol=1e-4), name
