"""Requests check and pack what they are given."""

from array import array

import pytest
from torch_kda.scheduler.request import Request, SamplingParams


def test_request_packs_its_prompt():
    prompt = [1, 2, 3]
    request = Request("r", prompt)
    prompt.append(4)
    assert request.token_ids == array("i", [1, 2, 3]) and request.num_prompt_tokens == 3
    request.token_ids.append(9)
    assert request.output_token_ids == array("i", [9])
    assert request.prompt_token_ids == array("i", [1, 2, 3])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", ""),
        ("request_id", ["r"]),
        ("eos_token_ids", 2),
        ("priority", "high"),
        ("priority", None),
        ("priority", True),
        ("checkpoint_positions", 2),
        ("checkpoint_positions", ["a"]),
        ("checkpoint_positions", [0]),
        ("checkpoint_positions", (1, 4)),  # of three tokens
        ("cache_salt", 5),
        ("lora", "name"),
        ("lora", ("name", None)),
        ("spans", 1),
    ],
)
def test_request_field_errors(field, value):
    with pytest.raises(ValueError, match=f"Request: {field} must be .*, got "):
        Request(**({"request_id": "r", "prompt_token_ids": [1, 2, 3]} | {field: value}))


@pytest.mark.parametrize("bad", [[-1], [2**31], ["a"], [1.5]])
def test_request_errors(bad):
    with pytest.raises(ValueError, match=r"prompt_token_ids must be ids in \[0, 2\*\*31\)"):
        Request("r", bad)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -1.0),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("logprobs", 21),
        ("stop", "text"),
        ("stop", ("",)),
        ("stop", (1,)),
        ("stop_token_ids", 7),
        ("stop_token_ids", ("a",)),
        ("max_tokens", 2.5),
        ("max_tokens", True),
        ("temperature", "a"),
        ("temperature", float("inf")),
        ("top_p", float("nan")),
        ("top_k", None),
        ("top_k", 2**31),
        ("temperature", True),
        ("temperature", 10**400),
        ("ignore_eos", "no"),
        ("seed", 1.5),
        ("logprobs", "3"),
    ],
)
def test_sampling_params_errors(field, value):
    with pytest.raises(ValueError, match=f"SamplingParams: {field} must be"):
        SamplingParams(**{field: value})
