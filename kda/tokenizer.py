"""Text to token ids and back: the built-in byte-level tokenizer and a model folder's own."""

import codecs
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers

BYTE_SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>")  # ids 256, 257, 258, after the 256 bytes


def _byte_letters() -> list[str]:
    """The printable letter by which byte-level vocabularies write each byte, in byte order."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = {ord(letter) for letter in letters if ord(letter) < 256}
    spare = (letter for letter in letters if ord(letter) >= 256)
    return [chr(byte) if byte in printable else next(spare) for byte in range(256)]


_BYTE_OF = {letter: byte for byte, letter in enumerate(_byte_letters())}


class Tokenizer:
    """Encodes prompts and decodes outputs; `stream` decodes in pieces that cut no character."""

    def __init__(self, rust: RustTokenizer) -> None:
        self._rust = rust
        self.vocab_size = rust.get_vocab_size(with_added_tokens=True)
        self._special_ids = frozenset(
            index for index, token in rust.get_added_tokens_decoder().items() if token.special
        )
        self._bytes: dict[int, bytes] = {}  # of the tokens that were asked for
        self._is_byte_level = '"ByteLevel"' in json.dumps(json.loads(rust.to_str())["decoder"])

    @classmethod
    def byte_level(cls) -> "Tokenizer":
        """One token a byte (id = byte), then bos 256, eos 257, pad 258. Needs no file."""
        rust = RustTokenizer(
            models.BPE(vocab={x: i for i, x in enumerate(_byte_letters())}, merges=[])
        )
        rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        rust.decoder = decoders.ByteLevel()
        rust.add_special_tokens(list(BYTE_SPECIALS))
        # text is data here: "<|eos|>" in a prompt stays seven bytes
        rust.encode_special_tokens = True
        return cls(rust)

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """The `tokenizer.json` of a model folder.

        Raises:
            ValueError: there is no such file, or it cannot be read as a tokenizer.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ValueError(
                f"Tokenizer: no tokenizer.json in {folder}; "
                "pass token ids instead of text, or convert the model's tokenizer to that format"
            )
        try:
            rust = RustTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for a bad file
            raise ValueError(f"Tokenizer: cannot read {path}: {error}") from error
        return cls(rust)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Raises ValueError if it holds half a surrogate pair."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"Tokenizer: text is not valid Unicode: {error}") from error
        return self._rust.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out; bytes that are no UTF-8 become U+FFFD."""
        stream = self.stream()
        return stream.push(token_ids) + stream.finish()

    def stream(self) -> "TokenStream":
        """A decoder for one output that arrives in pieces."""
        return _ByteStream(self) if self._is_byte_level else _WindowStream(self)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token of a byte-level vocabulary; empty for special and unknown ids."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._read_bytes(token_id)
        return found

    def _read_bytes(self, token_id: int) -> bytes:
        token = self._rust.id_to_token(token_id)
        if token is None or token_id in self._special_ids:
            return b""
        if all(letter in _BYTE_OF for letter in token):
            return bytes(_BYTE_OF[letter] for letter in token)
        return token.encode()  # an added token, stored as plain text

    def decode_whole(self, token_ids: Sequence[int]) -> str:
        """The library's own decoding, all ids at once."""
        return self._rust.decode(list(token_ids), skip_special_tokens=True)


class TokenStream(Protocol):
    """Decodes one output piece by piece; the pieces joined are the text."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete. A character cut in two waits for its other half."""
        ...

    def finish(self) -> str:
        """What still waited when the output ended: U+FFFD for a character that never came."""
        ...


class _ByteStream:
    """Byte-level vocabularies: tokens are bytes, so the standard incremental decoder is exact."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, token_ids)))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream:
    """Any other vocabulary: decode the last tokens with and without the new ones, and compare."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # the piece before: what its neighbour does to spaces
        self._pending: list[int] = []  # tokens whose text has not been given out

    def push(self, token_ids: Sequence[int]) -> str:
        self._pending += token_ids
        text = self._text()
        # U+FFFD at the end: most likely a character of which some bytes are still to come
        if text.endswith("\ufffd"):
            return ""
        if text:
            self._context, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        text, self._pending = self._text(), []
        return text

    def _text(self) -> str:
        before = self._tokenizer.decode_whole(self._context)
        return self._tokenizer.decode_whole(self._context + self._pending)[len(before) :]
