"""``--kv-events-config``: vLLM's fields, the addresses of ranks, and invalid settings."""

from __future__ import annotations

import pytest

from mooncake_kv.errors import KVConfigError
from mooncake_kv.kv_events_config import (
    EventPublisherKind,
    KVEventsConfig,
    read_kv_events_config,
)


def test_config_has_fields_and_defaults_of_vllm_and_a_bound_in_bytes() -> None:
    config = read_kv_events_config('{"enable_kv_cache_events": true}')
    assert config == KVEventsConfig(True)
    assert config.is_published
    assert config.buffer_bytes == 64 << 20
    assert (config.endpoint, config.buffer_steps, config.hwm) == ("tcp://*:5557", 10_000, 100_000)
    assert not read_kv_events_config("{}").is_published
    nowhere = '{"enable_kv_cache_events": true, "publisher": "null"}'
    assert read_kv_events_config(nowhere).publisher is EventPublisherKind.NULL
    assert not read_kv_events_config(nowhere).is_published


@pytest.mark.parametrize(
    ("endpoint", "of_second"),
    [
        ("tcp://*:5557", "tcp://*:5559"),
        ("tcp://[::]:5557", "tcp://[::]:5559"),
        ("tcp://127.0.0.1:*", "tcp://127.0.0.1:*"),
        ("tcp://127.0.0.1:0", "tcp://127.0.0.1:0"),
        ("ipc:///tmp/events", "ipc:///tmp/events_dp2"),
        ("inproc://events", "inproc://events_dp2"),
    ],
)
def test_each_data_parallel_rank_has_its_own_address(endpoint: str, of_second: str) -> None:
    """As vLLM's ``ZmqEventPublisher.offset_endpoint_port`` numbers ports."""
    config = KVEventsConfig(True, endpoint=endpoint, replay_endpoint=endpoint)
    assert config.of_dp_rank(0) == config
    assert config.of_dp_rank(2).endpoint == config.of_dp_rank(2).replay_endpoint == of_second


def test_ports_shared_by_ranks_are_rejected() -> None:
    config = KVEventsConfig(True, endpoint="tcp://*:5557", replay_endpoint="tcp://*:5559")
    assert config.port_conflict(2) is None
    assert "keep them 3 apart" in (config.port_conflict(3) or "")
    assert KVEventsConfig(True, replay_endpoint="tcp://127.0.0.1:*").port_conflict(9) is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("yes", "wants JSON like"),
        ('{"port": 3}', "no field port"),
        ('{"hwm": "many"}', "wants JSON like"),
        ('{"buffer_steps": 0}', "buffer_steps must be at least 1, got 0"),
        ('{"buffer_bytes": 0}', "buffer_bytes must be at least 1, got 0"),
        ('{"publisher": "kafka"}', "wants JSON like"),
    ],
)
def test_invalid_config_error_names_reason(text: str, complaint: str) -> None:
    with pytest.raises(KVConfigError, match=complaint):
        read_kv_events_config(text)
