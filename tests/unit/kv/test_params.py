"""``kv_transfer_params``: other systems can parse ours, and invalid ones are rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from mooncake_kv import params as params_module
from mooncake_kv.errors import InvalidKVParams
from mooncake_kv.params import (
    FirstToken,
    FirstTokenLogprobs,
    InstanceAddress,
    KVTransferParams,
    PrefixSource,
    TransferMode,
    build_params,
    build_reservation_params,
    parse_kv_transfer_params,
    parse_remote_address,
    parse_reservation,
    prompt_digest,
)

GOLDEN = Path(__file__).parents[2] / "contract" / "kv_transfer_params_prefill.json"
FIRST = FirstToken(17, FirstTokenLogprobs(-0.25, ((17, -0.25), (3, -1.5))), 16)
HOLDER = InstanceAddress("prefill-1", "10.0.0.7", 5557, 2, 16, lease_s=30.0)
PROMPT = tuple(range(100, 140))
NUM_TOKENS = len(PROMPT)


def golden(**changes: Any) -> dict[str, Any]:
    params: dict[str, Any] = json.loads(GOLDEN.read_text())
    return {**params, **changes}


def test_prefill_params_match_golden_file() -> None:
    built = build_params(HOLDER, "cmpl-1-0", [4, 7, 2], PROMPT, FIRST)
    assert json.loads(json.dumps(built)) == golden()


def test_decode_parses_the_parameters_that_prefill_built() -> None:
    kv_params = parse_kv_transfer_params(golden(), PROMPT)
    assert kv_params.first_token == FIRST
    assert not kv_params.keeps_kv
    remote = kv_params.remote
    assert remote is not None
    assert (remote.engine_id, remote.request_id) == ("prefill-1", "cmpl-1-0")
    assert (remote.host, remote.port) == ("10.0.0.7", 5557)
    assert (remote.block_ids, remote.num_tokens) == ((4, 7, 2), NUM_TOKENS)
    assert remote.lease_s == 30.0


def test_logprobs_are_omitted_unless_requested() -> None:
    params = build_params(HOLDER, "cmpl-1-0", [4], (5, 6, 7), FirstToken(17))
    assert "last_token_logprobs" not in params
    first = parse_kv_transfer_params(params, (5, 6, 7)).first_token
    assert first is not None
    assert first.logprobs is None


def test_prefill_request_of_other_proxies_is_parsed() -> None:
    order = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
        "do_virtual": False,
    }
    assert parse_kv_transfer_params(order, (5, 6, 7)) == KVTransferParams(keeps_kv=True)


def test_fields_unknown_to_other_systems_are_optional() -> None:
    params = golden()
    del params["prompt_digest"], params["lease_seconds"]
    kv_params = parse_kv_transfer_params(params, PROMPT[::-1])
    assert kv_params.remote is not None
    assert kv_params.remote.lease_s is None


@pytest.mark.parametrize(
    "other", [PROMPT[::-1], (*PROMPT[:-1], 7), (7, *PROMPT[1:])], ids=["order", "last", "first"]
)
def test_other_prompt_of_same_length_is_rejected(other: tuple[int, ...]) -> None:
    with pytest.raises(InvalidKVParams, match="given another prompt of 40 tokens") as refusal:
        parse_kv_transfer_params(golden(), other)
    assert prompt_digest(PROMPT) in str(refusal.value)
    assert prompt_digest(other) in str(refusal.value)


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}, {"unknown": [1]}])
def test_empty_params_do_nothing(params: dict[str, Any] | None) -> None:
    assert parse_kv_transfer_params(params, (5, 6, 7)) == KVTransferParams()


BAD = [
    ({"do_remote_decode": True}, "exclude each other"),
    ({"do_remote_prefill": "yes"}, "Expected `bool`"),
    ({"remote_engine_id": None}, "do_remote_prefill needs remote_engine_id"),
    ({"remote_engine_id": 5}, "Expected `str"),
    ({"remote_engine_id": ""}, "length >= 1"),
    ({"remote_request_id": None}, "do_remote_prefill needs remote_request_id"),
    ({"remote_host": None}, "do_remote_prefill needs remote_host"),
    ({"remote_host": "h" * 1000}, "length <= 512"),
    ({"remote_port": None}, "do_remote_prefill needs remote_port"),
    ({"remote_port": 0}, ">= 1"),
    ({"remote_port": 65_536}, "<= 65535"),
    ({"remote_port": 2**80}, "<= 65535"),
    ({"remote_port": "5557"}, "Expected `int"),
    ({"remote_block_ids": None}, "do_remote_prefill needs remote_block_ids"),
    ({"remote_block_ids": []}, "a table for each KV-cache group"),
    ({"remote_block_ids": [[1, 2], [3]]}, "got 2 of lengths [1, 2]"),
    ({"remote_block_ids": [1, 2]}, "Expected `array`"),
    ({"remote_block_ids": [[1.5]]}, "Expected `int"),
    ({"remote_block_ids": [[-1]]}, ">= 0"),
    ({"remote_block_ids": [[2**80]]}, "<= 2147483647"),
    ({"last_token_id": None}, "do_remote_prefill needs last_token_id"),
    ({"last_token_id": -1}, ">= 0"),
    ({"last_token_logprobs": [0.5]}, "Expected `array` of length 2"),
    ({"last_token_logprobs": "all"}, "Expected `array"),
    ({"num_prompt_tokens": 41}, "counted 41 prompt tokens, this one 40"),
    ({"remote_cached_tokens": -3}, ">= 0"),
    ({"lease_seconds": 0}, "> 0"),
    ({"lease_seconds": "30"}, "Expected `float"),
    ({"lease_seconds": 1e9}, "<= 86400"),
    ({"prompt_digest": 7}, "Expected `str"),
]


@pytest.mark.parametrize(("change", "words"), BAD, ids=lambda value: str(value)[:40])
def test_invalid_params_are_rejected_with_reason(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidKVParams) as refusal:
        parse_kv_transfer_params(golden(**change), PROMPT)
    assert words in str(refusal.value)
    assert str(refusal.value).startswith("kv_transfer_params: ")


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@settings(max_examples=40)
@given(field=st.sampled_from(sorted(golden())), value=ANYTHING)
def test_any_field_value_is_parsed_or_rejected(field: str, value: object) -> None:
    try:
        kv_params = parse_kv_transfer_params(golden(**{field: value}), PROMPT)
    except InvalidKVParams:
        return
    if kv_params.remote is not None:
        assert 1 <= kv_params.remote.port <= 65_535
        assert all(0 <= block < 2**31 for block in kv_params.remote.block_ids)


def test_prefill_instance_is_found_in_otherwise_invalid_params() -> None:
    wrong = golden(num_prompt_tokens=1, prompt_digest="another", last_token_id=None)
    with pytest.raises(InvalidKVParams):
        parse_kv_transfer_params(wrong, PROMPT)
    holder = parse_remote_address(wrong)
    assert holder is not None
    assert (holder.engine_id, holder.request_id) == (
        wrong["remote_engine_id"],
        wrong["remote_request_id"],
    )


@pytest.mark.parametrize(
    "params",
    [{}, {"do_remote_decode": True}, {"do_remote_prefill": True}, golden(remote_port="x")],
)
def test_params_without_prefill_instance_have_none(params: dict[str, Any]) -> None:
    assert parse_remote_address(params) is None


def reservation(**changes: Any) -> dict[str, Any]:
    """What a decode instance posts that has reserved blocks."""
    return build_reservation_params(HOLDER, "cmpl-1-0", [4, 7, 2], PROMPT, 16) | changes


@pytest.mark.parametrize(
    ("is_pulled", "mode"), [(True, TransferMode.PULL), (False, TransferMode.PUSH)]
)
def test_reservation_is_found_in_otherwise_invalid_params(
    is_pulled: bool, mode: TransferMode
) -> None:
    params = reservation(do_pull=is_pulled)
    with pytest.raises(InvalidKVParams, match="another prompt"):
        parse_kv_transfer_params(params, PROMPT[::-1])
    found = parse_reservation(params)
    assert found is not None
    assert (found.keeps_kv, found.mode) == (True, mode)
    assert found.target is not None
    assert found.target.prompt_digest == prompt_digest(PROMPT)
    assert found.target.remote.engine_id == HOLDER.engine_id
    assert found.target.remote.request_id == "cmpl-1-0"


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"do_remote_decode": True},
        golden(),
        reservation(remote_port="x"),
        reservation(remote_request_id=None),
        reservation(do_remote_prefill=True),
    ],
)
def test_params_without_reservation_have_none(params: dict[str, Any]) -> None:
    assert parse_reservation(params) is None


def test_cache_salt_must_match_the_peers() -> None:
    params = golden(prompt_digest=prompt_digest(PROMPT, "tenant"))
    assert parse_kv_transfer_params(params, PROMPT, "tenant").remote is not None
    for other in ("", "another"):
        with pytest.raises(InvalidKVParams, match="or cache_salt"):
            parse_kv_transfer_params(params, PROMPT, other)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The digests of prompts that were computed."""
    digests: list[str] = []

    def digest(*args: Any) -> str:
        digests.append(prompt_digest(*args))
        return digests[-1]

    monkeypatch.setattr(params_module, "prompt_digest", digest)
    return digests


