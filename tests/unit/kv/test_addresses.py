"""The addresses on which an instance listens, and those that it advertises to peers."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import socket
import threading
from typing import Any

import pytest

from mooncake_kv import addresses
from mooncake_kv.addresses import addresses_of, is_own_address, resolve, settle_addresses
from mooncake_kv.cli import main, store_options
from mooncake_kv.config import KVTransferConfig
from mooncake_kv.errors import KVConfigError


def address_of_default_route() -> str | None:
    """The address of the default route; None on a host without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


@pytest.mark.parametrize(
    ("host", "advertised", "expected"),
    [
        ("127.0.0.1", "", ("127.0.0.1", "127.0.0.1")),
        ("127.0.0.1", "10.1.2.3", ("127.0.0.1", "10.1.2.3")),
        ("0.0.0.0", "10.1.2.3", ("0.0.0.0", "10.1.2.3")),
        ("[::1]", "", ("::1", "::1")),
        ("::", "[fd00::1]", ("::", "fd00::1")),
    ],
)
def test_advertised_host_is_configured_or_listening_host(
    host: str, advertised: str, expected: tuple[str, str]
) -> None:
    settled = settle_addresses(KVTransferConfig(host=host, advertise_host=advertised, secret="s"))
    assert (settled.host, settled.advertise_host) == expected
    assert settle_addresses(settled) == settled


def test_names_are_resolved_to_addresses() -> None:
    assert ipaddress.ip_address(resolve("localhost", "--kv-host")).is_loopback
    with pytest.raises(KVConfigError, match="--kv-host 'no such host' has no address"):
        resolve("no such host", "--kv-host")


def test_listening_on_all_addresses_advertises_the_default_route_or_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = KVTransferConfig(host="0.0.0.0", secret="s")
    expected = address_of_default_route()
    if expected is None:
        with pytest.raises(KVConfigError, match="give one with --kv-advertise-host"):
            settle_addresses(config)
        return
    with caplog.at_level(logging.WARNING):
        assert settle_addresses(config).advertise_host == expected
    assert f"advertising {expected}, the address of the default route" in caplog.text


@pytest.mark.parametrize("advertised", ["0.0.0.0", "::"])
def test_wildcard_address_is_not_connectable(advertised: str) -> None:
    with pytest.raises(KVConfigError, match="peers can't connect to --kv-advertise-host"):
        settle_addresses(KVTransferConfig(advertise_host=advertised))


PUBLIC = ("0.0.0.0", "192.0.2.7", "::")


@pytest.mark.parametrize("host", PUBLIC)
def test_without_secret_only_loopback_is_allowed(host: str) -> None:
    with pytest.raises(KVConfigError, match=f"--kv-host {host} without a secret.*--kv-allow-no"):
        settle_addresses(KVTransferConfig(host=host, advertise_host="192.0.2.9"))


@pytest.mark.parametrize("host", PUBLIC)
def test_allow_no_secret_warns(host: str, caplog: pytest.LogCaptureFixture) -> None:
    config = KVTransferConfig(host=host, advertise_host="192.0.2.9", allow_no_secret=True)
    settle_addresses(config)
    assert f"anyone who can reach {host} may read and write this instance's KV" in caplog.text


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1"])
def test_loopback_warning_names_users_of_the_host(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    settle_addresses(KVTransferConfig(host=host))
    assert "no --kv-secret-file: every user of this host may read" in caplog.text


def test_with_a_secret_there_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    settle_addresses(KVTransferConfig(host="192.0.2.7", secret="s"))
    assert not caplog.records


def test_store_accepts_the_option_that_its_error_advises(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["store", "--dram", "1MiB", "--port", "0", "--kv-host", "0.0.0.0"]) == 1
    advised = re.findall("--[a-z-]+[a-z]", capsys.readouterr().err)
    assert "--kv-allow-no-secret" in advised
    assert set(advised) <= {option.flag for option in store_options()}


def test_slow_name_server_delays_only_the_names_that_it_resolves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests may name side channels, and the loop resolves their names on its own threads."""
    released, resolve = threading.Event(), socket.getaddrinfo

    def slow(host: str, *args: Any, flags: int = 0, **named: Any) -> Any:
        if host.endswith(".example") and not flags & socket.AI_NUMERICHOST:
            released.wait(30)
            raise socket.gaierror(socket.EAI_AGAIN, "from a test")
        return resolve(host, *args, flags=flags, **named)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        named = [asyncio.ensure_future(loop.getaddrinfo(f"{n}.example", 1)) for n in range(64)]
        await asyncio.sleep(0)
        try:
            assert await asyncio.wait_for(addresses_of("127.0.0.1"), 10) == ["127.0.0.1"]
            assert "127.0.0.1" in await asyncio.wait_for(addresses_of("localhost"), 10)
            assert await asyncio.wait_for(is_own_address("127.0.0.1"), 10)
            monkeypatch.setattr(addresses, "LOOKUP_TIMEOUT_S", 0.01)
            assert not await asyncio.wait_for(is_own_address("own.example"), 10)
        finally:
            released.set()
            await asyncio.gather(*named, return_exceptions=True)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    asyncio.run(main())
