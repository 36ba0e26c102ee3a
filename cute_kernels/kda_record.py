"""The record that prepare makes of a 16-token tile and value head, and the scan reads.

    byte   what
    0      side 0, channels 0-63:   k~ | q~ | K2, bf16 [16 tokens, 64 channels] each
    6144   side 1, channels 64-127: k~ | q~ | K2
    12288  Mq2, bf16 [16 i, 16 j], as four 8 x 8 blocks of 128 bytes: (i // 8) * 2 + j // 8
    12800  Et, fp32 [128]

A tile's row is 128 bytes; its 16-byte chunk c lies at place c ^ (token & 7): the layout of wgmma's
128-byte swizzle, free of bank conflicts for ldmatrix, plain and transposed. Channel
16 p + 4 t + 2 b + e of a tile lies at place 16 p + 8 b + 2 t + e, so that a thread of the scan owns
four neighbouring channels of the state. Rows past the end of a sequence act as g = 0, k = q = 0.
"""

TILE = 16  # tokens
DIM = 128  # K = V
HALF_BYTES = TILE * DIM  # bf16 of one tile of one side
SIDE_BYTES = 3 * HALF_BYTES
K_DECAYED, Q_DECAYED, K_UPDATE = 0, HALF_BYTES, 2 * HALF_BYTES
MQ, ET = 2 * SIDE_BYTES, 2 * SIDE_BYTES + TILE * TILE * 2
RECORD_BYTES = ET + DIM * 4
