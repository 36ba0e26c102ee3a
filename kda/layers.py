"""The small modules: linear map, norm, dense MLP, mixture of experts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.activations import silu_and_mul
from ..ops.moe import moe, moe_route
from ..ops.norms import add_rms_norm, rms_norm


def empty_parameter(
    *shape: int, dtype: torch.dtype, device: torch.device | str | None = None
) -> nn.Parameter:
    """Memory for a weight of an inference-only model: no gradient, contents undefined."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class RMSNorm(nn.Module):
    """The op with its weight."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, eps=self.eps)

    def add(self, x: Tensor, change: Tensor | None) -> tuple[Tensor, Tensor]:
        """x + change and its norm; None: x is the sum already."""
        if change is None:
            return x, self(x)
        return add_rms_norm(x, change, self.weight, eps=self.eps)


class Linear(nn.Module):
    """x @ weight.T, without bias."""

    def __init__(self, in_size: int, out_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(out_size, in_size, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class GatedMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), gate and up in one matrix."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, dtype=dtype)
        self.down = Linear(intermediate_size, hidden_size, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu_and_mul(self.gate_up(x)))


class MoE(nn.Module):
    """Routed experts beside shared ones that see every token.

    The router is fp32: scores are sigmoids of its logits. Experts are chosen by score plus bias
    and weighted by the scores alone. The shared experts are the last ones of the weights.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        num_experts_per_token: int,
        num_shared_experts: int,
        renormalize: bool,
        scaling_factor: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.num_experts_per_token = num_experts_per_token
        self.num_shared_experts = num_shared_experts
        self.renormalize = renormalize
        self.scaling_factor = scaling_factor
        self.router = Linear(hidden_size, num_experts, dtype=torch.float32)
        self.choice_bias = empty_parameter(num_experts, dtype=torch.float32)
        count = num_experts + num_shared_experts
        self.w13 = empty_parameter(count, 2 * intermediate_size, hidden_size, dtype=dtype)
        self.w2 = empty_parameter(count, hidden_size, intermediate_size, dtype=dtype)

    def route(self, x: Tensor, is_real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Chosen experts [M, k] int32 and their weights [M, k] fp32."""
        return moe_route(
            *(x, self.router.weight, self.choice_bias, self.num_experts_per_token),
            renormalize=self.renormalize,
            scaling_factor=self.scaling_factor,
            is_real=is_real,
        )

    def forward(self, x: Tensor, is_real: Tensor | None = None) -> Tensor:
        """x [M, hidden] to [M, hidden]. Rows that are not real wake no expert; None: all are."""
        ids, weights = self.route(x, is_real)
        return moe(x, self.w13, self.w2, ids, weights, num_shared=self.num_shared_experts)
