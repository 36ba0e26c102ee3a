"""The front door of a Python program: a model that answers prompts."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ..scheduler.request import SamplingParams
from .build import build_engine, load_model
from .config import EngineConfig, ModelConfig
from .engine import RequestUpdate
from .presets import PRESETS, model_preset
from .runner import ModelRunner, TokenLogprobs
from .tokenizer import Tokenizer
from .weights import load_config

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompt, found in the cache


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The answer to one prompt."""

    text: str  # "" for a model without a tokenizer
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None  # one a token; None if not asked for
    finish_reason: str  # "stop", "length" or "error"
    error: str | None  # what went wrong, with finish_reason "error"
    usage: Usage


@dataclass(slots=True)
class _Answer:
    num_prompt_tokens: int
    wants_logprobs: bool
    updates: list[RequestUpdate] = field(default_factory=list)

    def output(self) -> RequestOutput:
        last = self.updates[-1]
        assert last.finish_reason is not None, f"{last.request_id} is not finished"
        token_ids = [token for update in self.updates for token in update.token_ids]
        logprobs = [item for update in self.updates for item in update.logprobs]
        return RequestOutput(
            text="".join(update.text for update in self.updates),
            token_ids=token_ids,
            logprobs=logprobs if self.wants_logprobs else None,
            finish_reason=last.finish_reason,
            error=last.error,
            usage=Usage(
                prompt_tokens=self.num_prompt_tokens,
                completion_tokens=len(token_ids),
                cached_tokens=last.num_cached_tokens,
            ),
        )


