"""Chunk keys: equal if and only if the KV is, in every process."""

from dataclasses import replace

import pytest

from mooncake_hal.kv.geometry import AttentionKind, KVGeometry
from mooncake_kv.errors import KVConfigError
from mooncake_kv.model_fingerprint import ModelFingerprint
from mooncake_kv.store.chunk_keys import (
    KEY_BYTES,
    KVIdentity,
    chunk_keys,
    completes_chunks,
    extend_keys,
    num_loadable_chunks,
)

IDENTITY = KVIdentity("0123abcd", "bfloat16", chunk_tokens=4)
TOKENS = list(range(100, 110))


def test_keys_are_the_same_in_every_process_and_release():
    keys = chunk_keys(IDENTITY, TOKENS)
    assert [key.hex() for key in keys] == [
        "eb14d4d77501c76f1eba8410e4e59be6",
        "d759d67ac1bfd382619a203924190079",
    ]


def test_only_full_chunks_have_keys():
    assert [len(chunk_keys(IDENTITY, TOKENS[:n])) for n in (0, 3, 4, 7, 8, 9)] == [0, 0, 1, 1, 2, 2]
    assert all(len(key) == KEY_BYTES for key in chunk_keys(IDENTITY, TOKENS))


def test_keys_of_longer_prompt_start_with_those_of_shorter():
    keys = chunk_keys(IDENTITY, TOKENS)
    assert extend_keys(IDENTITY, keys[0], TOKENS[4:]) == keys[1:]
    assert chunk_keys(IDENTITY, TOKENS[:4]) == keys[:1]


def test_token_changes_its_chunk_key_and_all_later_ones():
    keys = chunk_keys(IDENTITY, TOKENS)
    changed = chunk_keys(IDENTITY, [*TOKENS[:5], 7, *TOKENS[6:]])
    assert changed[0] == keys[0]
    assert changed[1] != keys[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "other"},
        {"dtype": "float16"},
        {"chunk_tokens": 2},
        {"quantisation": "fp8"},
        {"rope": "yarn:4"},
        {"adapter": "lora@1"},
    ],
)
def test_every_field_of_the_identity_is_in_the_key(changes):
    other = chunk_keys(replace(IDENTITY, **changes), TOKENS)
    assert not set(other) & set(chunk_keys(IDENTITY, TOKENS))


def test_tenants_salt_and_extra_content_are_in_the_key():
    plain = chunk_keys(IDENTITY, TOKENS)
    assert not set(chunk_keys(IDENTITY, TOKENS, tenant_salt="a")) & set(plain)
    image = chunk_keys(IDENTITY, TOKENS, extra=[b"", b"image"])
    assert image[0] == plain[0]
    assert image[1] != plain[1]


def test_field_boundaries_are_part_of_the_key():
    assert KVIdentity("m", "ab", rope="c").root() != KVIdentity("m", "a", rope="bc").root()
    assert KVIdentity("m", "a", adapter="x").root("y") != KVIdentity("m", "a").root("xy")


def test_models_identity_is_its_weights_settings_and_geometry():
    geometry = KVGeometry(AttentionKind.GQA, 2, 2, (16, 16), "float32", 4)
    model = ModelFingerprint("weights", {"rope": "10000", "quantization": "fp8"})
    found = KVIdentity.of_model(model, geometry, 128)
    assert (found.dtype, found.chunk_tokens) == ("float32", 128)
    assert (found.quantisation, found.rope) == ("fp8", "10000")
    packed = replace(geometry, plane_dims=(2048,), unit=64, format="vllm-cpu/amx/64")
    others = [
        KVIdentity.of_model(replace(model, weights="others"), geometry, 128),
        KVIdentity.of_model(replace(model, settings={"rope": "10000"}), geometry, 128),
        KVIdentity.of_model(model, packed, 128),
        KVIdentity.of_model(model, geometry, 128, "pairs"),
        KVIdentity.of_model(model, geometry, 128, "halves"),
    ]
    assert len({found.root(), *(other.root() for other in others)}) == 6


def test_last_token_of_a_prompt_is_never_loaded():
    assert [num_loadable_chunks(n, 4) for n in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


def test_identity_without_fingerprint_or_tokens_is_rejected():
    with pytest.raises(KVConfigError, match="without a fingerprint"):
        KVIdentity("", "bfloat16")
    with pytest.raises(KVConfigError, match="1 token or more"):
        KVIdentity("m", "bfloat16", chunk_tokens=0)


@pytest.mark.parametrize(
    ("start", "stop", "wanted"),
    [(0, 32, True), (0, 31, False), (31, 32, False), (30, 32, True), (32, 63, False)],
)
def test_single_tokens_and_partial_chunks_complete_no_chunk(
    start: int, stop: int, wanted: bool
) -> None:
    assert completes_chunks(start, stop, 32) is wanted