def test_prompt_is_hashed_once_per_instance_and_with_its_cache_salt(hashed: list[str]) -> None:
    salted = prompt_digest(PROMPT, "tenant")
    built = build_params(HOLDER, "cmpl-1-0", [4, 7, 2], PROMPT, FIRST, "tenant")
    assert built["prompt_digest"] == salted
    assert hashed == [salted]
    parse_kv_transfer_params(built, PROMPT, "tenant")
    assert hashed == 2 * [salted]
    reserved = build_reservation_params(HOLDER, "r", [4], PROMPT, 16, cache_salt="tenant")
    target = parse_kv_transfer_params(reserved, PROMPT, "tenant").target
    assert target is not None
    assert target.prompt_digest == salted
    assert hashed == 4 * [salted]
    parse_kv_transfer_params(golden(prompt_digest=None), PROMPT)
    assert hashed == 4 * [salted], "there is nothing to compare"


def test_peer_without_prompt_digest_is_not_verified() -> None:
    assert parse_kv_transfer_params(golden(), PROMPT).is_verified
    assert not parse_kv_transfer_params(golden(prompt_digest=None), PROMPT).is_verified


SOURCE = {"host": "10.0.0.1", "port": 7701, "epoch": "abc", "num_tokens": 512}
PREFILLS = [{"do_remote_decode": True}, {}]


