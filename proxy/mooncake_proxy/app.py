"""The proxy as an application: routes, the top of every request, start and stop."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from mooncake_proxy import admin, openai
from mooncake_proxy.access import CLIENT_LEFT, AccessLog, check_key
from mooncake_proxy.call import (
    Call,
    estimate_prompt_tokens,
    forwarded_headers,
    request_id_of,
    time_limit,
)
from mooncake_proxy.config import ProxyConfig
from mooncake_proxy.errors import (
    MethodNotAllowed,
    NotFound,
    ProxyError,
    Refusal,
    ShuttingDown,
)
from mooncake_proxy.flows.pull import pull
from mooncake_proxy.flows.push import push
from mooncake_proxy.health import HealthChecker
from mooncake_proxy.http1.connection import ClientContext
from mooncake_proxy.http1.origin import Origin
from mooncake_proxy.http1.pool import sweep_timeouts
from mooncake_proxy.http1.server import Exchange, ServerContext, ServerProtocol
from mooncake_proxy.http1.wire import header_lines
from mooncake_proxy.kubernetes import KubernetesConfig, KubernetesWatch
from mooncake_proxy.openai import Endpoint
from mooncake_proxy.poolfile import PoolFileWatch
from mooncake_proxy.process import Process
from mooncake_proxy.refusals import answer_error
from mooncake_proxy.rendezvous import PATH as METASERVER_PATH
from mooncake_proxy.router import Router
from mooncake_proxy.share import Share
from mooncake_proxy.stopping import Stop

logger = logging.getLogger(__name__)
Flow = Callable[[Router, Call], Awaitable[None]]
FLOWS: dict[str, Flow] = {"pull": pull, "push": push}
SWEEP_INTERVAL_S = 0.25
DRAIN_POLL_S = 0.02
ENDPOINTS = {endpoint.path.encode(): endpoint for endpoint in Endpoint}


@dataclass(slots=True)
class _Visit:
    """A request, from its top to its line in the access log; `call` once it is understood."""

    exchange: Exchange
    request_id: str
    arrival: float
    call: Call | None = None


class Application:
    """One proxy process. `start` listens, `close` drains and stops."""

    def __init__(self, config: ProxyConfig, share: Share | None = None) -> None:
        self.config = config
        self._share = share
        self.client = ClientContext(limits=config.client, tls=_upstream_tls(config))
        self.process = Process(config, self.client, share)
        self.router = self.process.router
        self.admission = self.process.admission
        self.access = AccessLog(config.access_log)
        self.server = ServerContext(self.handle, config.server)
        self.checker = HealthChecker(config.health, self.router.fleet, self.router.note_verdict)
        self._flow = FLOWS[config.flow]
        self._listener: asyncio.Server | None = None
        # With several workers on one port: where only this one is reached.
        self._own_listener: asyncio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.admin_routes = admin.routes(self.process, self.handle)

    # ------------------------------------------------ life

    async def start(self) -> None:
        """Check the instances once, then listen. ConfigError when the address is taken."""
        for spec in self.config.instances:
            self.router.fleet.add(spec)
        loop = asyncio.get_running_loop()
        await self._follow_sources(loop)
        if self.config.health.interval_s > 0:
            await self.checker.check_all()
            self._tasks.append(loop.create_task(self.checker.run()))
        self._tasks.append(loop.create_task(self._sweep()))
        self._listener = await loop.create_server(
            lambda: ServerProtocol(self.server),
            self.config.host,
            self.config.port,
            ssl=_server_tls(self.config),
            backlog=4096,
            reuse_port=self._share is not None,
        )
        if self._share is not None:
            self._share.open(self.router.fleet, self.router.metrics, self.admission)
            self._tasks.append(loop.create_task(self._share.run()))
            self._own_listener = await loop.create_server(
                lambda: ServerProtocol(self.server), self.config.host, 0
            )
        self.router.listens_at(self._own_url())

    async def _follow_sources(self, loop: asyncio.AbstractEventLoop) -> None:
        """Instances that a file or a cluster declares, now and from now on."""
        if self.config.pool_file is not None:
            file_watch = PoolFileWatch(self.config.pool_file, self.router.fleet)
            file_watch.load()
            self._tasks.append(loop.create_task(file_watch.run()))
        if self.config.kubernetes is not None:
            wanted = KubernetesConfig.parse(self.config.kubernetes, self.config.kubernetes_api)
            cluster_watch = KubernetesWatch(wanted, self.router.fleet)
            await cluster_watch.look()
            self._tasks.append(loop.create_task(cluster_watch.run()))

    def _own_url(self) -> str:
        """Where decode instances reach this very process."""
        if self._own_listener is not None:
            advertised = self.config.advertise_url or f"http://{_in_url(self.config.host)}"
            host = _in_url(Origin.parse(advertised).host)
            return f"http://{host}:{self._own_listener.sockets[0].getsockname()[1]}"
        scheme = "https" if self.config.tls.certificate else "http"
        here = f"{scheme}://{_in_url(self.config.host)}:{self.port}"
        return self.config.advertise_url or here

    @property
    def port(self) -> int:
        """The port that is really listened on (`--port 0` asks for a free one)."""
        assert self._listener is not None
        return int(self._listener.sockets[0].getsockname()[1])

    async def close(self, stop: Stop | None = None) -> None:
        """No new requests; those that run may finish within `shutdown_timeout_s`, unless `stop`
        gets hurried. Who comes meanwhile is told."""
        self.process.is_draining = True
        self.server.is_closing = True
        end = self.router.now() + self.config.shutdown_timeout_s
        while self._is_busy() and self.router.now() < end:
            if stop is not None and stop.is_hurried:
                break
            await asyncio.sleep(DRAIN_POLL_S)
        for listener in (self._listener, self._own_listener):
            if listener is not None:
                listener.close()
        for connection in tuple(self.server.connections):
            connection.cut_off(_answer_cut_off)
        await asyncio.sleep(0)
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task
        await self.router.close()
        if self._share is not None:
            self._share.close()
        self.access.flush()

    def _is_busy(self) -> bool:
        return any(connection.is_busy for connection in self.server.connections)

    async def _sweep(self) -> None:
        """Time limits of both sides, a few times a second instead of a timer per request."""
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            sweep_timeouts(self.client)
            self.router.metrics.settle()
            now = self.router.now()
            for connection in tuple(self.server.connections):
                connection.sweep(now)
            self.access.flush()

    def poll(self) -> None:
        """Raise what ended a background task: a proxy without health checks is no proxy."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()):
                raise error

    # ------------------------------------------------ one request

    def handle(self, exchange: Exchange) -> Coroutine[Any, Any, None]:
        """Top of every request."""
        endpoint = ENDPOINTS.get(exchange.target)
        if endpoint is not None and exchange.method == "POST":
            return self._generate(exchange, endpoint)
        return self._answer_other(exchange)

    async def _answer_other(self, exchange: Exchange) -> None:
        try:
            await self._administer(exchange)
        except Refusal as error:
            answer_error(exchange, error, b"")

    async def _generate(self, exchange: Exchange, endpoint: Endpoint) -> None:
        visit = _Visit(exchange, request_id_of(exchange.headers), self.router.now())
        try:
            if self.config.api_keys:
                check_key(exchange.headers, self.config.api_keys)
            if self.process.is_draining:
                raise ShuttingDown("the proxy is shutting down and takes no new requests")
            visit.call = call = self._call(visit, endpoint)
            if self.router.tokenize is not None:
                await self.router.read_prompt(call, self.router.tokenize)
            self.router.budget.deposit()
            if not self.admission.enter():
                await self._wait_for_place(call)
            try:
                await self._flow(self.router, call)
            finally:
                self.admission.leave()
        except asyncio.CancelledError:
            self.router.metrics.disconnects.add(_stage_of(visit.call))
            exchange.status = CLIENT_LEFT
            self._write_down(visit, None)
            raise
        except ProxyError as error:
            self._answer_error(exchange, error, visit.request_id)
            self._account(visit, error)
        else:
            self._account(visit, None)

    def _call(self, visit: _Visit, endpoint: Endpoint) -> Call:
        exchange, arrival = visit.exchange, visit.arrival
        ask, fields = openai.parse_request(exchange.body)
        call = Call(
            exchange,
            endpoint,
            ask,
            fields,
            visit.request_id,
            arrival,
            arrival + time_limit(exchange.headers, ask, self.config.request_timeout_s),
            estimate_prompt_tokens(endpoint, ask),
            forwarded_headers(exchange.headers),
        )
        self.router.prepare(call)
        return call

    async def _wait_for_place(self, call: Call) -> None:
        began = self.router.now()
        with nullcontext() if call.trace is None else call.trace.stage("queue"):
            await self.admission.queue()
        self.router.metrics.queue_seconds.observe(self.router.now() - began)

    def _answer_error(self, exchange: Exchange, error: ProxyError, request_id: str) -> None:
        if exchange.has_started and not exchange.ended:
            self.router.metrics.stream_errors.add()
        answer_error(exchange, error, header_lines([("x-request-id", request_id)]))

    def _account(self, visit: _Visit, error: ProxyError | None) -> None:
        path = visit.exchange.target.decode("latin-1")
        self.router.metrics.requests.add(path, str(visit.exchange.status))
        self.router.metrics.request_seconds.observe(self.router.now() - visit.arrival, path)
        self._write_down(visit, error)

    def _write_down(self, visit: _Visit, error: ProxyError | None) -> None:
        exchange, call = visit.exchange, visit.call
        elapsed_s = self.router.now() - visit.arrival
        self.access.write(exchange, call, visit.request_id, elapsed_s, error)
        if call is not None and call.trace is not None:
            call.trace.end(exchange.status, error)

    # ------------------------------------------------ everything else

    async def _administer(self, exchange: Exchange) -> None:
        path = exchange.path
        if path.startswith(METASERVER_PATH):
            await self.router.rendezvous.receive(exchange)
            return
        methods = self.admin_routes.get(admin.route_of(path))
        if methods is None:
            raise NotFound(f"no such path: {path}")
        handler = methods.get("GET" if exchange.method == "HEAD" else exchange.method)
        if handler is None:
            raise MethodNotAllowed(f"{exchange.method} {path}: wanted {', '.join(methods)}")
        await handler(exchange)


def _answer_cut_off(exchange: Exchange) -> None:
    answer_error(exchange, ShuttingDown("the proxy is shutting down and can't wait"), b"")


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _stage_of(call: Call | None) -> str:
    if call is None or (not call.prefiller and not call.decoder):
        return "queue"
    if call.is_committed or call.decoder:
        return "decode"
    return "prefill"


def _server_tls(config: ProxyConfig) -> ssl.SSLContext | None:
    if config.tls.certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(config.tls.certificate, config.tls.key)
    return context


def _upstream_tls(config: ProxyConfig) -> ssl.SSLContext | None:
    if not config.tls.upstream_verify:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    if config.tls.upstream_ca is not None:
        return ssl.create_default_context(cafile=config.tls.upstream_ca)
    return None