class LLM:
    """A model on one device with its engine, for offline use.

        llm = LLM("tiny")
        llm.generate("The prompt", SamplingParams(temperature=0, max_tokens=32))[0].text

    Prompts that share a beginning, in one call or over time, share its computation.
    """

    def __init__(
        self,
        model: str | Path | ModelConfig = "tiny",
        *,
        tokenizer: Tokenizer | None = None,
        **settings: Any,
    ) -> None:
        """
        Args:
            model: a folder with a Kimi-Linear checkpoint; or a preset's name or a config, whose
                weights are then random, by `seed`.
            tokenizer: None: the folder's own, or bytes for random weights.
            settings: fields of `EngineConfig`. `device` is CUDA where there is one.

        Raises:
            ValueError: no such preset or setting, a setting out of range, a broken checkpoint.
            RuntimeError: the device is not there, or its memory does not suffice.
        """
        if not isinstance(tokenizer, Tokenizer | None):
            kind = type(tokenizer).__name__
            raise ValueError(f"LLM: tokenizer must be a Tokenizer or None, got {kind}")
        config = engine_config(settings)
        folder = None if isinstance(model, ModelConfig) else _folder(model)
        if isinstance(model, ModelConfig):
            model_config = model
        else:
            model_config = load_config(folder) if folder else model_preset(str(model))
        loaded = load_model(config.resolve(model_config), config, folder)
        self._no_tokenizer: str | None = None
        if tokenizer is None:
            tokenizer = self._default_tokenizer(folder)
        self.tokenizer = tokenizer
        runner = ModelRunner(loaded, config)
        self.engine = build_engine(runner, config, tokenizer, weights=_fingerprint(folder))
        self._turns = threading.Lock()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer prompts, in their order. Calls from several threads take turns.

        A forward that fails ends the requests that were in it: their `finish_reason` is "error".
        Ctrl-C ends the call after the step that is running; a second one does not wait.

        Args:
            prompts: one prompt or several, each a text or token ids.
            sampling: for all prompts, or one each. None: the defaults.
            progress: show a bar on stderr.

        Raises:
            ValueError: a prompt or a sampling field is wrong; the message says which prompt. Or
                requests that were submitted to `engine` itself have not ended. None has been run.
        """
        ids = [self._token_ids(i, prompt) for i, prompt in enumerate(_as_list(prompts))]
        params = _as_params(sampling, len(ids))
        for i, (prompt, one) in enumerate(zip(ids, params, strict=True)):
            try:
                self.engine.check(prompt, one)
            except ValueError as error:
                raise ValueError(f"prompt {i}: {error}") from None
        with self._turns, _late_interrupts() as interrupt:
            if self.engine.num_requests:
                raise ValueError(
                    f"LLM.generate: {self.engine.num_requests} requests that were submitted to "
                    "LLM.engine have not ended, and their updates would be lost; step it first"
                )
            answers = {
                self.engine.submit(prompt, one): _Answer(len(prompt), one.logprobs is not None)
                for prompt, one in zip(ids, params, strict=True)
            }
            try:
                self._finish(answers, progress, interrupt)
            finally:
                # an interrupt in the middle leaves nothing behind
                for request_id in answers:
                    self.engine.abort(request_id)
        return [answer.output() for answer in answers.values()]

    def _finish(
        self, answers: dict[str, _Answer], progress: bool, interrupt: Callable[[], None]
    ) -> None:
        with _Progress(len(answers), progress) as bar:
            while self.engine.has_work:
                for update in self.engine.step():
                    answers[update.request_id].updates.append(update)
                    bar.advance(update)
                interrupt()

    def _token_ids(self, index: int, prompt: Prompt) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise ValueError(f"prompt {index} is a text, but {self._no_tokenizer}")
        if not prompt:
            raise ValueError(f"prompt {index}: the text must not be empty")
        try:
            return self.tokenizer.encode(prompt)
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from error

    def _default_tokenizer(self, folder: Path | None) -> Tokenizer | None:
        if folder is None:
            return Tokenizer.byte_level()
        try:
            return Tokenizer.from_folder(folder)
        except ValueError as error:  # token ids still work, so this is said when a text comes
            self._no_tokenizer = str(error)
            return None


@contextmanager
def _late_interrupts() -> Iterator[Callable[[], None]]:
    """Holds Ctrl-C back until what is given is called, or to the end: a step that is cut off
    anywhere would leave an engine that has planned what it never launched. The second one is not
    held back.
    """
    handler = signal.getsignal(signal.SIGINT)
    # signals come to the main thread alone, and who ignores them goes on ignoring them
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: None
        return
    frames: list[FrameType | None] = []

    def hold(number: int, frame: FrameType | None) -> None:
        frames.append(frame)
        if len(frames) > 1:
            handler(number, frame)

    def interrupt() -> None:
        if frames:
            handler(signal.SIGINT, frames.pop())

    signal.signal(signal.SIGINT, hold)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, handler)
        interrupt()


def engine_config(settings: dict[str, Any]) -> EngineConfig:
    """Settings by name, on CUDA where there is one. Raises ValueError for an unknown name."""
    known = [item.name for item in fields(EngineConfig)]
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise ValueError(f"LLM: unknown setting {unknown[0]!r}; settings are {', '.join(known)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return EngineConfig(**{"device": device, **settings})


def _folder(model: str | Path) -> Path | None:
    """The checkpoint folder that is meant; None for a preset."""
    if str(model) in PRESETS:
        return None
    if not isinstance(model, (str, Path)) or not str(model):
        raise ValueError(f"LLM: model must be a preset, a folder or a ModelConfig, got {model!r}")
    if Path(model).is_dir():
        return Path(model)
    raise ValueError(
        f"LLM: unknown preset {str(model)!r}, and no folder of that name; "
        f"presets are {', '.join(PRESETS)}"
    )


def _fingerprint(folder: Path | None) -> str:
    """Names a folder's weights by path, sizes and times; "" for random ones."""
    if folder is None:
        return ""
    files = sorted(folder.resolve().glob("*.safetensors"))
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return f"{folder.resolve()} {stats}"


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt as a list of one: a text, or a sequence whose first item is a number."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise ValueError(
            "LLM.generate: prompts must be a text, token ids, or a list of these, "
            f"got {type(prompts).__name__}"
        )
    if not prompts:
        raise ValueError("LLM.generate: prompts must not be empty")
    is_list = all(isinstance(prompt, str | Sequence) for prompt in prompts)
    return prompts if is_list else [prompts]  # type: ignore[list-item]


def _as_params(
    sampling: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * count
    if not isinstance(sampling, Sequence) or len(sampling) != count:
        got = len(sampling) if isinstance(sampling, Sequence) else type(sampling).__name__
        raise ValueError(
            f"LLM.generate: sampling must be one SamplingParams or one for each of {count} "
            f"prompts, got {got}"
        )
    return sampling


class _Progress:
    """A bar over finished prompts, with the tokens so far; nothing at all if not wanted."""

    def __init__(self, num_prompts: int, is_shown: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._bar = Progress(
            TextColumn("prompts"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]} tokens"),
            console=Console(stderr=True),
            disable=not is_shown,
        )
        self._task = self._bar.add_task("", total=num_prompts, tokens=0)
        self._tokens = 0

    def __enter__(self) -> "_Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, update: RequestUpdate) -> None:
        self._tokens += len(update.token_ids)
        is_done = update.finish_reason is not None
        self._bar.update(self._task, advance=int(is_done), tokens=self._tokens)
