"""The Triton kernels compile for sm_90 at real sizes, fit into it, and spill no more than allowed.

Needs no GPU: launches stop after compiling.
"""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the tests on CUDA compile them for the device", allow_module_level=True)

from torch_kda.ops.handover import Places  # noqa: E402
from torch_kda.ops.triton import (  # noqa: E402
    activations,
    conv,
    decode,
    experts,
    handover,
    latent_decode,
    latent_prefill,
    latents,
    norms,
    router,
)

SHARED_BYTES = 227 * 1024  # of a program on sm_90
# bytes of stack a thread, where more is alive than 255 registers hold
STACK_BYTES = {"_short_kernel": 384, "_part_kernel": 64}


class Sm90:
    """Stands in for a driver: says what to compile for."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture(name="compiled")
def _compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Name and binary of all that is launched."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    found: list[tuple[str, Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        found.append((self.__name__, run(self, *args, grid=grid, warmup=True, **kwargs)))

    monkeypatch.setattr(driver, "_active", Sm90())
    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(latent_prefill, "_expand", lambda x, w, _: bf16(len(x), len(w)))
    grouped = lambda x, w, offs: bf16(len(x), w.shape[2])  # noqa: E731
    monkeypatch.setattr(torch, "_grouped_mm", grouped)
    return found


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def run_decode(M: int, heads: int, groups: int, lower_bound: float | None) -> None:
    C, D = (2 * heads // groups + heads) * 128, 2
    decode.kda_decode(
        *(bf16(D * M, C), bf16(D * M, heads, 128), bf16(D * M, heads), bf16(D * M, heads, 128)),
        *(bf16(C, 4), torch.empty(heads), torch.empty(heads, 128), bf16(128)),
        *(torch.empty(4, heads, 128, 128), bf16(4, 3, C), int32(D), int32(D, M), int32(D)),
        **{"lower_bound": lower_bound, "scale": 0.1, "eps": 1e-5},
    )


def run_conv() -> None:
    x, weight, pool = bf16(64, 12480)[:, :12288], bf16(12288, 4), bf16(4, 3, 12288)
    conv.causal_conv_prefill(
        x, weight, pool, int32(4), int32(3), int32(3), int32(4), *[int32(5)] * 2
    )


def run_mla_decode(heads: int, P: int) -> None:
    table, pool = int32(2, 64), bf16(8, 64, 512 + P)
    latents.mla_store(bf16(9, 512 + P), pool, int32(9))
    numbers = {"scale": 0.1, "kv_lora_rank": 512, "num_tokens_per_row": 1}
    latent_decode.mla_decode(bf16(2, heads, 512 + P), pool, table, int32(2), **numbers)


def run_mla_prefill(K: int, P: int, V: int) -> None:
    tensors = (bf16(256, 2, K + P), bf16(8, 64, 512 + P), bf16(2 * (K + V), 512))
    lists = (int32(4), int32(3, 4), int32(3))
    latent_prefill.mla_prefill(*tensors, *lists, scale=0.1, v_head_dim=V)


def run_moe(M: int, few_choices: int) -> None:
    w13, w2, ids = bf16(64, 2048, 2304), bf16(64, 2304, 1024), int32(M, 8)
    options = {"num_shared": 1, "few_choices": few_choices}
    experts.moe(bf16(M, 2304), w13, w2, ids, torch.empty(M, 8), **options)


def run_rms_norm(size: int) -> None:
    x, weight = bf16(8, size + 64)[:, :size], bf16(size)
    norms.rms_norm(x, weight, eps=1e-5)
    norms.add_rms_norm(x, bf16(8, size), weight, eps=1e-5)


def run_moe_route(M: int, dtype: torch.dtype) -> None:
    x, weight = torch.empty(M, 2304, dtype=dtype), torch.empty(256, 2304)
    numbers = {"renormalize": True, "scaling_factor": 2.5}
    router.moe_route(x, weight, torch.empty(256), 8, **numbers)
    is_real = torch.ones(M, dtype=torch.bool)
    router.moe_route(x, weight, torch.empty(256), 8, is_real=is_real, **numbers)


def run_handover() -> None:
    state, tokens, posted = int32(2), torch.zeros(8, dtype=torch.int64), torch.zeros(2, 8)
    places = Places(256, 512, 64, 768, 832, 1024, num_rows=64, width=30, block_size=64)
    handover.fetch(int32(2, 4096), state, tokens, int32(4000), places)
    handover.post(tokens, state, posted.long())


CALLS: dict[str, Callable[[], object]] = {
    "decode": lambda: run_decode(1, 4, 1, -5.0),
    "decode-drafts": lambda: run_decode(4, 4, 2, None),
    "conv": run_conv,
    "norm": lambda: norms.gated_rms_norm(bf16(8, 32, 128), bf16(8, 32, 128), bf16(128), eps=1e-5),
    "mla_decode-12": lambda: run_mla_decode(12, 64),
    "mla_decode-32": lambda: run_mla_decode(32, 64),
    "mla_decode-glm": lambda: run_mla_decode(64, 0),
    "mla_prefill-kimi": lambda: run_mla_prefill(128, 64, 128),
    "mla_prefill-glm": lambda: run_mla_prefill(256, 0, 256),
    **{f"moe-few-{M}": lambda M=M: run_moe(M, 128) for M in (16, 150, 400, 1000)},
    "moe-fewest": lambda: run_moe(2, 128),
    "moe-many": lambda: run_moe(1100, 0),
    **{f"moe_route-{M}": lambda M=M: run_moe_route(M, torch.bfloat16) for M in (1, 64, 500, 8192)},
    "moe_route-fp32": lambda: run_moe_route(500, torch.float32),
    **{f"rms_norm-{size}": lambda size=size: run_rms_norm(size) for size in (512, 2304, 8192)},
    "silu_and_mul": lambda: activations.silu_and_mul(bf16(8, 2048)),
    "handover": run_handover,
    "sigmoid_mul": lambda: activations.sigmoid_mul(bf16(8, 1536), bf16(8, 3072)[:, 1536:]),
}


@pytest.mark.parametrize("name", CALLS)
def test_compiles_and_fits(name: str, compiled: list[tuple[str, Any]], tmp_path: Path) -> None:
    CALLS[name]()
    assert compiled
    for kernel, binary in compiled:
        shared = binary.metadata.shared
        assert shared <= SHARED_BYTES, f"{kernel}: {shared} bytes of shared memory"
        stack = stack_bytes(binary.asm["cubin"], tmp_path)
        assert stack <= STACK_BYTES.get(kernel, 0), f"{kernel}: {stack} bytes of stack"


def stack_bytes(cubin: bytes, folder: Path) -> int:
    """Local memory of a thread: registers that were spilled."""
    import triton.backends.nvidia

    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    command = [str(tool), "--dump-resource-usage", str(path)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = re.search(r"STACK:(\d+)", usage)
    assert match, usage
    return int(match[1])
