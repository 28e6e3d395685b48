"""The proxy application: dispatches requests to their handlers, and starts and stops the server.

`serving.py` runs one `ProxyApplication` per worker process. Each error of a request is caught here,
answered and counted; it never reaches another request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

from msgspec import Raw, Struct

from mooncake_api import FORMAT_PATHS
from mooncake_api.instance_protocol import REGISTER_PATH
from mooncake_proxy.api import admin_routes
from mooncake_proxy.api.admission_queue import NO_KEY, Tenant
from mooncake_proxy.api.api_keys import ApiKey, check_key, holds_key, tenant_salt
from mooncake_proxy.api.error_responses import respond_error
from mooncake_proxy.api.openai_bodies import (
    Fields,
    OpenAIEndpoint,
    ParsedRequest,
    encode,
    parse_request,
)
from mooncake_proxy.api.proxied_request import (
    GENERATED_TOKENS,
    RequestContext,
    UntranslatedRequest,
    estimate_prompt_tokens,
    forwarded_headers,
    request_id_of,
    time_limit,
)
from mooncake_proxy.config import ProxyConfig
from mooncake_proxy.errors import (
    INTERNAL_ERROR,
    BadRequest,
    ConfigError,
    MethodNotAllowed,
    NoSuchPath,
    NotFound,
    ProxyError,
    Refusal,
    ShuttingDown,
    cannot_listen,
)
from mooncake_proxy.flows.metaserver import PATH as METASERVER_PATH
from mooncake_proxy.flows.pull_flow import pull
from mooncake_proxy.flows.push_flow import push
from mooncake_proxy.flows.sglang_flow import sglang
from mooncake_proxy.http1.cross_origin import CrossOriginPolicy, is_preflight
from mooncake_proxy.http1.http_request import HttpRequest
from mooncake_proxy.http1.http_wire import Origin, header_lines, probe_peer
from mooncake_proxy.http1.server_connection import (
    Handler,
    ServerContext,
    ServerProtocol,
)
from mooncake_proxy.http1.tls_contexts import upstream_tls
from mooncake_proxy.http1.upstream_connection import ClientContext
from mooncake_proxy.ops.access_log import CLIENT_CLOSED_REQUEST, AccessLog
from mooncake_proxy.ops.proxy_process import ProxyProcess, ShutdownSignals
from mooncake_proxy.ops.sweep import Sweep
from mooncake_proxy.ops.worker_link import WorkerLink
from mooncake_proxy.pool.health_checks import HealthChecker
from mooncake_proxy.pool.pool_file import PoolFileWatch
from mooncake_proxy.routing.router import RequestRouter

if TYPE_CHECKING:
    from mooncake_proxy.routing.peer_proxies import PeerProxies

logger = logging.getLogger(__name__)
Flow = Callable[[RequestRouter, RequestContext], Awaitable[None]]
FLOWS: dict[str, Flow] = {"pull": pull, "push": push, "sglang": sglang}
DRAIN_POLL_S = 0.02
# The largest body accepted for requests that need none.
SHORT_BODY_BYTES = 64 * 1024
ENDPOINTS = {endpoint.path.encode(): endpoint for endpoint in OpenAIEndpoint}
TRANSLATED = {path.encode(): path for path in FORMAT_PATHS}


class _ActiveRequest(Struct, eq=False):
    """A request from its arrival to its access log line; `context` is set once it is parsed."""

    request: HttpRequest
    request_id: str
    arrival: float
    context: RequestContext | None = None


class ProxyApplication:
    """One proxy process: `start` listens, `close` drains and stops.

    Args:
        config: the checked configuration.
        link: connects this process with the proxy's other workers; None: a single process.
    """

    def __init__(self, config: ProxyConfig, link: WorkerLink | None = None) -> None:
        self.config = config
        self._link = link
        self.client = ClientContext(limits=config.client, tls=upstream_tls(config.tls))
        self.process = ProxyProcess(config, self.client, link)
        self.router = self.process.router
        self.routers = self.process.routers
        self.admission = self.process.admission
        self.access = AccessLog(config.access_log)
        cross_origin = CrossOriginPolicy(config.allowed_origins) if config.allowed_origins else None
        self.server = ServerContext(self.handle, config.server, self.body_limit, cross_origin)
        self._servers = [self.server]
        self.checker = HealthChecker(
            config.health,
            self.process.pools,
            self.routers.note_verdict,
            self.routers.note_restart,
        )
        self._flow = FLOWS[config.flow]
        self._listener: asyncio.Server | None = None
        # Serves the admin paths if they have their own port.
        self._admin_listener: asyncio.Server | None = None
        # Serves the metaserver when several workers share one port: a decode instance has to reach
        # the very process that waits for its post. For early pulls it is opened only once the pool
        # has instances that support them.
        self._own_listener: asyncio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        # Exchanges reservations with proxies on other hosts; None without --peer-proxy.
        self.peers: PeerProxies | None = None
        self.admin_routes = admin_routes.routes(self.process, self.handle)

    # ------------------------------------------------ life

    async def start(self) -> None:
        """Check all instances once, then listen.

        Raises:
            AddressInUse: another program listens on one of the ports.
            ConfigError: a port, or a file that the configuration names, can't be used.
        """
        for spec in self.config.instances:
            self.process.pools.add(spec)
        loop = asyncio.get_running_loop()
        await self._watch_sources(loop)
        if self._link is not None:
            self._link.open(self.routers, self.admission, self.process.tenants.limits)
            self._tasks.append(loop.create_task(self._link.run()))
        self._start_peer_exchange(loop)
        if self.config.health.interval_s > 0:
            await self.checker.check_all()
        config = self.config
        self._listener = await self._listen(self.server, config.port)
        if config.admin_port is not None:
            admin = self._server(self._answer_admin)
            self._admin_listener = await self._listen(admin, config.admin_port)
        if self._link is None or config.flow == "push":
            await self._open_metaserver()
        # Only now, so that a port that can't be used ends the program without a check in flight.
        if config.health.interval_s > 0:
            self._tasks.append(loop.create_task(self.checker.run()))
        sweep = Sweep(
            self.process, self.server.connections, self.access, self._try_to_open_metaserver
        )
        self._tasks.append(loop.create_task(sweep.run()))
        self._tasks.append(loop.create_task(self.process.keep_history()))
        self._tasks.append(loop.create_task(self.process.watch_files()))

    def _start_peer_exchange(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start to exchange reservations with proxies on other hosts, if any are configured."""
        conductor = self.config.conductor
        sharing = self.routers.share_reservations() if conductor and conductor.peers else None
        if conductor is None or sharing is None:
            return
        from mooncake_proxy.routing.peer_proxies import PeerProxies  # needs numpy

        self.peers = peers = PeerProxies(
            conductor.peers, conductor.peer_secret, sharing, self.client
        )
        if self._link is not None:
            peers.forward = self._link.send_peer_news
            self._link.on_peer_news = peers.apply
        self._tasks.append(loop.create_task(peers.run()))

    async def _open_metaserver(self) -> None:
        """Let decode instances post to this process. Until then no request is pulled early."""
        if self._link is not None and self.config.has_metaserver:
            own = self._server(self._answer_metaserver)
            self._own_listener = await self._listen(own, 0)
        self.router.metaserver.set_own_url(self._own_url())

    async def _try_to_open_metaserver(self) -> bool:
        """Open the metaserver while requests are running; they continue if this fails.

        Returns:
            False if no port could be opened.
        """
        try:
            await self._open_metaserver()
        except ConfigError as exc:
            logger.warning("early pulls are disabled: can't open the metaserver: %s", exc)
            return False
        return True

    def _server(self, handler: Handler) -> ServerContext:
        """Context of another listener. Its connections are drained and swept with all others."""
        server = ServerContext(handler, self.config.server, self.body_limit)
        server.connections = self.server.connections
        self._servers.append(server)
        return server

    async def _listen(self, server: ServerContext, port: int) -> asyncio.Server:
        certificate = self.process.certificate
        try:
            listener = await asyncio.get_running_loop().create_server(
                lambda: ServerProtocol(server),
                self.config.host,
                port,
                ssl=None if certificate is None else certificate.context,
                backlog=4096,
                reuse_port=self._link is not None,
            )
        except OSError as exc:
            raise cannot_listen(self.config.host, port, exc) from exc
        for sock in listener.sockets:
            probe_peer(sock, int(server.limits.write_timeout_s), is_reader=True)
        return listener

    async def _watch_sources(self, loop: asyncio.AbstractEventLoop) -> None:
        """Add the instances that the pool file or the cluster declares, and watch for changes."""
        if self.config.pool_file is not None:
            file_watch = PoolFileWatch(self.config.pool_file, self.process.pools)
            file_watch.load()
            self._tasks.append(loop.create_task(file_watch.run()))
        if self.config.kubernetes is not None:
            from mooncake_proxy.pool.kubernetes import KubernetesConfig, KubernetesWatch

            wanted = KubernetesConfig.parse(self.config.kubernetes, self.config.kubernetes_api)
            defaults = self.config.instance_defaults
            cluster_watch = KubernetesWatch(wanted, self.process.pools, defaults)
            await cluster_watch.poll_once()
            self._tasks.append(loop.create_task(cluster_watch.run()))

    def _own_url(self) -> str:
        """The URL at which decode instances reach this very process, not another worker."""
        scheme = "https" if self.config.tls.certificate else "http"
        if self._own_listener is not None:
            advertised = self.config.advertise_url or f"http://{_in_url(self.config.host)}"
            host = _in_url(Origin.parse(advertised).host)
            return f"{scheme}://{host}:{_port_of(self._own_listener)}"
        here = f"{scheme}://{_in_url(self.config.host)}:{self.port}"
        return self.config.advertise_url or here

    @property
    def port(self) -> int:
        """The port that is listened on (with `--port 0`, the one that the kernel chose)."""
        assert self._listener is not None
        return _port_of(self._listener)

    @property
    def admin_port(self) -> int | None:
        """The port of the admin listener; None if the admin paths have no port of their own."""
        return None if self._admin_listener is None else _port_of(self._admin_listener)

    async def close(self, stop: ShutdownSignals | None = None) -> None:
        """Refuse new requests, wait for the running ones and until their clients have read the
        responses, then stop.

        Requests that still run after `shutdown_timeout_s`, or at the second shutdown signal of
        `stop`, are cut off.
        """
        self.process.is_draining = True
        for server in self._servers:
            server.is_closing = True
        end = self.router.now() + self.config.shutdown_timeout_s
        while (
            any(connection.is_busy for connection in self.server.connections)
            and self.router.now() < end
        ):
            if stop is not None and stop.is_forced:
                break
            await asyncio.sleep(DRAIN_POLL_S)
        for listener in (self._listener, self._admin_listener, self._own_listener):
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
        await self.routers.close()
        if self._link is not None:
            self._link.close()
        self.access.flush()

    def poll(self) -> None:
        """Re-raise the exception of a background task that failed.

        The proxy must not keep running without its health checks, for example.
        """
        self.routers.poll()
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()):
                raise error

    # ------------------------------------------------ one request

    def handle(self, request: HttpRequest) -> Coroutine[Any, Any, None]:
        """Return the coroutine that answers `request`."""
        endpoint = ENDPOINTS.get(request.target)
        if endpoint is not None and request.method == "POST":
            return self._generate(request, endpoint)
        format_path = TRANSLATED.get(request.target)
        if format_path is not None and request.method == "POST":
            request.translation = UntranslatedRequest(format_path)
            return self._generate(request, OpenAIEndpoint.CHAT)
        return self._answer_other(request)

    def body_limit(self, request: HttpRequest) -> int:
        """Largest body in bytes that is read for this request, judged by its head.

        Clients without credentials must not make the proxy buffer large bodies. 0: the request is
        answered without reading its body.
        """
        config = self.process.config  # its keys may change
        longest, keys = config.server.max_body_bytes, config.api_keys
        if not keys and request.target in ENDPOINTS:
            return longest
        path = request.path
        if path.startswith(METASERVER_PATH):
            return longest if self.router.metaserver.is_open(path) else 0
        if path == admin_routes.INSTANCES_PATH:
            return longest if holds_key(request.headers, config.admin_keys) else 0
        if path == admin_routes.RESERVATIONS_PATH:
            is_peer = self.peers is not None and self.peers.is_peer(request.headers)
            return longest if is_peer else 0
        if path == REGISTER_PATH:
            is_known = self.process.registrations.is_known(request.headers)
            return SHORT_BODY_BYTES if is_known else 0
        if path not in admin_routes.BODY_PATHS:
            return min(longest, SHORT_BODY_BYTES)
        return longest if not keys or holds_key(request.headers, keys) else 0

    async def _answer_other(self, request: HttpRequest) -> None:
        try:
            if request.path in admin_routes.ADMIN_PATHS:
                if self.config.admin_port is not None:
                    raise NotFound(f"no such path here: {request.path} (--admin-port)")
                request.cross_origin_headers = b""  # whatever page of another origin asks
            elif self.server.cross_origin is not None and is_preflight(request):
                self.server.cross_origin.answer_preflight(request)
                return
            await self._handle_other(request)
        except Refusal as error:
            respond_error(request, error, b"")

    async def _answer_admin(self, request: HttpRequest) -> None:
        """Answer a request to the admin port."""
        try:
            served = {*admin_routes.ADMIN_PATHS, "/health", "/ready"}
            if request.path not in served:
                raise NoSuchPath(request.path, served)
            request.is_admin = True
            await self._handle_other(request)
        except Refusal as error:
            respond_error(request, error, b"")

    async def _answer_metaserver(self, request: HttpRequest) -> None:
        """Answer a request to a worker's own metaserver port."""
        try:
            if not request.path.startswith(METASERVER_PATH):
                raise NoSuchPath(request.path, ())
            await self.router.metaserver.receive(request)
        except Refusal as error:
            respond_error(request, error, b"")

    async def _generate(self, request: HttpRequest, endpoint: OpenAIEndpoint) -> None:
        active = _ActiveRequest(request, request_id_of(request.headers), self.router.now())
        failure: ProxyError | None = None
        try:
            await self._serve(active, endpoint)
        except asyncio.CancelledError:
            self.router.metrics.disconnects.add(_stage_of(active.context))
            request.status = CLIENT_CLOSED_REQUEST
            self._end(active, self.router.now() - active.arrival, None)
            raise
        except ProxyError as error:
            failure = error
        except Exception:
            logger.exception("request %s: internal error", active.request_id)
            failure = Refusal(INTERNAL_ERROR)
            request.keep_alive = False
        if failure is not None:
            self._answer_error(active, failure)
        self._account(active, failure)

    async def _serve(self, active: _ActiveRequest, endpoint: OpenAIEndpoint) -> None:
        """Serve one request: check its key, wait for admission, run the flow."""
        request, admission = active.request, self.admission
        tenant = self._check_key(request) if self.process.config.api_keys else None
        if self.process.is_draining:
            raise ShuttingDown("the proxy is shutting down and takes no new requests")
        if isinstance(request.translation, UntranslatedRequest):
            await request.translation.translate(request)
        active.context = context = self._context(active, endpoint)
        router = self.routers.of_model(context.parsed.model)
        context.tenant = tenant
        router.prepare(context)
        share: Tenant = NO_KEY if tenant is None else tenant
        if router.prompt_tokens is not None:
            admission.check_room(share)
        if tenant is not None:
            self.process.tenants.begin(tenant, context)
        if router.prompt_tokens is not None:
            estimate = context.cost_tokens
            await router.tokenize_prompt(context, router.prompt_tokens)
            self.process.tenants.recount(context, estimate)
        router.budget.deposit()
        if not admission.enter(share, context.cost_tokens if admission.is_bounded else 0):
            await self._wait_in_queue(context, share)
        try:
            await self._flow(router, context)
        finally:
            unspent = 0 if tenant is None else context.cost_tokens - context.spent_tokens
            admission.leave(share, unspent)
            if router.conductor is not None:
                router.conductor.ended(context)
        if self.router.suspects.by_hash:
            self.router.suspects.clear(context.client_body)

    def _check_key(self, request: HttpRequest) -> ApiKey | None:
        """The tenant of the request's API key, or None if the keys file has no entry for it.

        Raises:
            Unauthorized: there is no valid key.
        """
        check_key(request.headers, self.process.config.api_keys)
        return self.process.tenants.of(request.headers)

    def _context(self, active: _ActiveRequest, endpoint: OpenAIEndpoint) -> RequestContext:
        request, arrival = active.request, active.arrival
        client_body = request.body
        parsed, fields = parse_request(client_body)
        if parsed.request_id is not None:
            active.request_id = request_id_of(request.headers, parsed.request_id)
        if parsed.priority is not None or self.config.cache_salt_per_key:
            self._limit_tenant(request, parsed, fields)
        context = RequestContext(
            request,
            endpoint,
            parsed,
            fields,
            active.request_id,
            arrival,
            arrival + time_limit(request.headers, parsed, self.config.request_timeout_s),
            estimate_prompt_tokens(endpoint, parsed),
            forwarded_headers(request.headers),
            client_body=client_body,
        )
        if context.continues_answer:
            raise BadRequest(
                f"{GENERATED_TOKENS} is for instances: the proxy itself continues streams "
                "(--migrate-streams); leave it out",
                param=GENERATED_TOKENS,
            )
        if self.router.suspects.by_hash:
            self.router.check_suspect(context)
        return context

    def _limit_tenant(self, request: HttpRequest, parsed: ParsedRequest, fields: Fields) -> None:
        """Override body fields that would let one client gain at the expense of others."""
        config, edits = self.config, {}
        if parsed.priority is not None and parsed.priority < config.min_priority:
            parsed.priority = config.min_priority
            edits["priority"] = Raw(encode(parsed.priority))
        if config.cache_salt_per_key:
            parsed.cache_salt = tenant_salt(request.headers, parsed.cache_salt)
            edits["cache_salt"] = Raw(encode(parsed.cache_salt))
        if edits:
            fields.update(edits)
            request.body = encode(fields)

    async def _wait_in_queue(self, context: RequestContext, share: Tenant) -> None:
        began = self.router.now()
        with nullcontext() if context.trace is None else context.trace.stage("queue"):
            await self.admission.queue(share, context.cost_tokens)
        self.router.metrics.queue_seconds.observe(self.router.now() - began)

    def _answer_error(self, active: _ActiveRequest, error: ProxyError) -> None:
        request, context = active.request, active.context
        if request.has_started and not request.ended:
            self.router.metrics.stream_errors.add()
        headers = header_lines([("x-request-id", active.request_id)])
        respond_error(request, error, headers + (context.limit_headers if context else b""))

    def _account(self, active: _ActiveRequest, error: ProxyError | None) -> None:
        """Update the metrics for an answered request."""
        request, context, router = active.request, active.context, self.router
        elapsed_s = router.now() - active.arrival
        path = request.target.decode("latin-1")
        router.metrics.requests.add(path, str(request.status))
        router.metrics.request_seconds.observe(elapsed_s, path)
        if context is not None and context.parsed.stream and not 400 <= request.status < 500:
            router.count_objectives(context, is_whole=error is None)
        self._end(active, elapsed_s, error)

    def _end(self, active: _ActiveRequest, elapsed_s: float, error: ProxyError | None) -> None:
        """Finish a request: write the access log, settle its key's rate limits, end its trace."""
        request, context = active.request, active.context
        self.access.write(request, context, active.request_id, elapsed_s, error)
        if context is None:
            return
        if context.tenant is not None:
            self.process.tenants.end(context)
        if context.trace is not None:
            if context.routed is not None:
                context.trace.note_decision(context.routed.record())
            context.trace.end(request.status, error)

    # ------------------------------------------------ everything else

    async def _handle_other(self, request: HttpRequest) -> None:
        path = request.path
        if path.startswith(METASERVER_PATH):
            await self.router.metaserver.receive(request)
            return
        if path == admin_routes.RESERVATIONS_PATH:
            self._receive_reservations(request)
            return
        methods = self.admin_routes.get(admin_routes.route_of(path))
        if methods is None:
            elsewhere = () if self.config.admin_port is None else admin_routes.ADMIN_PATHS
            served = {*self.admin_routes, admin_routes.RESERVATIONS_PATH}
            raise NoSuchPath(path, served.difference(elsewhere))
        handler = methods.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            raise MethodNotAllowed(request.method, path, methods)
        await handler(request)

    def _receive_reservations(self, request: HttpRequest) -> None:
        """POST /conductor/reservations: process the reservations of a proxy on another host."""
        if self.peers is None:
            raise NotFound("this proxy has no peers: start it with --peer-proxy")
        if request.method != "POST":
            raise MethodNotAllowed(request.method, request.path, ("POST",))
        self.peers.receive(request.headers, request.body)
        request.respond(200, b"{}", "application/json")


def _answer_cut_off(request: HttpRequest) -> None:
    respond_error(request, ShuttingDown("the proxy is shutting down: request cut off"), b"")


def _port_of(listener: asyncio.Server) -> int:
    return int(listener.sockets[0].getsockname()[1])


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _stage_of(context: RequestContext | None) -> str:
    if context is None or (not context.prefiller and not context.decoder):
        return "queue"
    if context.is_committed or context.decoder:
        return "decode"
    return "prefill"
