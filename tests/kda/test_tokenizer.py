"""Tokenizers: exact round trips, whole characters in a stream, clear errors."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from torch_kda.kda.tokenizer import Tokenizer

TEXT = "def f(x):\r\n\treturn 'naïve — 你好 😀'  # <|eos|>\x00"


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return Tokenizer.byte_level()


def test_byte_level(byte_level: Tokenizer):
    ids = byte_level.encode(TEXT)
    assert ids == list(TEXT.encode())  # one token a byte, special tokens' names included
    assert byte_level.decode(ids) == TEXT
    assert byte_level.vocab_size == 259
    assert byte_level.decode([256, 72, 105, 257, 258]) == "Hi"
    assert byte_level.encode("") == [] and byte_level.decode([]) == ""


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=24) | st.text(max_size=12).map(str.encode), st.randoms())
def test_stream_pieces_join(data: bytes, random):
    """Any bytes in any pieces: joined they are Python's and the library's own decoding."""
    tokenizer = Tokenizer.byte_level()
    stream, pieces, at = tokenizer.stream(), [], 0
    while at < len(data):
        size = random.randint(1, 5)
        pieces.append(stream.push(list(data[at : at + size])))
        at += size
    text = "".join(pieces) + stream.finish()
    assert text == data.decode(errors="replace") == tokenizer.decode_whole(list(data))


def test_stream_never_splits_a_character(byte_level: Tokenizer):
    stream = byte_level.stream()
    assert [stream.push([byte]) for byte in "é😀x".encode()] == ["", "é", "", "", "", "😀", "x"]
    assert stream.push([0xE4, 0xBD]) == ""
    assert stream.finish() == "\ufffd"


def test_from_folder(tmp_path: Path):
    """A trained byte-level BPE: merged tokens that end inside a character."""
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rust.train_from_iterator([TEXT] * 5 + ["你好你们好"] * 5, trainer)
    rust.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    ids = tokenizer.encode(TEXT)
    assert len(ids) < len(TEXT.encode())
    stream = tokenizer.stream()
    pieces = [stream.push([token]) for token in [*ids, 0]]
    assert "".join(pieces) + stream.finish() == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert tokenizer.encode("<|end|>") == [0]  # a chat template's tokens are tokens


def test_from_folder_byte_fallback(tmp_path: Path):
    """SentencePiece style: letters, a space mark, and bytes for the rest."""
    vocab = {"▁": 0, "a": 1, "b": 2, "<unk>": 3}
    vocab |= {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    rust = RustTokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    rust.normalizer = normalizers.Replace(" ", "▁")
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    rust.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    ids = tokenizer.encode("a 😀 bé")
    stream = tokenizer.stream()
    assert [stream.push([i]) for i in ids] == ["a", " ", "", "", "", "😀", " ", "b", "", "é"]
    assert tokenizer.decode(ids[:4]) == "a \ufffd\ufffd"


def test_from_folder_errors(tmp_path: Path):
    with pytest.raises(ValueError, match="no tokenizer.json in .*pass token ids"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(ValueError, match="cannot read .*tokenizer.json"):
        Tokenizer.from_folder(tmp_path)


def test_encode_invalid_text(byte_level: Tokenizer):
    with pytest.raises(ValueError, match="not valid Unicode"):
        byte_level.encode("\ud83d")
