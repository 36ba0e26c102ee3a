"""Which states of a prefill are kept."""

import pytest
from torch_kda.cache.policy import Kind, checkpoint_positions, replay_boundary

# n, grid, draft KV, position; the first rows are those of vLLM's own tests
REPLAY_BOUNDARIES = [
    (8000, 1536, False, 7680),
    (7680, 1536, False, 6144),  # an exact multiple leaves its last token to compute
    (8000, 128, False, 7936),
    (8000, 1536, True, 6144),
    (8000, 128, True, 7808),
    (104, 32, True, 64),  # state@64, never state@96
    (1536, 1536, False, 0),
    (100, 8, True, 88),
    (16000, 16, True, 15984),
    (24576, 128, True, 24448),
    (24577, 128, True, 24448),
    (24577, 128, False, 24576),
    (1, 128, False, 0),
    (127, 128, True, 0),
]


@pytest.mark.parametrize(
    ("num_tokens", "unit", "draft", "expected"),
    REPLAY_BOUNDARIES,
    ids=[f"n{n}-u{u}-{'draft' if d else 'plain'}" for n, u, d, _ in REPLAY_BOUNDARIES],
)
def test_replay_boundary(num_tokens, unit, draft, expected):
    assert replay_boundary(num_tokens, unit, unit if draft else 0) == expected


@pytest.mark.parametrize("unit", [1, 2, 16, 128])
@pytest.mark.parametrize("drop", [False, True], ids=["plain", "draft"])
def test_replay_boundary_leaves_a_token(unit, drop):
    for num_tokens in range(1, 4 * unit + 2):
        position = replay_boundary(num_tokens, unit, unit if drop else 0)
        assert 0 <= position < num_tokens
        assert position % unit == 0
        # nothing deeper would do
        assert position + unit + (unit if drop else 1) > num_tokens


def test_checkpoint_positions_order():
    positions = checkpoint_positions(
        0, 1024, 128, junction=512, named=[700, 5, 130, 5000], every=256
    )
    assert positions == [
        (896, Kind.REPLAY),
        (1024, Kind.END),
        (512, Kind.JUNCTION),
        (640, Kind.NAMED),
        (128, Kind.NAMED),
        (768, Kind.PERIODIC),
        (256, Kind.PERIODIC),
    ]


def test_checkpoint_positions_above_start():
    assert checkpoint_positions(896, 1000, 128, junction=512, every=128) == []
    assert checkpoint_positions(768, 1000, 128, every=128) == [(896, Kind.REPLAY)]


def test_checkpoint_positions_with_draft_kv():
    # everything is one unit lower: neither the end nor what the caller names goes above the replay
    # boundary
    assert checkpoint_positions(0, 96, 32, drop=32, junction=96, named=[96]) == [(64, Kind.REPLAY)]
    assert checkpoint_positions(0, 104, 32, drop=32, named=[40]) == [
        (64, Kind.REPLAY),
        (32, Kind.NAMED),
    ]


@pytest.mark.parametrize("num_tokens", [1, 127, 128, 129, 255, 256, 257, 384])
def test_checkpoint_positions_around_the_grid(num_tokens):
    positions = dict(checkpoint_positions(0, num_tokens, 128))
    expected = {}
    if num_tokens > 128:
        expected[(num_tokens - 1) // 128 * 128] = Kind.REPLAY
    if num_tokens % 128 == 0:
        expected[num_tokens] = Kind.END
    assert positions == expected
