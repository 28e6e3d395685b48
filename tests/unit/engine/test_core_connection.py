"""Requests on their way to a core in another process."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe

import pytest

from mooncake_engine.core_client import CoreConnection
from mooncake_engine.core_messages import AbortRequest, AddRequest, PromptDecoder
from mooncake_engine.errors import EngineDead
from mooncake_engine.messages import EngineRequest, pack_tokens, unpack_tokens
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.step_watchdog import StepWatch

LONG = tuple(range(100_000))
"""A prompt of more bytes than a socket's buffer holds."""


@pytest.fixture
def ends() -> Iterator[tuple[CoreConnection, Connection]]:
    ours, theirs = Pipe()
    core = CoreConnection(ours, StepWatch(0.0), lambda: EngineDead("gone"))
    with theirs:
        yield core, theirs
        core.close()


def request(name: str, prompt: tuple[int, ...], group: str | None = None) -> AddRequest:
    return AddRequest(EngineRequest(name, prompt, SamplingParams(), group=group))


def test_choices_travel_with_one_prompt_and_nobody_waits(
    ends: tuple[CoreConnection, Connection],
) -> None:
    """The event loop posts requests: it must not wait until a busy core has read a long prompt."""
    core, theirs = ends
    sent = [request(f"a-{n}", LONG, "a") for n in range(8)]
    sent += [request("b", (*LONG, 1)), request("c-0", LONG, "c"), request("c-1", LONG, "c")]
    for command in sent:
        core.post(command)  # nobody reads yet
    core.post(AbortRequest("b"))
    received = [theirs.recv_bytes() for _ in range(len(sent) + 1)]
    assert pickle.loads(received.pop()) == AbortRequest("b")
    assert sum(map(len, received)) < 3.1 * len(pack_tokens(LONG))
    decoder = PromptDecoder()
    found = [decoder.complete(pickle.loads(message)) for message in received]
    assert found == [command.request for command in sent]
    assert len({id(request.prompt_token_ids) for request in found}) == 3


def test_a_closed_connection_ends_for_the_core_at_once(
    ends: tuple[CoreConnection, Connection],
) -> None:
    core, theirs = ends
    core.post(request("a", LONG))
    core.close()
    core.close()
    core.post(AbortRequest("a"))
    with pytest.raises(OSError, match="end of file during message"):
        theirs.recv_bytes()


@pytest.mark.parametrize("token_ids", [(7,), (0, 151_935, 3, 3), (1 << 18, 5, (1 << 32) - 1)])
def test_packed_tokens_come_back(token_ids: tuple[int, ...]) -> None:
    assert unpack_tokens(pack_tokens(token_ids)) == token_ids
