"""Everything but generation: models, tokens, health, metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec

from mooncake_proxy import __version__, openai, page
from mooncake_proxy.access import check_key
from mooncake_proxy.call import forwarded_headers, request_id_of
from mooncake_proxy.errors import BadRequest, ConfigError, Forbidden, Rejected, UpstreamError
from mooncake_proxy.http1.server import Exchange
from mooncake_proxy.http1.wire import header_lines
from mooncake_proxy.instances import Instance, Role
from mooncake_proxy.membership import Change
from mooncake_proxy.metrics import gauge_lines
from mooncake_proxy.process import Process
from mooncake_proxy.refusals import answer_error

Handler = Callable[[Exchange], Awaitable[None]]
Routes = dict[str, dict[str, Handler]]
ANSWER_TIMEOUT_S = 10.0
# Of every path below it: one model's card.
MODEL_PATH = "/v1/models/"


def routes(process: Process, handle: Handler) -> Routes:
    """Path -> method -> handler. `handle` is the top of every request."""
    surface = Surface(process, handle)
    generating: Routes = {endpoint.path: {"POST": surface.no_query} for endpoint in openai.Endpoint}
    return {
        "/": {"GET": surface.page},
        "/view": {"GET": surface.view},
        "/health": {"GET": surface.health},
        "/ready": {"GET": surface.ready},
        "/metrics": {"GET": surface.metrics},
        "/v1/models": {"GET": surface.ask_instance},
        MODEL_PATH: {"GET": surface.ask_instance},
        "/tokenize": {"POST": surface.ask_instance},
        "/detokenize": {"POST": surface.ask_instance},
        "/instances": {"GET": surface.instances, "POST": surface.change},
        **generating,
    }


def route_of(path: str) -> str:
    """The route that serves a path."""
    return MODEL_PATH if path.startswith(MODEL_PATH) else path


def respond_json(exchange: Exchange, status: int, value: Any) -> None:
    """A JSON answer."""
    exchange.respond(status, openai.encode(value), "application/json")


class Surface:
    """Handlers of the read-only paths."""

    def __init__(self, process: Process, handle: Handler) -> None:
        self._process = process
        self._handle = handle
        self._router = process.router

    async def no_query(self, exchange: Exchange) -> None:
        """A generating path that came with a query string: the query means nothing there."""
        exchange.target = exchange.path.encode("latin-1")
        await self._handle(exchange)

    async def page(self, exchange: Exchange) -> None:
        """The live page."""
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        headers = header_lines([("content-security-policy", policy + "connect-src 'self'")])
        exchange.respond(200, page.html(), "text/html; charset=utf-8", headers)

    async def view(self, exchange: Exchange) -> None:
        """The numbers of the live page."""
        instances = [facts_of(instance) for instance in self._router.fleet]
        respond_json(exchange, 200, page.view(self._process, instances))

    async def health(self, exchange: Exchange) -> None:
        """200 while the process serves at all."""
        instances = [facts_of(instance) for instance in self._router.fleet]
        respond_json(
            exchange, 200, {"status": "ok", "version": __version__, "instances": instances}
        )

    async def ready(self, exchange: Exchange) -> None:
        """200 when a request could be answered now, else 503 with the reason."""
        reason = self._not_ready()
        status = (
            {"status": "ready"} if reason is None else {"status": "not ready", "reason": reason}
        )
        respond_json(exchange, 503 if reason else 200, status)

    def _not_ready(self) -> str | None:
        if self._process.is_draining:
            return "the proxy is shutting down"
        fleet = self._router.fleet
        whole = fleet.whole()
        if whole is None:
            return "no live decode instance"
        if whole is Role.DECODE and not (fleet.hands_over or self._process.config.local_prefill):
            has_prefill = bool(fleet.live(Role.PREFILL))
            return "no pair can exchange KV" if has_prefill else "no live prefill instance"
        return None

    async def instances(self, exchange: Exchange) -> None:
        """The fleet as it is. Needs an admin key, like every change."""
        self._admit(exchange)
        respond_json(exchange, 200, {"instances": [facts_of(i) for i in self._router.fleet]})

    async def change(self, exchange: Exchange) -> None:
        """`{"operation": "add|drain|resume|remove|role", "url": ..., "role": ...}`."""
        self._admit(exchange)
        try:
            change = msgspec.json.decode(exchange.body, type=Change)
            instance = self._process.change(change)
        except (msgspec.DecodeError, ConfigError) as exc:
            raise BadRequest(f"change of instances: {exc}") from exc
        respond_json(exchange, 200, {"instance": facts_of(instance) if instance else None})

    def _admit(self, exchange: Exchange) -> None:
        keys = self._process.config.admin_keys
        if not keys:
            raise Forbidden("no admin keys: start with --admin-key-file to see or change any")
        check_key(exchange.headers, keys)

    async def metrics(self, exchange: Exchange) -> None:
        """Prometheus text."""
        lines = [*self._process.all_metrics().lines(), *self._gauges()]
        body = "\n".join(lines).encode() + b"\n"
        exchange.respond(200, body, "text/plain; version=0.0.4; charset=utf-8")

    def _gauges(self) -> Iterator[str]:
        instances = list(self._router.fleet)
        prefix = "mooncake_proxy_"

        def rows(value: Callable[[Instance], float]) -> list[tuple[dict[str, str], float]]:
            return [({"instance": i.name, "role": i.spec.role.value}, value(i)) for i in instances]

        yield from gauge_lines(
            f"{prefix}instance_up",
            "1 while it gets requests.",
            rows(lambda i: i.state.value == "up"),
        )
        yield from gauge_lines(
            f"{prefix}instance_running", "Requests in flight.", rows(lambda i: i.total_running)
        )
        yield from gauge_lines(
            f"{prefix}instance_prompt_tokens",
            "Prompt tokens of the requests in flight.",
            rows(lambda i: i.total_prompt_tokens),
        )
        yield from gauge_lines(
            f"{prefix}running", "Requests being served.", [({}, self._process.num_running)]
        )
        yield from gauge_lines(
            f"{prefix}waiting", "Requests in the queue.", [({}, self._process.num_waiting)]
        )

    async def ask_instance(self, exchange: Exchange) -> None:
        """What every instance knows alike, as the first live one says that answers: models, and
        text to tokens and back."""
        check_key(exchange.headers, self._process.config.api_keys)
        last: UpstreamError | None = None
        for instance in self._router.fleet.require(self._router.fleet.whole() or Role.DECODE):
            deadline = self._router.now() + ANSWER_TIMEOUT_S
            try:
                body = await instance.pool.fetch(_passed_on(exchange, instance), deadline)
            except UpstreamError as error:
                last = error
                if isinstance(error, Rejected) and error.is_client_fault:
                    break
                continue
            exchange.respond(200, body, "application/json")
            return
        assert last is not None
        answer_error(exchange, last, b"")


def _passed_on(exchange: Exchange, instance: Instance) -> bytes:
    if exchange.method != "POST":
        return instance.get(exchange.path)
    forward = forwarded_headers(exchange.headers)
    return instance.request(
        exchange.path, request_id_of(exchange.headers), forward, bytes(exchange.body)
    )


def facts_of(instance: Instance) -> dict[str, Any]:
    """An instance for people and tools."""
    return {
        "name": instance.name,
        "role": instance.spec.role.value,
        "state": instance.state.value,
        "error": instance.error,
        "running": instance.total_running,
        "prompt_tokens": instance.total_prompt_tokens,
        "source": instance.spec.source,
    }
