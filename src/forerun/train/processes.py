"""A run in one process or in many, as `torchrun` and `accelerate launch` start them."""

from __future__ import annotations

import atexit
import gc
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

GRACE = 0.2  # seconds for threads to let go


class Processes:
    """All processes of a run; this one is number `rank` of `count`, and the first one is `main`."""

    def __init__(self, device: torch.device) -> None:
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        self._device = device
        if self.count > 1 and not dist.is_initialized():
            if device.type == "cuda":
                torch.cuda.set_device(device)
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
            atexit.register(_leave)
        self.rank = dist.get_rank() if self.count > 1 else 0

    @property
    def main(self) -> bool:
        return self.rank == 0

    def wrap(self, module: nn.Module, shard: bool) -> nn.Module:
        """Average the gradients of all processes. shard: each keeps a part of the parameters only
        (FSDP); `accelerate launch --use_fsdp` asks for it, too.

        Passes must go through what this gives, and the optimiser be made of its parameters.
        """
        if self.count == 1:
            return module
        if shard or os.environ.get("ACCELERATE_USE_FSDP") == "true":
            fully_shard(module)
            return module
        return DistributedDataParallel(module, broadcast_buffers=False)

    def sum(self, values: Tensor) -> Tensor:
        """Over all processes."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def agree(self, number: int) -> int:
        """What the main process says."""
        if self.count == 1:
            return number
        said = torch.tensor(number, device=self._device)
        dist.broadcast(said, 0)
        return int(said)

    def wait(self) -> None:
        """Until all have come here."""
        if self.count > 1:
            dist.barrier()


def _leave() -> None:
    """Threads of a group that still hold tensors when the interpreter goes abort the process.

    FSDP keeps groups alive that were destroyed, so that their threads are waited for, too.
    """
    gc.collect()
    dist.destroy_process_group()
    time.sleep(GRACE)


def place(device: str) -> str:
    """Where this process puts its target: with several on a machine, each has its own GPU."""
    number = os.environ.get("LOCAL_RANK")
    if number is not None and device in ("auto", "cuda") and torch.cuda.is_available():
        return f"cuda:{number}"
    return device
