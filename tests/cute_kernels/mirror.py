"""The prefill kernels in PyTorch, stage by stage and with the kernels' own rounding; runs anywhere.

A record is what prepare hands to the scan for one (tile of 16 tokens, value head). fp32 unless
said, so that a kernel differs by the order of its sums and its approximate exponentials only.
"""

import math
from dataclasses import dataclass, fields
from itertools import pairwise

import torch
from torch import Tensor

TILE = 16
DIM = 128
RECORD_BYTES = 13312
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Records:
    """Fields of the records of n tiles and HV heads; bf16 but for `et`."""

    k_decayed: Tensor  # [n, HV, 16, 128]
    q_decayed: Tensor  # [n, HV, 16, 128]
    k_update: Tensor  # [n, HV, 16, 128]
    mq: Tensor  # [n, HV, 16, 16]
    et: Tensor  # [n, HV, 128] fp32

    def items(self) -> list[tuple[str, Tensor]]:
        return [(field.name, getattr(self, field.name)) for field in fields(self)]


def order_sequences(cu_seqlens: list[int]) -> Tensor:
    """[N, 4] int32, longest first by classes: sequence, first row, length, first tile."""
    table = [
        (n, start, end - start, start // TILE + n)
        for n, (start, end) in enumerate(pairwise(cu_seqlens))
    ]
    table.sort(key=lambda entry: -_length_class(entry[2]))
    return torch.tensor(table, dtype=torch.int32)


def _length_class(length: int) -> int:
    """Two classes for each power of two of the number of tiles; 31 is the last."""
    tiles = -(-length // TILE)
    if tiles < 2:
        return tiles
    octave = tiles.bit_length() - 1
    return min(2 * octave + (tiles >> octave - 1 & 1), 31)


def find_tiles(cu_seqlens: list[int], num_tokens: int) -> Tensor:
    """[TC, 2] int32 by tile number: first row and rows, minus rows where they are of no sequence.

    Tiles that no one needs have none.
    """
    start = torch.tensor(cu_seqlens)
    N = start.shape[0] - 1
    number = start // TILE + torch.arange(N + 1)
    tile = torch.arange(-(-num_tokens // TILE) + N)
    n = torch.searchsorted(number, tile, right=True) - 1
    first = start[n] + (tile - number[n]) * TILE
    end = torch.where(n < N, start[(n + 1).clamp(max=N)], num_tokens)
    rows = (end - first).clamp(0, TILE)
    return torch.stack([first, torch.where(n < N, rows, -rows)], dim=1).int()


def kda_prepare_mirror(
    q: Tensor,
    k: Tensor,
    g_raw: Tensor,
    beta_logit: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    tiles: Tensor,
    *,
    lower_bound: float | None,
    scale: float,
) -> Records:
    """Records of `find_tiles`; inputs as `kda_prefill` takes them."""
    first = tiles[:, :1].long().clamp(max=q.shape[0] - 1)
    is_row = torch.arange(TILE) < tiles[:, 1:]
    token = torch.where(is_row, first + torch.arange(TILE), first)
    H, HV = q.shape[1], g_raw.shape[1]

    def rows(x: Tensor) -> Tensor:
        """[T, heads, ..] -> [n, HV, 16, ..] fp32, zero past the end of a sequence."""
        x = x.repeat_interleave(HV // x.shape[1], dim=1)[token].float()
        return torch.where(is_row.view(*is_row.shape, *[1] * (x.ndim - 2)), x, 0.0).movedim(2, 1)

    assert HV % H == 0, f"{HV=} {H=}"
    g = torch.where(is_row[:, None, :, None], _gate(rows(g_raw), A_log, dt_bias, lower_bound), 0.0)
    beta = torch.where(is_row[:, None], rows(beta_logit).sigmoid(), 0.0)
    k_raw, q_raw = rows(k), rows(q)
    k_norm, q_norm = _norm(k_raw), _norm(q_raw) * scale
    kn, qn = k_raw * k_norm, q_raw * q_norm
    to_row = _sum_from(g, TILE)  # G
    after_row = _sum_after(g, TILE)  # G_last - G
    k_decayed, q_decayed = _bf16(kn * to_row.exp2()), _bf16(qn * to_row.exp2())
    if lower_bound is None:
        L, M = _scores_by_level(k_raw, q_raw, g)
        L = L * k_norm * k_norm.mT
        M = M * q_norm * k_norm.mT
        M = M + torch.diag_embed((k_raw * q_raw).sum(-1) * (k_norm * q_norm)[..., 0])
        k_r = kn * after_row.exp2()
    else:
        k_inv = kn * (-to_row).exp2()
        L, M = k_decayed @ _bf16(k_inv).mT, q_decayed @ _bf16(k_inv).mT
        k_r = k_inv * to_row[..., -1:, :].exp2()
    L, M = torch.tril(L * beta[..., None], -1), torch.tril(M)
    eye = torch.eye(TILE).expand_as(L)
    A = torch.linalg.solve_triangular(eye + L, eye, upper=False, unitriangular=True)
    A = A * beta[..., None, :]
    k_update, mq, et = A.mT @ k_r, M @ A, to_row[..., -1, :].exp2()
    return Records(
        k_decayed.bfloat16(), q_decayed.bfloat16(), k_update.bfloat16(), mq.bfloat16(), et
    )


def _bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def _norm(x: Tensor) -> Tensor:
    return (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _gate(x: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """log2(e) times the log decay, from [n, HV, 16, 128]."""
    a, bias = A_log.exp()[:, None, None], dt_bias[:, None]
    if lower_bound is not None:
        return lower_bound * LOG2E * (a * (x + bias)).sigmoid()
    x = x + bias
    return -a * (x.relu() + (-x.abs()).exp().log1p()) * LOG2E


def _sum_from(g: Tensor, s: int) -> Tensor:
    """Sum of the rows of a row's block of s, up to the row."""
    return g.unflatten(-2, (-1, s)).cumsum(-2).flatten(-3, -2)


def _sum_after(g: Tensor, s: int) -> Tensor:
    """Sum of the rows of a row's block of s, after the row."""
    blocks = g.unflatten(-2, (-1, s))
    later = torch.cat([blocks[..., 1:, :], torch.zeros_like(blocks[..., :1, :])], dim=-2)
    return later.flip(-2).cumsum(-2).flip(-2).flatten(-3, -2)


def _scores_by_level(k: Tensor, q: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """<k_i, k_j> and <q_i, k_j> decayed from j to i, for i > j: no exponent is positive."""
    token = torch.arange(TILE)
    L, M = k.new_zeros(2, *k.shape[:-1], TILE)
    for s in (1, 2, 4, 8):
        is_odd = (token // s) % 2 == 1
        factor = _bf16(torch.where(is_odd[:, None], _sum_from(g, s), _sum_after(g, s)).exp2())
        left, right = _bf16(k * factor), _bf16(q * factor)
        sibling = is_odd[:, None] & (token[:, None] // s == token // s + 1)
        L = torch.where(sibling, left @ left.mT, L)
        M = torch.where(sibling, right @ left.mT, M)
    return L, M


def kda_scan_mirror(
    records: Records,
    v: Tensor,
    sequences: Tensor,
    states: Tensor,
    checkpoints: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor, dict[tuple[int, int], Tensor]]:
    """o [T, HV, 128] bf16, final states [N, HV, 128, 128], and the states at the checkpoints.

    `states` are the initial ones, [N, HV, 128, 128], `sequences` from `order_sequences`. Offsets in
    `checkpoints` are wanted of every sequence; keys of the result are (sequence, offset).
    """
    o = torch.zeros_like(v)
    final, kept = states.clone(), {}
    for n, first, length, tile0 in sequences.tolist():
        S = states[n]
        for step, start in enumerate(range(0, length, TILE)):
            at = slice(first + start, first + min(start + TILE, length))
            tile = v.new_zeros(TILE, *v.shape[1:])
            tile[: at.stop - at.start] = v[at]
            record = {name: x[tile0 + step].float() for name, x in records.items()}
            shadow = _bf16(S)
            R = _bf16(tile.float().movedim(0, 1) - record["k_decayed"] @ shadow.mT)
            out = record["q_decayed"] @ shadow.mT + record["mq"] @ R
            o[at] = out.bfloat16().movedim(0, 1)[: at.stop - at.start]
            S = S * record["et"][:, None, :] + R.mT @ record["k_update"]
            if start + TILE <= length and start + TILE in checkpoints:
                kept[n, start + TILE] = S.clone()
        final[n] = S
    return o, final, kept


def _places() -> Tensor:
    """Byte offset of each [token, channel] in a bf16 tile of a record."""
    token = torch.arange(TILE)[:, None]
    channel = torch.arange(DIM)
    p, t, b, e = channel // 16, channel % 16 // 4, channel % 4 // 2, channel % 2
    at = 16 * p + 8 * b + 2 * t + e
    return at // 64 * 6144 + token * 128 + (at % 64 // 8 ^ token % 8) * 16 + at % 8 * 2


def _mq_places() -> Tensor:
    i, j = torch.arange(TILE)[:, None], torch.arange(TILE)
    return (i // 8 * 2 + j // 8) * 128 + i % 8 * 16 + j % 8 * 2


def pack_records(records: Records) -> Tensor:
    """The byte image, [n * HV, 13312] uint8."""
    flat = {name: x.flatten(0, 1) for name, x in records.items()}
    num = flat["et"].shape[0]
    out = torch.empty(num, RECORD_BYTES, dtype=torch.uint8)
    words = out.view(torch.bfloat16)
    tiles = ("k_decayed", "q_decayed", "k_update")
    for i, name in enumerate(tiles):
        words[:, ((2048 * i + _places()) // 2).flatten()] = flat[name].flatten(1)
    words[:, ((12288 + _mq_places()) // 2).flatten()] = flat["mq"].flatten(1)
    out[:, 12800:] = flat["et"].contiguous().view(torch.uint8)
    return out


def unpack_records(image: Tensor, num_heads: int) -> Records:
    """`pack_records` backwards."""
    words = image.view(torch.bfloat16)
    shape = (-1, num_heads)
    k, q, k2 = (words[:, (2048 * i + _places()) // 2].unflatten(0, shape) for i in range(3))
    mq = words[:, (12288 + _mq_places()) // 2].unflatten(0, shape)
    et = image[:, 12800:].contiguous().view(torch.float32).unflatten(0, shape)
    return Records(k, q, k2, mq, et)
