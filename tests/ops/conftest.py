"""The devices that the ops' tests run on."""

import pytest


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Every contract holds on both; on CUDA the cases have K = V = 128 in bf16."""
    return request.param
