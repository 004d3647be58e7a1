"""How state is encoded at rest: moments in bf16, rounded stochastically; masters as what their parameters lack.

Moments change by little in each step, often by less than half the distance between neighbours in bf16: rounded to the
nearest, they would stand still. Rounded up or down with the probability that keeps the mean, they follow on average.
Which way an element goes is a function of the key (seed, step, parameter, entry) and of the element's index, so that a
resumed run rounds as the one that was not interrupted, however the state is cut and wherever the update runs.
"""

from __future__ import annotations

import hashlib

import torch

from sidestep.chunks import CORRECTION, ENCODED


def key_of(*parts: object) -> int:
    """A number of 32 bits (signed) that depends on all of these."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True)


def decode(encoded: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values, exactly, in memory of their own."""
    return encoded.to(dtype)


def encode(values: torch.Tensor, key: int, start: int = 0, noise: torch.Tensor | None = None) -> torch.Tensor:
    """``values`` rounded stochastically to bf16; what bf16 can represent, and what is not finite, stays as it is.

    Args:
        values: a dense tensor in fp32, or in fp64, which is rounded to the nearest in fp32 first.
        key: of this tensor in this step.
        start: index of the first element, if it is a slice of the parameter's state.
        noise: what ``noise_on`` gives where the tensor is, for who encodes several.
    """
    noise = noise_on(values.device) if noise is None else noise
    values = values.to(torch.float32)
    flat = values.as_strided((values.numel(),), (1,), values.storage_offset())  # in the order of memory
    rounded = (flat.view(torch.int32) + random_bits(flat.numel(), key, start, noise)) & -0x10000
    finite = torch.where(torch.isfinite(flat), rounded.view(torch.float32), flat)
    encoded = torch.empty_strided(values.shape, values.stride(), dtype=ENCODED, device=values.device)
    encoded.as_strided((values.numel(),), (1,), 0).copy_(finite)
    return encoded


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An fp32 tensor as the nearest bf16 one, ties away from zero, and the lower 16 bits that undo the rounding.

    Of all ways to round to the nearest, it is the one of which 16 bits are enough to undo it.
    """
    bits = master.view(torch.int32)
    upper = ((bits + 0x8000) >> 16).masked_fill_(torch.isnan(master), 0x7FC0)
    return upper.to(torch.int16).view(torch.bfloat16), bits.to(CORRECTION)


def join(upper: torch.Tensor, correction: torch.Tensor) -> torch.Tensor:
    """The fp32 tensor that ``split`` has taken apart, in memory of its own.

    Somebody may have written another upper half since. Then it is one that rounds to that; to zero nothing rounds up,
    and from infinity nothing is left over, so that there the lower half counts for nothing.
    """
    high = upper.view(torch.int16).to(torch.int32)
    magnitude, is_rounded_up = high & 0x7FFF, correction < 0
    is_stale = ((magnitude == 0) & is_rounded_up) | ((magnitude == 0x7F80) & ~is_rounded_up)
    lower = correction.to(torch.int32).bitwise_and_(0xFFFF).masked_fill_(is_stale, 0)
    bits = (high << 16).sub_((lower & 0x8000) << 1)
    return bits.bitwise_or_(lower).view(torch.float32)


def correction_of(master: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
    """What ``upper``, which ``master`` was rounded to in some way, lacks of it: of a tie that went to even, nearly.

    What was rounded down is taken for the next smaller number, by a unit of fp32 in the last place.
    """
    correction = split(master)[1]
    is_truncated = (master.view(torch.int32) >> 16).to(torch.int16) == upper.view(torch.int16)
    return correction.masked_fill_((correction == -0x8000) & is_truncated, 0x7FFF)


PERIOD = 2**20
"""Of the noise: so many elements are rounded each in its own way. The key says where in it a tensor begins."""


def noise_on(device: torch.device) -> torch.Tensor:
    """16 random bits for each of ``PERIOD`` elements, (PERIOD,) int32, of which ``random_bits`` takes what it needs.

    The index is mixed by a bijection of 32-bit words, in the form "xor a shift, multiply, …"; the constants are those
    that Chris Wellons found by search for the least bias ("Prospecting for hash functions", 2018).
    """
    bits = torch.arange(PERIOD, dtype=torch.int32, device=device)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        bits.bitwise_xor_((bits >> shift).bitwise_and_(2 ** (32 - shift) - 1))
        bits.mul_(factor)
    return bits.bitwise_xor_(bits >> 16).bitwise_and_(0xFFFF)


def random_bits(count: int, key: int, start: int, noise: torch.Tensor) -> torch.Tensor:
    """16 random bits for each of the elements [start, start + count), (count,) int32; perhaps a view of ``noise``."""
    first = (start + key) % PERIOD
    if first + count <= PERIOD:
        return noise[first : first + count]
    whole, rest = divmod(first + count - PERIOD, PERIOD)
    return torch.cat([noise[first:], *[noise] * whole, noise[:rest]])
