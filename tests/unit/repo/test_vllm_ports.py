"""Ports for the instances that tests with vLLM start."""

from __future__ import annotations

from pathlib import Path

from support.deploy import load_script

serving = load_script("vllm_serving")


def test_no_connection_and_no_other_child_gets_a_port() -> None:
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [serving.free_port() for _ in range(500)]
    assert len(set(ports)) == len(ports)
    assert max(ports) < max(ephemeral, 32_000)  # unless this host's ephemeral ports begin below
