"""Random weights that depend on a key alone: the same bits on a CPU and on a GPU, made in place."""

import hashlib
import math

import torch
from torch import Tensor

PIECE = 1 << 24  # elements made at once: bounds the scratch memory to a few hundred MB


def fill_uniform(x: Tensor, key: str, *, std: float) -> None:
    """Fill a contiguous tensor with uniform values of mean 0 and the given standard deviation."""
    flat = x.view(-1)
    bound = math.sqrt(3) * std
    for begin in range(0, flat.numel(), PIECE):
        piece = flat[begin : begin + PIECE]
        piece.copy_(_unit_uniform(piece.numel(), f"{key}/{begin}", x.device) * bound)


def fill_gate(A_log: Tensor, dt_bias: Tensor, key: str, lower_bound: float | None) -> None:
    """Fill a forget gate so that a token's log decay at rest is spread from 0.001 to about 1.

    The softplus gate gets the initialisation that KDA models are trained from: exp(A_log) uniform
    in [1, 16], softplus(dt_bias) log-uniform in [0.001, 0.1]. A bounded gate starts from the same
    decays with slopes exp(A_log) in [0.5, 2]; the softplus values would leave it without decay.
    """
    heads = _unit_uniform(A_log.numel(), f"{key}/A_log", "cpu").double().view(A_log.shape)
    channels = _unit_uniform(dt_bias.numel(), f"{key}/dt_bias", "cpu").double().view(dt_bias.shape)
    # softplus rate of each channel; expm1 keeps its inverse precise where it is small
    rate = torch.exp(math.log(1e-2) + channels * math.log(10))
    if lower_bound is None:
        slope = 8.5 + 7.5 * heads
        bias = rate + torch.log(-torch.expm1(-rate))
    else:
        slope = torch.exp2(heads)
        decay = (rate * 8.5 / -lower_bound).clamp(max=0.9)
        bias = torch.logit(decay) / slope[:, None]
    A_log.copy_(slope.log())
    dt_bias.copy_(bias)


def _unit_uniform(size: int, key: str, device: torch.device | str) -> Tensor:
    """[size] fp32 in (-1, 1): an integer hash of the position, so exact on every device."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    first, second = (int.from_bytes(digest[i : i + 4], "little", signed=True) for i in (0, 4))
    x = torch.arange(size, dtype=torch.int32, device=device)
    x = _mix(_mix(x ^ first) ^ second)
    return ((x >> 8).float() + 0.5) / 2**23


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32 bits that changes half of them for each input bit, on average.

    Constants: "lowbias32" of https://github.com/skeeto/hash-prospector. The masks turn torch's
    signed shifts into unsigned ones; products wrap.
    """
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x7FEB352D
    x = (x ^ (x >> 15 & 0x1FFFF)) * -0x7B935975
    return x ^ (x >> 16 & 0xFFFF)
