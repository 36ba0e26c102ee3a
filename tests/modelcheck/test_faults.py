"""Seeded faults are caught. The cheap ones here; all of them in `make modelcheck`."""

import pytest
from torch_kda.cache.policy import replay_boundary
from torch_kda.tests.modelcheck.faults import Fault, applied
from torch_kda.tests.modelcheck.run import find_fault
from torch_kda.tests.modelcheck.scopes import SCOPES
from torch_kda.tests.modelcheck.seeded_faults import FAULTS

# these take some thousand transitions or more
DEAR = {
    "the running state is keyed though it is not on the grid",
    "DOOMED slot freed though it is read",
    "kept states of a failed step leak",
    "a READY key gets another slot",
    "the younger of two states with one key stays",
    "somebody is preempted though room is coming back",
    "a step of a run fails, and the run goes on",
}
CHEAP = [fault for fault in FAULTS if fault.name not in DEAR]


@pytest.mark.parametrize("fault", CHEAP, ids=[fault.name for fault in CHEAP])
def test_fault_is_caught(fault: Fault) -> None:
    found = find_fault(fault, limit=2500, most=2)
    assert found["by"], f"{fault.name} was not found in {found}"


def test_faults_are_many() -> None:
    assert len(FAULTS) >= 90 and len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert {fault.scope for fault in FAULTS} <= {scope.name for scope in SCOPES}
    assert {fault.name for fault in FAULTS} > DEAR


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_applied(fault: Fault) -> None:
    """The text is there once; the product is whole again afterwards."""
    intact = fault.function.__code__
    with applied(fault):
        assert fault.function.__code__ != intact
    assert fault.function.__code__ is intact


def test_applied_reaches_those_who_imported_it() -> None:
    fault = Fault("", "cache.policy:replay_boundary", "(drop == 0)", "0")
    with applied(fault):
        assert replay_boundary(8, 4) == 8
    assert replay_boundary(8, 4) == 4


def test_applied_refuses_a_text_that_is_gone() -> None:
    fault = Fault("a", "cache.policy:replay_boundary", "no such text", "")
    with (
        pytest.raises(LookupError, match="occurs 0 times in cache.policy:replay_boundary"),
        applied(fault),
    ):
        pass


def test_find_fault_says_when_it_finds_nothing() -> None:
    harmless = Fault("a", "cache.policy:replay_boundary", ", 0)", ", 0 + 0)", scope="never fits")
    assert find_fault(harmless, limit=200, most=1)["by"] is None
