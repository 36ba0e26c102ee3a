"""The decode op of one KDA layer by itself."""

import torch

from ..kda.mixers import KDAMixer
from ..kda.runner import ModelRunner
from ..ops.kda import kda_decode
from .timing import l2_bytes, num_input_sets, time_calls


@torch.inference_mode()
def time_kda_decode(runner: ModelRunner, batch: int, *, rounds: int = 20) -> float:
    """Median time in us of a call on random rows whose states are not in the L2 cache."""
    mixer = next(module for module in runner.model.modules() if isinstance(module, KDAMixer))
    device, dtype = runner.device, mixer.in_proj.weight.dtype
    heads, dim = mixer.num_heads, mixer.head_dim
    channels = mixer.conv_weight.shape[0]
    free = torch.cuda.mem_get_info(device)[0] // 4
    sets = num_input_sets(batch * heads * dim * dim * 4, l2_bytes(device), free)
    states = torch.randn(sets * batch, heads, dim, dim, device=device)
    windows = torch.randn(sets * batch, 3, channels, device=device).to(dtype)
    calls = []
    for i in range(sets):
        slots = torch.arange(i * batch, (i + 1) * batch, device=device, dtype=torch.int32)
        qkv = torch.randn(batch, channels, device=device).to(dtype)
        g, gate = (torch.randn(batch, heads, dim, device=device).to(dtype) for _ in range(2))
        beta = torch.randn(batch, heads, device=device).to(dtype)
        arguments = (qkv, g, beta, gate, mixer.conv_weight, mixer.A_log, mixer.dt_bias)
        rest = (mixer.o_norm, states, windows, slots, slots[:, None])
        calls.append(
            lambda first=arguments, rest=rest: kda_decode(
                *first, *rest, lower_bound=mixer.lower_bound, eps=mixer.eps
            )
        )
    (timing,) = time_calls({"kda_decode": calls}, rounds=rounds).values()
    return timing.median_us
