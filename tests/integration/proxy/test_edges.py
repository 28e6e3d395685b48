"""The client side's edges: keys, limits, TLS, IPv6, pipelining, odd requests."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from support.proxy_fakes import FakeDeployment, fake_deployment, text_of
from support.proxy_fakes_client import BODY, events_of, make_certificate, post, streamed_text

from mooncake_proxy import __version__
from mooncake_proxy.api.proxied_request import RequestContext
from mooncake_proxy.config import AdmissionConfig, TlsConfig
from mooncake_proxy.errors import ConfigError
from mooncake_proxy.http1.http_wire import Origin
from mooncake_proxy.http1.server_connection import ServerLimits
from mooncake_proxy.pool.instances import InstanceSpec, Role
from mooncake_proxy.routing.router import RequestRouter


async def raw(s: FakeDeployment, data: bytes) -> bytes:
    """Send bytes and return everything received until the proxy closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", s.app.port)
    writer.write(data)
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    return answer


def test_api_keys() -> None:
    async def main() -> None:
        async with fake_deployment(api_keys=frozenset({"k1", "k2"})) as s:
            client = httpx.AsyncClient(base_url=s.url)
            async with client:
                for headers in ({}, {"authorization": "Bearer no"}, {"authorization": "Basic k1"}):
                    answer = await client.post("/v1/completions", json=BODY, headers=headers)
                    assert answer.status_code == 401
                    assert answer.json()["error"]["code"] == "invalid_api_key"
                ok = {"authorization": "Bearer k2"}
                answer = await client.post("/v1/completions", json=BODY, headers=ok)
                assert answer.status_code == 200
                assert (await client.get("/v1/models")).status_code == 401
                assert (await client.get("/health")).status_code == 200

    uvloop.run(main())


def test_paths_that_monitors_of_vllm_ask_for() -> None:
    async def main() -> None:
        async with (
            fake_deployment(api_keys=frozenset({"k1"})) as s,
            httpx.AsyncClient(base_url=s.url) as client,
        ):
            assert (await client.get("/version")).json() == {"version": __version__}
            for method in ("GET", "POST"):
                assert (await client.request(method, "/ping")).json()["status"] == "ok"
            assert (await client.get("/load")).json() == {"server_load": 0}
            s.decodes[0].behaviour.token_delay_s = 0.2
            body = BODY | {"stream": True, "max_tokens": 5}
            headers = {"authorization": "Bearer k1"}
            async with client.stream(
                "POST", "/v1/completions", json=body, headers=headers
            ) as answer:
                await anext(answer.aiter_bytes())
                assert (await client.get("/load")).json() == {"server_load": 1}

    uvloop.run(main())


