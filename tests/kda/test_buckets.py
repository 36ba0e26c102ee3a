"""Sizes of steps: what is captured, in what order, and where a step goes."""

import pytest
from torch_kda.kda.buckets import MAX_MIXED_TOKENS, Buckets, Shape, exact_shape, sizes_up_to


def test_sizes_up_to():
    assert sizes_up_to(5, 2, 1) == (2, 3, 4, 5)
    assert sizes_up_to(1, 2, 1) == (2,)
    assert sizes_up_to(100, 16) == tuple(range(16, 113, 16))
    for sizes in (sizes_up_to(256, 2, 1), sizes_up_to(8192, 16)):
        assert all(b - a <= max(16, a / 8) for a, b in zip(sizes, sizes[1:], strict=False))
        assert len(sizes) < 70


def test_exact_shape():
    assert exact_shape(0, 0) == (0, 0)
    assert exact_shape(1, 0) == (2, 0)
    assert exact_shape(3, 17) == (3, 32)


@pytest.mark.parametrize("max_rows", [1, 2, 16, 64, 256])
@pytest.mark.parametrize("max_tokens", [16, 272, 8192])
def test_find(max_rows: int, max_tokens: int):
    """Every step within the limits gets the smallest shape that holds it, of its own kind."""
    buckets = Buckets.up_to(max_rows, max_tokens)
    shapes = buckets.shapes
    assert len(shapes) == len(set(shapes))
    for num_rows in range(max_rows + 1):
        for num_tokens in (0, 1, 16, 17, max_tokens // 2, max_tokens):
            if num_rows == num_tokens == 0 or num_tokens > max_tokens:
                continue
            fitting = [
                s
                for s in shapes
                if num_rows <= s.D
                and num_tokens <= s.T
                and (s.D > 0) == (num_rows > 0)
                and (s.T > 0) == (num_tokens > 0)
            ]
            found = buckets.find(num_rows, num_tokens)
            assert found == (min(fitting, key=sum) if fitting else None)
            # only long mixed steps have none
            if not (num_rows and num_tokens > min(MAX_MIXED_TOKENS, max_tokens)):
                assert found is not None


def test_find_above_the_largest():
    buckets = Buckets((2, 8), (32, 64))
    assert buckets.find(9, 0) is None and buckets.find(0, 65) is None
    assert buckets.find(3, 0) == Shape(8, 0) and buckets.find(0, 33) == Shape(0, 64)
    assert buckets.find(3, 33) == Shape(8, 64) and buckets.find(2, 5) == Shape(2, 32)
    assert Buckets().find(1, 0) is None and Buckets().shapes == []


def test_shapes_from_the_largest_down():
    sizes = [sum(shape) for shape in Buckets.up_to(64, 8192).shapes]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) < 150
