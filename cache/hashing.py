"""Keys of prefixes: a chained sha256 for each unit of tokens, equal in all processes."""

import sys
from array import array
from dataclasses import dataclass
from hashlib import sha256


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of a prompt that stand for something else: an image, a sound, embeddings."""

    start: int  # first token position
    length: int  # tokens
    digest: bytes  # hash of the content
    kind: str = "multimodal"  # domain of the digest

    def __post_init__(self) -> None:
        if self.start < 0 or self.length < 1:
            raise ValueError(
                f"Span: start must be >= 0 and length >= 1, got {self.start} and {self.length}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What a prefix means beside its token ids."""

    salt: str = ""  # requests with different salts share nothing
    lora_name: str = ""
    lora_path: str = ""  # two adapters may have one name
    spans: tuple[Span, ...] = ()


NO_EXTRAS = Extras()


def root_key(**fields: str | int | float | bytes | None) -> bytes:
    """Key of the empty prefix: everything that makes two caches incompatible.

    The engine names weights, KV and state dtype, gate kind and bound, unit, layout version and
    tensor-parallel rank.
    """
    parts = [b"torch_kda root"]
    for name in sorted(fields):
        value = fields[name]
        # the type is part of the value: 1, 1.0 and "1" differ
        data = value if isinstance(value, bytes) else repr(value).encode()
        parts.append(_tagged(name, _tagged(type(value).__name__, data)))
    return sha256(b"".join(parts)).digest()


def num_units(num_tokens: int, unit: int, lookahead: int = 0) -> int:
    """How many keys `num_tokens` tokens have."""
    return max(num_tokens - lookahead, 0) // unit


def extend_keys(
    keys: list[bytes],
    token_ids: array,
    root: bytes,
    unit: int,
    *,
    lookahead: int = 0,
    extras: Extras = NO_EXTRAS,
) -> None:
    """Appends the keys of all units that `token_ids` fills and `keys` does not name yet.

    Key i names tokens [0, (i + 1) * unit + lookahead). `lookahead` is the number of following
    tokens that the cached KV depends on (draft layers), so that KV of another continuation is never
    found.

    Args:
        keys: keys made before from a prefix of the same tokens; extended in place.
        token_ids: array("i"), all tokens so far.
    """
    begin, end = len(keys), num_units(len(token_ids), unit, lookahead)
    if begin >= end:
        return
    if sys.byteorder == "big":
        token_ids = array("i", token_ids)
        token_ids.byteswap()
    width = token_ids.itemsize
    key = keys[-1] if keys else root
    plain = extras == NO_EXTRAS
    with memoryview(token_ids) as view, view.cast("B") as data:
        for i in range(begin, end):
            # the first window carries the lookahead, so later ones are shifted by it and overlap
            # nothing
            first = i * unit + lookahead if i else 0
            last = (i + 1) * unit + lookahead
            unit_bytes = data[first * width : last * width]
            suffix = b"" if plain else _extras_of(extras, i, first, last)
            key = sha256(b"".join((key, unit_bytes, suffix))).digest()
            keys.append(key)


def _extras_of(extras: Extras, i: int, first: int, last: int) -> bytes:
    parts = []
    if i == 0:  # chaining carries these into every later key
        for name, value in (
            ("salt", extras.salt),
            ("lora_name", extras.lora_name),
            ("lora_path", extras.lora_path),
        ):
            if value:
                parts.append(_tagged(name, value.encode()))
    for span in extras.spans:
        if span.start < last and first < span.start + span.length:
            # relative to the unit: the same picture at another place of the prompt is another
            # prefix
            place = f"{span.start - first}:{span.length}".encode()
            parts.append(_tagged(f"span:{span.kind}", _tagged("place", place) + span.digest))
    return b"".join(parts)


def _tagged(tag: str, data: bytes) -> bytes:
    name = tag.encode()
    return b"%d:%d:%b%b" % (len(name), len(data), name, data)
