"""Checksums of tensors: two sums over their bits as integers, the second weighted by position.

Equal tensors have equal checksums. Tensors that differ in a bit, or in the order of their elements, almost never have equal
checksums.
"""

import torch

Checksum = tuple[int, int]
NOTHING: Checksum = (0, 0)
"""The checksum of a tensor without values: on the meta device, or empty."""
CHUNK = 1 << 21
"""Integers that are summed at once: 16 MiB for each temporary tensor of 64-bit integers."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> Checksum:
    """Returns a checksum of a tensor's values; sums wrap around at 64 bits."""
    if tensor.is_meta or not tensor.numel():
        return NOTHING
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    integers = plain.detach().contiguous().view(-1).view(_INTEGERS[min(plain.element_size(), 4)])
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for number, chunk in enumerate(integers.split(CHUNK)):
        positions = torch.arange(1, chunk.numel() + 1, device=chunk.device) + number * CHUNK
        sums[0] += chunk.sum(dtype=torch.int64)
        sums[1] += (chunk * positions).sum()
    total, weighted_total = sums.tolist()
    return total, weighted_total
