"""A store's Prometheus endpoint, and its limits on connections."""

import contextlib
import re
import socket
import threading

import pytest

from mooncake_kv.store.chunk_store import Chunk, StoreStats
from mooncake_kv.store.node_store import NodeStore, NodeStoreConfig
from mooncake_kv.store.store_metrics import (
    MAX_CONNECTIONS,
    MAX_HEAD_BYTES,
    MetricsServer,
    families,
    prometheus_text,
)


@pytest.fixture
def served():
    store = NodeStore(NodeStoreConfig(8 * 4096))
    server = MetricsServer.start(store.stats, "127.0.0.1", 0)
    yield store, server.port
    server.close()
    server.close()
    store.close()


def ask(port, request=b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"):
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65536), b"")).decode()


def test_counters_are_by_tier_and_reason(served):
    store, port = served
    user = store.open_user()
    chunks = [Chunk(b"%d" % i, None, 0, 4096, 16) for i in range(3)]
    user.commit(user.reserve(chunks).result())
    user.pin([b"0", b"absent"])
    user.drop([b"1"])
    text = ask(port)
    assert text.startswith("HTTP/1.1 200 OK\r\n")
    for line in (
        'mooncake_store_hits_total{tier="dram"} 1',
        'mooncake_store_hits_total{tier="ssd"} 0',
        'mooncake_store_capacity_bytes{tier="dram"} 32768',
        'mooncake_store_used_bytes{tier="dram"} 8192',
        "mooncake_store_read_bytes_total 4096",
        "mooncake_store_misses_total 1",
        "mooncake_store_puts_total 3",
        "mooncake_store_pins 1",
        'mooncake_store_evictions_total{reason="drop"} 1',
        'mooncake_store_leaked_handles_total{kind="write"} 0',
        'mooncake_store_ssd_hung_drives{kind="read"} 0',
        'mooncake_store_ssd_hung_drives{kind="write"} 0',
    ):
        assert line in text.splitlines()
    user.close()


def test_every_line_is_valid_exposition_format():
    stats = StoreStats(num_evicted={"room": 1, "quota": 2}, num_ssd_skipped={"budget": 3})
    assert 'mooncake_store_ssd_skipped_total{reason="hung"} 0' in prometheus_text(stats)
    names = set()
    for line in prometheus_text(stats).splitlines():
        if found := re.fullmatch(r"# TYPE (\w+) (counter|gauge)", line):
            assert (found[2] == "counter") is found[1].endswith("_total")
            names.add(found[1])
            continue
        pattern = r'# HELP \w+ .+|(\w+)(\{\w+="[\w-]+"(,\w+="[\w-]+")*\})? [0-9.e+]+'
        assert re.fullmatch(pattern, line), line
    assert len(names) == len(families(stats))


def test_store_is_asked_once_for_all_requests_of_a_moment(monkeypatch):
    num_asked = []

    def stats():
        num_asked.append(1)
        return StoreStats(num_puts=len(num_asked))

    monkeypatch.setattr("mooncake_kv.store.store_metrics.STATS_AGE_S", 3600.0)
    server = MetricsServer.start(stats, "127.0.0.1", 0)
    texts = [ask(server.port) for _ in range(5)]
    assert len(num_asked) == 1
    assert len(set(texts)) == 1
    monkeypatch.setattr("mooncake_kv.store.store_metrics.STATS_AGE_S", 0.0)
    assert "mooncake_store_puts_total 2\n" in ask(server.port)
    server.close()


def test_help_says_what_is_counted_in_which_unit_and_by_which_label():
    stats = StoreStats(ssd_write_bytes_per_day=1)
    for family in families(stats):
        assert family.help.count(" ") >= 3, family.name
        assert ("bytes" in family.name) is family.help.startswith("Bytes"), family.name
        for (label, value), *_ in family.rows.keys() - {()}:
            assert f"by {label}" in family.help, family.name
            assert label == "tier" or value in family.help, family.name


def test_write_budget_is_shown_if_there_is_a_limit():
    assert "\nmooncake_store_ssd_write_budget_bytes" not in prometheus_text(StoreStats())
    text = prometheus_text(StoreStats(ssd_write_bytes_per_day=9, ssd_budget_bytes=4))
    assert "mooncake_store_ssd_write_budget_bytes 4\n" in text


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST /metrics HTTP/1.1\r\n\r\n",
        b"\x00\xff\r\n\r\n",
        b"\r\n\r\n",
    ],
)
def test_other_paths_are_not_found(served, request_bytes):
    assert ask(served[1], request_bytes).startswith("HTTP/1.1 404 Not Found\r\n")


def test_endless_headers_are_not_read(served):
    with contextlib.suppress(ConnectionError):  # closed before everything was sent
        assert ask(served[1], b"x" * (4 * MAX_HEAD_BYTES)) == ""


def test_silent_connections_block_others_only_until_their_timeout(served, monkeypatch):
    monkeypatch.setattr("mooncake_kv.store.store_metrics.REQUEST_TIMEOUT_S", 0.2)
    _, port = served
    silent = [
        socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(MAX_CONNECTIONS)
    ]
    deadline = threading.Event()
    for _ in range(600):
        try:
            if ask(port).startswith("HTTP/1.1 200"):
                break
        except ConnectionError:
            pass
        deadline.wait(0.05)
    else:
        raise AssertionError("shut out")
    for connection in silent:
        connection.close()
