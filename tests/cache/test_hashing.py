"""Keys of units: a chain that tells apart whatever must not be shared."""

import subprocess
import sys
from array import array

import pytest
from torch_kda.cache.hashing import (
    Extras,
    Span,
    extend_keys,
    num_units,
    root_key,
)

ROOT = root_key(weights="w", unit=4)


def keys_of(tokens, unit=4, **options):
    keys = []
    extend_keys(keys, array("i", tokens), options.pop("root", ROOT), unit, **options)
    return keys


def test_extend_keys_is_a_chain():
    keys = keys_of(range(16))
    assert len(set(keys)) == 4
    assert keys_of(range(11)) == keys[:2]
    changed = [*range(4), 99, *range(5, 16)]
    assert keys_of(changed)[0] == keys[0]
    assert set(keys_of(changed)[1:]).isdisjoint(keys)


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_extend_keys_is_incremental(lookahead):
    keys, tokens = [], array("i")
    for token in range(23):
        tokens.append(token)
        extend_keys(keys, tokens, ROOT, 4, lookahead=lookahead)
        assert len(keys) == num_units(len(tokens), 4, lookahead)
        assert keys == keys_of(tokens, lookahead=lookahead)


def test_extend_keys_lookahead():
    """A key with lookahead names the tokens that draft-layer KV depends on, and no more."""
    keys = keys_of(range(12), lookahead=1)
    assert len(keys) == 2
    for position in range(12):
        changed = [99 if i == position else i for i in range(12)]
        same = [a == b for a, b in zip(keys, keys_of(changed, lookahead=1), strict=True)]
        assert same == [position > 4, position > 8]


def test_extend_keys_leaves_the_array_growable():
    tokens = array("i", range(8))
    extend_keys([], tokens, ROOT, 4)
    tokens.append(8)


DIFFERENT = {
    "plain": Extras(),
    "salt": Extras(salt="a"),
    "other salt": Extras(salt="b"),
    "lora name": Extras(lora_name="a"),
    "lora path": Extras(lora_path="a"),
    "lora both": Extras(lora_name="a", lora_path="a"),
    "image": Extras(spans=(Span(1, 2, b"x"),)),
    "other image": Extras(spans=(Span(1, 2, b"y"),)),
    "moved image": Extras(spans=(Span(2, 2, b"x"),)),
    "longer image": Extras(spans=(Span(1, 3, b"x"),)),
    "embeddings": Extras(spans=(Span(1, 2, b"x", kind="embeddings"),)),
    "two images": Extras(spans=(Span(1, 1, b"x"), Span(2, 1, b"x"))),
    "span called salt": Extras(spans=(Span(0, 4, b"a", kind="salt"),)),
}


def test_extend_keys_domains():
    """Salt, LoRA name and path, and each span's content, place and kind are told apart (I11)."""
    keys = {name: keys_of(range(8), extras=extras) for name, extras in DIFFERENT.items()}
    for depth in range(2):
        assert len({key[depth] for key in keys.values()}) == len(DIFFERENT)


def test_extend_keys_span_enters_where_it_begins():
    plain = keys_of(range(12))
    image = keys_of(range(12), extras=Extras(spans=(Span(5, 2, b"x"),)))
    assert image[0] == plain[0]
    assert image[1] != plain[1] and image[2] != plain[2]


def test_root_key_fields():
    base = dict(weights="w", kv_dtype="bfloat16", lower_bound=-5.0, unit=128, rank=0)
    roots = {root_key(**base)}
    for name, value in [
        ("weights", "v"),
        ("kv_dtype", "float8_e4m3fn"),
        ("lower_bound", None),
        ("lower_bound", -5),
        ("unit", 64),
        ("rank", 1),
        ("rank", "0"),
    ]:
        roots.add(root_key(**{**base, name: value}))
    assert len(roots) == 8
    assert keys_of(range(4), root=root_key(rank=0)) != keys_of(range(4), root=root_key(rank=1))


def test_keys_are_equal_across_processes():
    code = (
        "from array import array\n"
        "from torch_kda.cache.hashing import *\n"
        "keys = []\n"
        "root, extras = root_key(weights='w', unit=4), Extras(salt='s')\n"
        "extend_keys(keys, array('i', range(8)), root, 4, extras=extras)\n"
        "print(keys[-1].hex())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == keys_of(range(8), extras=Extras(salt="s"))[-1].hex()


def test_span_errors():
    with pytest.raises(ValueError, match="Span: start"):
        Span(-1, 2, b"")
