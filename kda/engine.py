"""Requests in, tokens and text out: the only file that knows both scheduler and runner."""

import logging
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import NamedTuple

import numpy as np

from ..scheduler.batch import ScheduledBatch
from ..scheduler.request import Request, RequestOutputs, SamplingParams
from ..scheduler.scheduler import Scheduler
from .config import ModelConfig
from .output import OutputText
from .runner import LaunchedStep, ModelRunner, StepResult, TokenLogprobs
from .tokenizer import Tokenizer

log = logging.getLogger("torch_kda.engine")


class RequestUpdate(NamedTuple):
    """What one step brought for one request. A named tuple: a step makes one for each row."""

    request_id: str
    text: str  # to append; "" without a tokenizer
    token_ids: tuple[int, ...]  # to append
    logprobs: Sequence[TokenLogprobs]  # of these tokens; empty if not asked for
    num_cached_tokens: int  # of the prompt, found when it was admitted
    finish_reason: str | None  # "stop", "length" or "error"; None: it goes on
    error: str | None  # what went wrong, with finish_reason "error"


class _Flight(NamedTuple):
    """A step between its launch and its end."""

    batch: ScheduledBatch
    launched: LaunchedStep | Exception  # an error of its launch is reported in its turn


class Engine:
    """Continuous batching over one runner. One thread submits, steps and aborts.

    With two steps in flight the host plans and launches one while the device runs the one before.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        *,
        seed: int = 0,
        shares_prefixes: bool = True,
        max_steps_in_flight: int = 1,
    ) -> None:
        """
        Args:
            runner, scheduler: made for the same slots and blocks.
            tokenizer: None: outputs have no text, and stop strings are refused.
            seed: of the seeds given to requests that bring none.
            shares_prefixes: whether a request may start from what others have left in the cache.
            max_steps_in_flight: 1 or 2, at most the scheduler's.
        """
        self.runner = runner
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.shares_prefixes = shares_prefixes
        self.max_steps_in_flight = max_steps_in_flight
        self._seeds = random.Random(seed)
        self._num_submitted = 0
        # those that have not ended; a text is None if there is no tokenizer
        self._running: dict[str, tuple[Request, OutputText | None]] = {}
        self._flights: deque[_Flight] = deque()  # oldest first

    @property
    def model_config(self) -> ModelConfig:
        return self.runner.model.config

    @property
    def num_requests(self) -> int:
        """Those that have not ended."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running, or a step has not come back."""
        return bool(self._running or self._flights)

    def check(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Whether `submit` would take this.

        Raises:
            ValueError: the prompt is empty, holds what is no id of the vocabulary, or leaves no
                room for a token within the model's length; a sampling field is out of place.
        """
        if not isinstance(sampling, SamplingParams):
            raise ValueError(
                f"Engine.submit: sampling must be SamplingParams, got {type(sampling).__name__}"
            )
        _check_ids("prompt_token_ids", prompt_token_ids, self.model_config.vocab_size)
        if len(prompt_token_ids) == 0:
            raise ValueError("Engine.submit: prompt_token_ids must not be empty")
        limit = self.model_config.max_model_len
        if len(prompt_token_ids) >= limit:
            raise ValueError(
                f"Engine.submit: the prompt has {len(prompt_token_ids):,} tokens, but the model "
                f"holds {limit:,}, and one of them has to be left for the output"
            )
        _check_ids("stop_token_ids", sampling.stop_token_ids, self.model_config.vocab_size)
        if sampling.stop and self.tokenizer is None:
            raise ValueError(
                "Engine.submit: stop strings need a tokenizer, and this model has none; "
                "use stop_token_ids"
            )

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        checkpoint_positions: Sequence[int] = (),
        cache_salt: str = "",
    ) -> str:
        """Queue a request; its updates come out of `step`.

        Args:
            sampling: None: the defaults.
            request_id: None: one is made up.
            priority: lower runs first.
            checkpoint_positions: tokens of the prompt, from 1 to all, after which the state is
                worth keeping.
            cache_salt: requests with different salts share nothing.

        Returns:
            request_id

        Raises:
            ValueError: as `check`, an argument is none of its kind, or the id is in use. Nothing
                has been queued then.
        """
        sampling = sampling or SamplingParams()
        self.check(prompt_token_ids, sampling)
        if request_id is None:
            names = (f"request-{number}" for number in count(self._num_submitted))
            request_id = next(name for name in names if not self.scheduler.knows(name))
        if sampling.seed is None:
            sampling = replace(sampling, seed=self._seeds.getrandbits(63))
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            eos_token_ids=self.model_config.eos_token_ids,
            priority=priority,
            checkpoint_positions=checkpoint_positions,
            cache_salt=cache_salt if self.shares_prefixes else f"private {self._num_submitted}",
        )
        self.scheduler.enqueue(request)
        text = OutputText(self.tokenizer, sampling.stop) if self.tokenizer else None
        self._running[request_id] = (request, text)
        self._num_submitted += 1
        return request_id

    def step(self) -> list[RequestUpdate]:
        """Launch what there is room for; wait for the oldest forward and return what it brought, in
        its batch's order. Without anything to run: nothing.
        """
        self._launch()
        if not self._flights:
            return []
        batch, launched = self._flights.popleft()
        result = self._finish(batch, launched)
        outputs = self._retire(batch, result)
        return self._updates(batch, result, outputs)

    def abort(self, request_id: str) -> bool:
        """Drop a request; no update of it follows. False if it is not there (any more)."""
        if self._running.pop(request_id, None) is None:
            return False
        self.scheduler.abort(request_id)
        return True

    def _launch(self) -> None:
        """Fill up the steps in flight. The device starts on one when the one before it is done."""
        while len(self._flights) < self.max_steps_in_flight:
            batch = self.scheduler.schedule()
            if not batch.num_rows:
                return
            try:
                launched = self.runner.launch(batch)
            # whatever it is, it ends the requests of this step and no others
            except Exception as error:
                launched = _logged(batch, error)
            self._flights.append(_Flight(batch, launched))

    def _finish(
        self, batch: ScheduledBatch, launched: LaunchedStep | Exception
    ) -> StepResult | Exception:
        if isinstance(launched, Exception):
            return launched
        try:
            return self.runner.finish(launched)
        except Exception as error:
            return _logged(batch, error)

    def _retire(self, batch: ScheduledBatch, result: StepResult | Exception) -> RequestOutputs:
        if isinstance(result, Exception):
            return self.scheduler.fail(batch, f"{type(result).__name__}: {result}")
        return self.scheduler.commit(batch, result.token_ids)

    def _updates(
        self,
        batch: ScheduledBatch,
        result: StepResult | Exception,
        outputs: RequestOutputs,
    ) -> list[RequestUpdate]:
        found: dict[str, Sequence[TokenLogprobs]] = {}
        if isinstance(result, StepResult) and any(result.logprobs):
            found = {
                request_id: logprobs
                for request_id, logprobs in zip(
                    batch.columns.request_id, result.logprobs, strict=True
                )
                if logprobs
            }
        # a named tuple's own constructor takes twice as long
        updates, new = [], tuple.__new__
        for request_id, token_ids, reason, error in outputs.tuples:
            request, output_text = self._running[request_id]
            text = ""
            if output_text is not None:
                text = output_text.push(token_ids)
                if output_text.is_stopped:
                    if reason is None:
                        self.scheduler.finish(request_id, "stop")
                    reason = "stop"
                elif reason is not None:
                    text += output_text.finish()
            if reason is not None:
                del self._running[request_id]
            logprobs = found[request_id][: len(token_ids)] if request_id in found else ()
            cached = request.num_cached_tokens
            fields = (request_id, text, token_ids, logprobs, cached, reason, error)
            updates.append(new(RequestUpdate, fields))
        return updates


def _logged(batch: ScheduledBatch, error: Exception) -> Exception:
    log.error("step %d with %d rows failed", batch.step, batch.num_rows, exc_info=error)
    return error


def _check_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises ValueError unless these are integers in [0, vocab_size)."""
    if isinstance(token_ids, str | bytes):
        kind = type(token_ids).__name__
        raise ValueError(f"Engine.submit: {name} must be a sequence of token ids, got {kind}")
    try:
        ids = np.asarray(token_ids)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(
            f"Engine.submit: {name} must be a sequence of token ids: {error}"
        ) from None
    if ids.size == 0 and ids.ndim == 1:
        return
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(
            f"Engine.submit: {name} must be a flat sequence of integers, "
            f"got shape {list(ids.shape)} of {ids.dtype}"
        )
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if wrong.size:
        at = int(wrong[0])
        raise ValueError(
            f"Engine.submit: {name} must be in [0, {vocab_size}), the vocabulary; "
            f"got {int(ids[at])} at position {at}"
        )