@pytest.mark.parametrize("chunked", [False, True])
def test_oversized_body_returns_413(chunked: bool) -> None:
    async def main() -> None:
        async with fake_deployment(server=ServerLimits(max_body_bytes=1000)) as s:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
            if chunked:
                data = head + b"transfer-encoding: chunked\r\n\r\n7d0\r\n" + b"x" * 2000
            else:
                data = head + b"content-length: 2000\r\n\r\n"
            answer = await raw(s, data)
            assert answer.startswith(b"HTTP/1.1 413 ")
            assert b"at most 1000" in answer
            assert s.prefill.generated == []

    uvloop.run(main())


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"NONSENSE\r\n\r\n", 400),
        (b"GET /nope HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", 404),
        (b"GET /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", 405),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 70_000 + b"\r\nhost: x\r\n", 431),
        (
            b"POST /v1/completions HTTP/1.1\r\nconnection: close\r\ncontent-length: 1\r\n\r\n{",
            400,
        ),
    ],
)
def test_unusual_requests_get_a_response(data: bytes, status: int) -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            answer = await raw(s, data)
            assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:100]
            assert b'{"error":{"message":' in answer

    uvloop.run(main())


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/chat/completions", "/chat/completions; did you mean /v1/chat/completions?"),
        ("/v1/v1/completions", "/v1/v1/completions; did you mean /v1/completions?"),
        ("/v1/model", "/v1/model; did you mean /v1/models?"),
        ("/healthz", "/healthz; did you mean /health?"),
        ("/conductor/reservation", "/conductor/reservation; did you mean /conductor/reservations?"),
        ("/nope", "/nope"),
        ("/" + "x" * 9000, "/" + "x" * 99),
    ],
)
def test_unknown_path_is_answered_with_the_nearest(path: str, message: str) -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            request = f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
            answer = (await raw(s, request.encode())).decode()
            assert answer.startswith("HTTP/1.1 404 ")
            assert f'"message":"no such path here: {message}"' in answer

    uvloop.run(main())


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"OPTIONS /v1/completions HTTP/1.1\r\nhost: x\r\n", b"405 Method Not Allowed\r\n"),
        (b"OPTIONS /v1/completions HTTP/1.1\r\nhost: x\r\n", b"\r\nallow: POST\r\n"),
        (b"GET http://proxy:8000/health HTTP/1.1\r\nhost: x\r\n", b"200 OK\r\n"),
        (b"GET HTTPS://proxy HTTP/1.1\r\nhost: x\r\n", b"text/html"),
        (b"GET /health HTTP/1.0\r\n", b"\r\nconnection: close\r\n"),
    ],
)
def test_responses_follow_the_protocol(data: bytes, wanted: bytes) -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            answer = await raw(s, data + b"connection: close\r\n\r\n")
            assert wanted in answer.partition(b"\r\n\r\n")[0] + b"\r\n", answer[:200]

    uvloop.run(main())


def test_connection_of_http_1_0_is_kept_if_asked_for() -> None:
    """Its clients wait for the end of the connection unless the response says so."""

    async def main() -> None:
        async with fake_deployment() as s:
            kept = b"GET /health HTTP/1.0\r\nconnection: keep-alive\r\n\r\n"
            first, second = (await raw(s, kept + b"GET /health HTTP/1.0\r\n\r\n")).split(b"HTTP/")[
                1:
            ]
            assert b"\r\nconnection: keep-alive\r\n" in first
            assert b"\r\nconnection: close\r\n" in second

    uvloop.run(main())


def test_slow_request_returns_408() -> None:
    async def main() -> None:
        async with fake_deployment(server=ServerLimits(head_timeout_s=0.2)) as s:
            assert (await raw(s, b"POST /v1/completions HTTP/1.1\r\n")).startswith(b"HTTP/1.1 408 ")

    uvloop.run(main())


def test_pipelined_requests_are_answered_in_order() -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            one = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
            last = b"GET /nope HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
            answer = await raw(s, one + one + last)
            statuses = [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]]
            assert statuses == [b"200", b"200", b"404"]

    uvloop.run(main())


def test_http_1_0_response_is_not_chunked() -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            body = b'{"prompt":"x","max_tokens":3,"stream":true}'
            head = b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body)
            headers, _, rest = (await raw(s, head + body)).partition(b"\r\n\r\n")
            assert b"transfer-encoding" not in headers
            assert streamed_text(events_of(rest.decode())) == text_of(3)

    uvloop.run(main())


def test_full_queue_returns_429_with_retry_after() -> None:
    async def main() -> None:
        admission = AdmissionConfig(max_running=1, max_waiting=1, max_wait_s=10)
        async with fake_deployment(admission=admission) as s:
            s.prefill.behaviour.delay_s = 0.2
            answers = await asyncio.gather(*(post(s, BODY) for _ in range(4)))
            statuses = sorted(answer.status_code for answer in answers)
            assert statuses == [200, 200, 429, 429]
            refused = next(answer for answer in answers if answer.status_code == 429)
            assert int(refused.headers["retry-after"]) >= 1
            assert s.app.admission.num_running == 0

    uvloop.run(main())


def test_request_deadline_is_enforced() -> None:
    async def main() -> None:
        async with fake_deployment(request_timeout_s=0.2, local_prefill=False) as s:
            s.prefill.behaviour.hangs = True
            answer = await post(s, BODY)
            assert answer.status_code == 504

    uvloop.run(main())


