"""KV blocks as numbers."""

from collections.abc import Iterable


class BlockPool:
    """Free KV blocks. One that is not free has one owner: a request, or a node of the tree."""

    __slots__ = ("_free", "_is_free", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"BlockPool: num_blocks must be >= 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # taken from the end
        self._is_free = bytearray(b"\1" * num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks; the caller has made sure that they are there."""
        assert count <= len(self._free), f"{count=} free={len(self._free)}"
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        for block in taken:
            self._is_free[block] = 0
        return taken

    def release(self, blocks: Iterable[int]) -> None:
        """Gives blocks back that `allocate` gave out."""
        for block in blocks:
            assert not self._is_free[block], f"{block=} is free already"
            self._is_free[block] = 1
            self._free.append(block)

    def is_free(self, block: int) -> bool:
        """Whether nobody owns the block."""
        return bool(self._is_free[block])

    def check_integrity(self) -> None:
        """Asserts that the free list and the flags agree."""
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert sum(self._is_free) == len(self._free), "free list and flags differ"
        assert all(self._is_free[block] for block in self._free), "free list and flags differ"
