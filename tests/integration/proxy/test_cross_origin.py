"""Requests of web pages of other origins (CORS), as an instance answers them."""

from __future__ import annotations

import httpx
import pytest
import uvloop
from support.proxy_fakes import fake_deployment
from support.proxy_fakes_client import BODY

from mooncake_proxy.config import ProxyConfig
from mooncake_proxy.errors import ConfigError
from mooncake_proxy.http1.server_connection import ServerLimits

PAGE = "https://chat.example.com"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}
ALLOWED = "access-control-allow-origin"


@pytest.mark.parametrize(("origins", "allowed"), [((PAGE,), PAGE), (("*",), "*")])
def test_pages_of_allowed_origins_use_the_api(origins: tuple[str, ...], allowed: str) -> None:
    async def main() -> None:
        keys = {"api_keys": frozenset({"secret"}), "admin_keys": frozenset({"admin"})}
        async with (
            fake_deployment(allowed_origins=origins, **keys) as s,
            httpx.AsyncClient(base_url=s.url) as client,
        ):
            preflight = await client.options("/v1/completions", headers=PREFLIGHT)  # without key
            assert (preflight.status_code, preflight.text) == (200, "OK")
            assert preflight.headers[ALLOWED] == allowed
            assert "POST" in preflight.headers["access-control-allow-methods"]
            wanted = preflight.headers["access-control-allow-headers"]
            assert wanted == PREFLIGHT["access-control-request-headers"]
            headers = {"origin": PAGE}
            refused = await client.post("/v1/completions", json=BODY, headers=headers)
            assert refused.status_code == 401
            assert refused.headers[ALLOWED] == allowed  # the page can read why
            headers["authorization"] = "Bearer secret"
            for is_streamed in (False, True):
                body = BODY | {"stream": is_streamed}
                answer = await client.post("/v1/completions", json=body, headers=headers)
                assert answer.status_code == 200
                assert answer.headers[ALLOWED] == allowed
                assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
                assert ("vary" in answer.headers) is (allowed == PAGE)
            other = headers | {"origin": "https://other.example.com"}
            answer = await client.post("/v1/completions", json=BODY, headers=other)
            assert (ALLOWED in answer.headers) is (allowed == "*")
            for path in ("/metrics", "/instances"):  # whatever is of the operator
                assert ALLOWED not in (await client.get(path, headers=headers)).headers
                preflight = await client.options(path, headers=PREFLIGHT)
                assert preflight.status_code == 405
                assert ALLOWED not in preflight.headers

    uvloop.run(main())


@pytest.mark.parametrize("origins", [(), ("https://other.example.com",)])
def test_pages_of_other_origins_do_not(origins: tuple[str, ...]) -> None:
    async def main() -> None:
        async with (
            fake_deployment(allowed_origins=origins) as s,
            httpx.AsyncClient(base_url=s.url) as client,
        ):
            preflight = await client.options("/v1/completions", headers=PREFLIGHT)
            assert preflight.status_code == (400 if origins else 405)
            answer = await client.post("/v1/completions", json=BODY, headers={"origin": PAGE})
            assert answer.status_code == 200
            assert ALLOWED not in preflight.headers
            assert ALLOWED not in answer.headers

    uvloop.run(main())


def test_refused_body_is_explained_to_the_page() -> None:
    async def main() -> None:
        async with (
            fake_deployment(allowed_origins=(PAGE,), server=ServerLimits(max_body_bytes=10)) as s,
            httpx.AsyncClient(base_url=s.url) as client,
        ):
            answer = await client.post("/v1/completions", json=BODY, headers={"origin": PAGE})
            assert answer.status_code == 413
            assert answer.headers[ALLOWED] == PAGE

    uvloop.run(main())


def test_origin_with_a_path_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--allowed-origins 'https://a.example/b': wanted \*"):
        ProxyConfig(allowed_origins=("https://a.example/b",))