def test_client_may_shorten_its_deadline() -> None:
    async def main() -> None:
        async with (
            fake_deployment(local_prefill=False) as s,
            httpx.AsyncClient(base_url=s.url) as client,
        ):
            s.prefill.behaviour.hangs = True

            async def ask(limit: str) -> httpx.Response:
                headers = {"X-Request-Timeout": limit}
                return await client.post("/v1/completions", json=BODY, headers=headers)

            assert (await ask("0.2")).status_code == 504
            answers = [await ask(limit) for limit in ("soon", "-1", "nan", "inf")]
            assert [answer.status_code for answer in answers] == [400] * 4
            assert answers[0].json()["error"]["message"] == (
                "X-Request-Timeout 'soon': wanted a positive number of seconds"
            )

    uvloop.run(main())


@pytest.mark.parametrize("given", [{"timeout": 0.05}, {"X-Request-Timeout": "0.05"}])
def test_expired_client_deadlines_eject_no_instance(given: dict[str, Any]) -> None:
    in_body = BODY | given if "timeout" in given else BODY
    headers = {} if "timeout" in given else given

    async def main() -> None:
        async with fake_deployment() as s, httpx.AsyncClient(base_url=s.url) as client:
            s.decode.behaviour.hangs = True
            for _ in range(5):  # more than --eject-after
                answer = await client.post("/v1/completions", json=in_body, headers=headers)
                assert answer.status_code == 504
                error = answer.json()["error"]
                assert (error["type"], error["code"]) == ("timeout", "deadline_exceeded")
            s.decode.behaviour.hangs = False
            assert (await post(s, BODY)).status_code == 200

    uvloop.run(main())


def test_prefill_that_used_whole_deadline_is_not_repeated_on_decoder() -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            s.prefill.behaviour.hangs = True
            answer = await post(s, BODY | {"timeout": 0.05})
            assert answer.json()["error"]["code"] == "deadline_exceeded"
            assert not s.decode.generated

    uvloop.run(main())


def test_tls_and_ipv6(tmp_path: Path) -> None:
    async def main() -> None:
        certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
        make_certificate(certificate, key)
        tls = TlsConfig(str(certificate), str(key))
        async with fake_deployment(host="::1", tls=tls) as s:
            trust = ssl.create_default_context(cafile=str(certificate))
            url = f"https://[::1]:{s.app.port}"
            async with httpx.AsyncClient(base_url=url, verify=trust) as client:
                answer = await client.post("/v1/completions", json=BODY)
                assert answer.json()["choices"][0]["text"] == text_of(5)

    uvloop.run(main())


@pytest.mark.parametrize("is_trusted", [True, False])
def test_instances_behind_tls(tmp_path: Path, is_trusted: bool) -> None:
    """A second proxy with a certificate acts as the instance."""

    async def main() -> None:
        certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
        make_certificate(certificate, key)
        behind = TlsConfig(str(certificate), str(key))
        trust = TlsConfig(upstream_ca=str(certificate) if is_trusted else None)
        async with (
            fake_deployment(host="::1", tls=behind) as s,
            fake_deployment(num_prefills=0, num_decodes=0, tls=trust) as front,
        ):
            origin = Origin("https", "::1", s.app.port)
            front.app.router.pool.add(InstanceSpec(origin, Role.BOTH))
            answer = await post(front, BODY)
            if is_trusted:
                assert answer.json()["choices"][0]["text"] == text_of(5)
            else:
                assert answer.status_code == 502
                assert "certificate" in answer.json()["error"]["message"]

    uvloop.run(main())


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://[::1]:81/x/", Origin("http", "::1", 81, "/x")),
        ("host:9", Origin("http", "host", 9)),
        ("https://h", Origin("https", "h", 443)),
        ("http://bücher.svc:1", Origin("http", "xn--bcher-kva.svc", 1)),
    ],
)
def test_instance_urls(url: str, origin: Origin) -> None:
    assert Origin.parse(url) == origin
    assert Origin.parse(str(origin)) == origin


