"""Devices and meshes of the ranks of a numeric test."""

import torch
import torch.distributed as dist


def device():
    """This rank's device: its GPU if ranks compute on GPUs, otherwise the CPU."""
    return torch.device("cuda", dist.get_rank()) if torch.cuda.is_initialized() else torch.device("cpu")


def mesh(**axes):
    """A mesh over all ranks: axes by name, with their sizes."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device().type, tuple(axes.values()), mesh_dim_names=tuple(axes))
