"""How tests compare tensors: with the error that plain torch makes, with a bound, or bit by bit."""

import torch
from torch import Tensor


def assert_close_as_torch(
    name: str, out: Tensor, ref_fp32: Tensor, out_torch: Tensor, *, roundings: int = 1
) -> None:
    """`out` is as near to the truth as twice the same maths in torch, in the same dtype.

    The floor is `roundings` roundings of the largest value to the dtype of `out`: as many as the
    maths has steps in that dtype, each of which torch may get exactly right by chance.
    """
    assert out.dtype == out_torch.dtype, f"{name}: {out.dtype} against {out_torch.dtype}"
    _assert_shape(name, out, ref_fp32)
    truth = ref_fp32.double().to(out.device)
    allowed = 2 * (out_torch.double() - truth).abs().max().item() if truth.numel() else 0.0
    floor = torch.finfo(out.dtype).eps * truth.abs().max().item() if truth.numel() else 0.0
    _assert_within(name, out, truth, max(allowed, roundings * floor))


def assert_rms(name: str, out: Tensor, truth: Tensor, bound: float) -> None:
    """The relative RMS error of `out`, over all of it, is at most `bound`."""
    _assert_shape(name, out, truth)
    truth = truth.double().to(out.device)
    error = (out.double() - truth).square().mean().sqrt().item()
    size = truth.square().mean().sqrt().item()
    # not "error > bound": a NaN must fail
    ok = error <= bound * size
    assert ok, f"{name}: relative RMS error {error / max(size, 1e-300):.3e}, allowed {bound:.1e}"


def assert_same(name: str, a: Tensor, b: Tensor) -> None:
    """Bit equal: NaN equals the same NaN, 0 differs from -0."""
    _assert_shape(name, a, b)
    assert a.dtype == b.dtype, f"{name}: {a.dtype} against {b.dtype}"
    bits_a, bits_b = (x.detach().cpu().contiguous().view(torch.uint8) for x in _at_least_1d(a, b))
    differs = (bits_a != bits_b).unflatten(-1, (-1, a.element_size())).any(-1)
    if differs.any():
        place = tuple(differs.nonzero()[0].tolist())
        a, b = _at_least_1d(a, b)
        share = differs.double().mean().item()
        raise AssertionError(
            f"{name}: {share:.2%} differ, first at {place}: {a[place].item()} and {b[place].item()}"
        )


def _assert_shape(name: str, a: Tensor, b: Tensor) -> None:
    assert a.shape == b.shape, f"{name}: {list(a.shape)} against {list(b.shape)}"


def _assert_within(name: str, out: Tensor, truth: Tensor, allowed: float) -> None:
    error = (out.double() - truth).abs().nan_to_num(nan=float("inf"))
    bad = error > allowed
    if bad.any():
        place = tuple(error.eq(error.max()).nonzero()[0].tolist())
        share = bad.double().mean().item()
        raise AssertionError(
            f"{name}: {share:.2%} off by more than {allowed:.3e}, worst at {place}: "
            f"{out[place].item()}, truth {truth[place].item()}"
        )


def _at_least_1d(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return torch.atleast_1d(a), torch.atleast_1d(b)