@pytest.mark.parametrize("url", ["foo", "foo/v1", "", "http://", "ftp://x", "foo:bar"])
def test_invalid_url_error_names_expected_form(url: str) -> None:
    with pytest.raises(ConfigError, match=f"{url!r}.*wanted http://HOST:PORT"):
        Origin.parse(url)


def test_openai_client() -> None:
    import openai

    async def main() -> None:
        async with fake_deployment() as s, httpx.AsyncClient() as http:
            client = openai.AsyncOpenAI(base_url=f"{s.url}/v1", api_key="x", http_client=http)
            messages: list[Any] = [{"role": "user", "content": "hi"}]
            whole = await client.chat.completions.create(model="m", messages=messages, max_tokens=4)
            assert whole.choices[0].message.content == text_of(4)
            stream = await client.chat.completions.create(
                model="m", messages=messages, max_tokens=4, stream=True
            )
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert "".join(pieces) == text_of(4)

    uvloop.run(main())


def test_admin_port_serves_operator_endpoints() -> None:
    async def main() -> None:
        async with fake_deployment(admin_port=0) as s:
            admin = f"http://127.0.0.1:{s.app.admin_port}"
            async with httpx.AsyncClient() as client:
                for path in ("/", "/view", "/metrics", "/instances"):
                    assert (await client.get(f"{s.url}{path}")).status_code == 404
                for path in ("/", "/view", "/metrics"):
                    assert (await client.get(f"{admin}{path}")).status_code == 200
                for url, hint in ((s.url, ""), (admin, "; did you mean /metrics?")):
                    error = (await client.get(f"{url}/metric")).json()["error"]
                    assert error["message"] == f"no such path here: /metric{hint}"
                assert "instances" not in (await client.get(f"{s.url}/health")).json()
                assert len((await client.get(f"{admin}/health")).json()["instances"]) == 2
                assert (await client.get(f"{s.url}/ready")).status_code == 200
                assert (await client.post(f"{admin}/v1/completions", json=BODY)).status_code == 404
                assert (await client.post(f"{s.url}/v1/completions", json=BODY)).is_success

    uvloop.run(main())


@pytest.mark.parametrize(
    "url",
    ["http://.svc:1", "http://p1..svc:1", f"http://{'x' * 64}:1", "http://p 1:1", "h:1/\u00e9"],
)
def test_invalid_hosts_and_paths_are_rejected(url: str) -> None:
    with pytest.raises(ConfigError, match="instance URL "):
        Origin.parse(url)


@pytest.mark.parametrize(
    "path",
    ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/instances"],
)
def test_body_with_invalid_utf_8_is_rejected_and_counted(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with fake_deployment(admin_keys=frozenset({"secret"})) as s:
            async with httpx.AsyncClient(base_url=s.url) as client:
                body = b'{"model":"\xff","input":"x","messages":[],"max_tokens":1}'
                answer = await client.post(
                    path,
                    content=b'{"url":"\xff"}' if path == "/instances" else body,
                    headers={"authorization": "Bearer secret"},
                )
            assert answer.status_code == 400
            assert "utf-8" in answer.json()["error"]["message"].lower()
            assert s.count("requests", path, "400") == (path != "/instances")

    uvloop.run(main())
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("has_begun", [False, True])
def test_internal_proxy_error_is_answered_and_counted(
    has_begun: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(router: RequestRouter, context: RequestContext) -> None:
        if has_begun:
            context.request.start_stream("text/event-stream", b"", b'data: {"id":"a"}\n\n')
        raise ZeroDivisionError("mine")

    async def main() -> None:
        async with fake_deployment() as s:
            s.app._flow = fail
            answer = await post(s, BODY | {"stream": True})
            status = 200 if has_begun else 500
            assert answer.status_code == status
            error = events_of(answer.text)[-1] if has_begun else answer.json()
            assert error["error"]["message"].startswith("internal error of the proxy")
            assert s.count("requests", "/v1/completions", str(status)) == 1
            assert s.count("stream_errors") == has_begun

    uvloop.run(main())
    assert "ZeroDivisionError: mine" in caplog.text
