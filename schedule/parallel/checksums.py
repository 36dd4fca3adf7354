"""Checksums of tensors: two sums over their words, the second weighted by position.

Equal tensors have equal checksums. Tensors that differ by a bit, or in the order of their elements, practically never do.
"""

import torch

Checksum = tuple[int, int]
NOTHING: Checksum = (0, 0)
"""The checksum of a tensor without values: on the meta device, or empty."""
CHUNK = 1 << 21
"""Words that are summed at once, to keep temporary memory small."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> Checksum:
    """Returns a checksum of a tensor's values; sums wrap around at 64 bits."""
    if tensor.is_meta or not tensor.numel():
        return NOTHING
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    words = plain.detach().contiguous().view(-1).view(_WORDS[min(plain.element_size(), 4)])
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for number, part in enumerate(words.split(CHUNK)):
        places = torch.arange(1, part.numel() + 1, device=part.device) + number * CHUNK
        sums[0] += part.sum(dtype=torch.int64)
        sums[1] += (part * places).sum()
    first, second = sums.tolist()
    return first, second
