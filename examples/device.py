"""Where the examples run: on the machine's accelerators, on its CPU, or on the simulated device."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from accelerate import Accelerator


def options() -> argparse.Namespace:
    """The command line of every example."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20, help="where the run ends")
    parser.add_argument("--save", help="a checkpoint to make at the end")
    parser.add_argument("--resume", help="a checkpoint to go on from")
    parser.add_argument("--simulate", action="store_true", help="run on sidestep.testing.SimulatedDevice")
    return parser.parse_args()


@contextlib.contextmanager
def start(simulate: bool) -> Iterator[torch.device]:
    """A context in which the process is one of a group and has a device, which it yields.

    That is this process's accelerator, if the machine has any, and otherwise the CPU. With ``simulate`` it is a
    simulated one, so that state moves, and each rank's transfers come late in an order of their own.
    """
    accelerator = None if simulate else torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    else:
        device = torch.device(accelerator.type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device.index)
        dist.init_process_group(dist.get_default_backend_for_device(device), device_id=device)
    try:
        if simulate:
            from sidestep.testing import SimulatedDevice

            with SimulatedDevice(schedule="random", seed=dist.get_rank()) as simulated:
                yield simulated.address
        else:
            yield device
        dist.barrier()  # afterwards gloo's threads hold no tensors; they must not when Python ends
    finally:
        dist.destroy_process_group()


def accelerator_on(device: torch.device, **settings: Any) -> Accelerator:
    """Accelerate's ``Accelerator`` on this device.

    By itself Accelerate does not shard on a CPU, so there, and on a simulated device, it is told that it does.
    """
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedType

    if device.type != "cpu":
        return Accelerator(**settings)
    os.environ["ACCELERATE_TORCH_DEVICE"] = str(device)
    made = Accelerator(cpu=True, **settings)
    PartialState().distributed_type = made.state.distributed_type = DistributedType.FSDP
    made.state.fsdp_plugin = settings["fsdp_plugin"]
    made.state.fsdp_plugin.cpu_ram_efficient_loading = False  # `accelerate launch` sets it; weights would come to "cpu"
    return made