@pytest.mark.parametrize("params", PREFILLS, ids=["prefill", "alone"])
def test_prefix_sources_are_parsed_by_prefill(
    params: dict[str, Any],
) -> None:
    found = parse_kv_transfer_params(params | {"prefix_sources": [SOURCE]}, range(600))
    assert found.prefix_sources == (PrefixSource("10.0.0.1", 7701, "abc", 512),)
    assert found.keeps_kv is bool(params)
    assert found.mode is (TransferMode.PULL if params else TransferMode.NONE)
    assert parse_kv_transfer_params(params, range(600)).prefix_sources == ()


@pytest.mark.parametrize(
    ("sources", "problem"),
    [
        ([SOURCE | {"port": 0}], r"prefix_sources\[0\].port"),
        ([{"host": "10.0.0.1"}], "missing required field `port`"),
        ([SOURCE | {"num_tokens": "all"}], r"prefix_sources\[0\].num_tokens"),
        ("10.0.0.1:7701", "Expected `array`"),
        ([SOURCE] * 17, "length <= 16"),
        ([SOURCE | {"host": "a..b"}], r"host: wanted .*got 'a\.\.b' - at `\$\.prefix_sources\[0\]"),
        ([SOURCE | {"host": "x" * 64}], "host: wanted a host's name or address"),
        ([SOURCE | {"host": "10.0.0.1\0"}], "host: wanted a host's name or address"),
    ],
)
def test_malformed_hint_is_reported(sources: object, problem: str) -> None:
    with pytest.raises(InvalidKVParams, match=problem):
        parse_kv_transfer_params({"prefix_sources": sources}, range(600))


@pytest.mark.parametrize("host", ["10.0.0.1", "fe80::1%eth0", "a_b.example.", "bücher.example"])
def test_hint_may_name_any_host(host: str) -> None:
    found = parse_kv_transfer_params({"prefix_sources": [SOURCE | {"host": host}]}, range(600))
    assert found.prefix_sources[0].host == host


def test_invalid_remote_host_is_rejected() -> None:
    with pytest.raises(InvalidKVParams, match=r"remote_host: wanted .*got 'a\.\.b'"):
        parse_kv_transfer_params(golden(remote_host="a..b"), PROMPT)
