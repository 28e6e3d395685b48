"""Handlers of all paths except generation: models, tokenize, health, metrics, the admin API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any
from urllib.parse import parse_qs, unquote

import msgspec
from msgspec import Struct

from mooncake_api import COUNT_TOKENS_PATH, FORMAT_PATHS
from mooncake_api.instance_protocol import REGISTER_PATH
from mooncake_proxy import __version__
from mooncake_proxy.api.api_keys import check_key
from mooncake_proxy.api.error_responses import respond_error, respond_json
from mooncake_proxy.api.openai_bodies import OpenAIEndpoint, explained
from mooncake_proxy.api.proxied_request import forwarded_headers, request_id_of
from mooncake_proxy.errors import (
    DECODE_ERRORS,
    BadRequest,
    ConfigError,
    Forbidden,
    NoInstance,
    UpstreamError,
)
from mooncake_proxy.http1.http_request import HttpRequest
from mooncake_proxy.http1.http_wire import header_lines
from mooncake_proxy.ops.proxy_metrics import gauge_lines
from mooncake_proxy.ops.proxy_process import ProxyProcess, live_page, live_view
from mooncake_proxy.pool.device_classes import describe_device
from mooncake_proxy.pool.health_checks import MODELS_PATH
from mooncake_proxy.pool.instances import Instance, InstancePool, Role
from mooncake_proxy.pool.membership import MembershipChange

Handler = Callable[[HttpRequest], Awaitable[None]]
Routes = dict[str, dict[str, Handler]]
ANSWER_TIMEOUT_S = 10.0
# Prefix of the paths of single models.
MODEL_PATH = "/v1/models/"
INSTANCES_PATH = "/instances"
# Explains a decision of the conductor. Like all ADMIN_PATHS, only on --admin-port if given.
EXPLAIN_PATH = "/conductor/explain"
# For Prometheus' http_sd_configs: the instances to scrape beside the proxy.
TARGETS_PATH = "/metrics/targets"
# Proxies on other hosts post their reservations here.
RESERVATIONS_PATH = "/conductor/reservations"
ADMIN_PATHS = frozenset(
    {
        *("/", "/view", "/metrics", TARGETS_PATH),
        *(INSTANCES_PATH, EXPLAIN_PATH, RESERVATIONS_PATH, REGISTER_PATH),
    }
)
_GENERATING = (*(endpoint.path for endpoint in OpenAIEndpoint), *FORMAT_PATHS)
# Paths with large bodies, up to --max-body-bytes, for clients with an API key.
BODY_PATHS = frozenset({*_GENERATING, COUNT_TOKENS_PATH, "/tokenize", "/detokenize"})


def routes(process: ProxyProcess, handle: Handler) -> Routes:
    """The handlers by path and method. `handle` is the application's dispatcher of all requests."""
    handlers = AdminHandlers(process, handle)
    generating: Routes = {path: {"POST": handlers.no_query} for path in _GENERATING}
    return {
        "/": {"GET": handlers.page},
        "/view": {"GET": handlers.view},
        "/health": {"GET": handlers.health},
        "/ping": {"GET": handlers.health, "POST": handlers.health},
        "/load": {"GET": handlers.load},
        "/version": {"GET": handlers.version},
        "/ready": {"GET": handlers.ready},
        "/metrics": {"GET": handlers.metrics},
        TARGETS_PATH: {"GET": handlers.targets},
        MODELS_PATH: {"GET": handlers.models},
        MODEL_PATH: {"GET": handlers.forward_to_instance},
        "/tokenize": {"POST": handlers.forward_to_instance},
        COUNT_TOKENS_PATH: {"POST": handlers.forward_to_instance},
        "/detokenize": {"POST": handlers.forward_to_instance},
        "/tokenizer_info": {"GET": handlers.forward_to_instance},
        INSTANCES_PATH: {"GET": handlers.instances, "POST": handlers.change},
        EXPLAIN_PATH: {"GET": handlers.explain},
        REGISTER_PATH: {"POST": handlers.register},
        **generating,
    }


def route_of(path: str) -> str:
    """The route of a path. A `..` must not lead out of the model paths of an instance."""
    if not path.startswith(MODEL_PATH) or ".." in unquote(path).split("/"):
        return path
    return MODEL_PATH


class AdminHandlers:
    """Handlers of all paths except generation."""

    def __init__(self, process: ProxyProcess, handle: Handler) -> None:
        self._process = process
        self._handle = handle
        self._router = process.router
        self._routers = process.routers

    async def no_query(self, request: HttpRequest) -> None:
        """Handle a generating path with a query string, which is ignored."""
        request.target = request.path.encode("latin-1")
        await self._handle(request)

    async def page(self, request: HttpRequest) -> None:
        """GET /: the live page."""
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        headers = header_lines([("content-security-policy", policy + "connect-src 'self'")])
        request.respond(200, live_page(), "text/html; charset=utf-8", headers)

    async def view(self, request: HttpRequest) -> None:
        """GET /view: the live page's data. `?since=TIME` limits the history to later samples."""
        given = parse_qs(request.query).get("since", ["0"])[-1]
        try:
            since = float(given)
        except ValueError as exc:
            raise BadRequest(f"since: wanted seconds of the epoch, found {given!r}") from exc
        instances = [instance_info(instance) for instance in self._process.pools]
        respond_json(request, 200, live_view(self._process, instances, since))

    async def health(self, request: HttpRequest) -> None:
        """GET /health: 200 while the process is alive.

        Instances are listed only on the admin port, or if there is none.
        """
        answer: dict[str, Any] = {"status": "ok", "version": __version__}
        if request.is_admin or self._process.config.admin_port is None:
            answer["instances"] = [instance_info(instance) for instance in self._process.pools]
        respond_json(request, 200, answer)

    async def load(self, request: HttpRequest) -> None:
        """GET /load: the number of clients that wait for an answer, on all workers, as vLLM's."""
        num_clients = self._process.num_running + self._process.num_waiting
        respond_json(request, 200, {"server_load": num_clients})

    async def version(self, request: HttpRequest) -> None:
        """GET /version: the proxy's."""
        respond_json(request, 200, {"version": __version__})

    async def ready(self, request: HttpRequest) -> None:
        """GET /ready: 200 if a request could be answered now, else 503 with the reason."""
        reason = self._not_ready()
        status = (
            {"status": "ready"} if reason is None else {"status": "not ready", "reason": reason}
        )
        respond_json(request, 503 if reason else 200, status)

    def _not_ready(self) -> str | None:
        if self._process.is_draining:
            return "the proxy is shutting down"
        reasons = [self._pool_not_ready(pool) for pool in self._process.pools.in_use]
        # One model that can be served is enough; requests for the others get 503.
        return None if None in reasons else reasons[0]

    def _pool_not_ready(self, pool: InstancePool) -> str | None:
        whole = pool.undisaggregated_role()
        if whole is None:
            return "no live decode instance"
        if whole is Role.DECODE and not (
            pool.can_disaggregate or self._process.config.local_prefill
        ):
            has_prefill = bool(pool.live(Role.PREFILL))
            return "no pair can exchange KV" if has_prefill else "no live prefill instance"
        return None

    async def instances(self, request: HttpRequest) -> None:
        """GET /instances: all instances with their state. Needs an admin key, like changes."""
        self._check_admin_key(request)
        respond_json(request, 200, {"instances": [instance_info(i) for i in self._process.pools]})

    async def change(self, request: HttpRequest) -> None:
        """POST /instances: `{"operation": "add|drain|resume|remove|role", "url": ..., ...}`."""
        self._check_admin_key(request)
        try:
            change = msgspec.json.decode(request.body, type=MembershipChange)
        except DECODE_ERRORS as exc:
            raise explained(exc, MembershipChange) from exc
        try:
            instance = self._process.change(change)
        except (*DECODE_ERRORS, ConfigError) as exc:
            raise BadRequest(f"change of instances: {exc}") from exc
        respond_json(request, 200, {"instance": instance_info(instance) if instance else None})

    async def register(self, request: HttpRequest) -> None:
        """POST /register: an instance registers, renews its lease, or unregisters.

        The message is signed with the secret of --register-secret-file.
        """
        try:
            body = bytes(request.body)
            instance = self._process.registrations.receive(request.headers, body)
        except ConfigError as exc:
            raise BadRequest(f"registration: {exc}") from exc
        respond_json(request, 200, {"instance": instance_info(instance) if instance else None})

    async def explain(self, request: HttpRequest) -> None:
        """GET /conductor/explain?request=ID: why a request was placed as it was, with all terms."""
        given = parse_qs(request.query).get("request", [])
        if len(given) != 1:
            raise BadRequest(f"{EXPLAIN_PATH}?request=ID: wanted one X-Request-Id, found {given}")
        respond_json(request, 200, self._routers.explain(given[0]))

    def _check_admin_key(self, request: HttpRequest) -> None:
        keys = self._process.config.admin_keys
        if not keys:
            raise Forbidden("no admin keys: start with --admin-key-file to see or change any")
        check_key(request.headers, keys)

    async def metrics(self, request: HttpRequest) -> None:
        """GET /metrics: Prometheus text format."""
        lines = [*self._process.all_metrics().lines(), *self._gauges()]
        body = "\n".join(lines).encode() + b"\n"
        request.respond(200, body, "text/plain; version=0.0.4; charset=utf-8")

    async def targets(self, request: HttpRequest) -> None:
        """GET /metrics/targets: all instances, and the stores that they use or that
        ``--store-metrics`` names, in the format of Prometheus' HTTP discovery."""
        instances = list(self._process.pools)
        stores = dict.fromkeys(self._process.config.store_metrics)
        for instance in instances:
            stores |= dict.fromkeys(instance.store_metrics)
        origins = [(each.spec.origin, each.spec.role.value) for each in instances]
        found = []
        for origin, role in (*origins, *((origin, "store") for origin in stores)):
            labels = {
                "role": role,
                "__scheme__": origin.scheme,
                "__metrics_path__": f"{origin.prefix}/metrics",
            }
            found.append({"targets": [origin.authority], "labels": labels})
        respond_json(request, 200, found)

    def _gauges(self) -> Iterator[str]:
        instances = list(self._process.pools)
        prefix = "mooncake_proxy_"

        def rows(value: Callable[[Instance], float]) -> list[tuple[dict[str, str], float]]:
            return [({"instance": i.name, "role": i.spec.role.value}, value(i)) for i in instances]

        yield from gauge_lines(
            f"{prefix}instance_up",
            "1 while the instance gets new requests.",
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
        yield from self._rank_gauges(prefix, instances)
        yield from self._held_gauges(prefix)
        yield from self._load_gauges(prefix)
        certificate = self._process.certificate
        if certificate is not None and certificate.not_after is not None:
            yield from gauge_lines(
                f"{prefix}certificate_not_after_seconds",
                "When the proxy's TLS certificate expires, as Unix time.",
                [({}, certificate.not_after)],
            )
        yield from gauge_lines(
            f"{prefix}running", "Requests being served.", [({}, self._process.num_running)]
        )
        yield from gauge_lines(
            f"{prefix}waiting", "Requests in the queue.", [({}, self._process.num_waiting)]
        )

    def _rank_gauges(self, prefix: str, instances: Sequence[Instance]) -> Iterator[str]:
        """Gauges of instances with several data-parallel ranks, from their health reports."""
        labelled = [
            ({"instance": i.name, "role": i.spec.role.value, "dp_rank": str(rank.number)}, rank)
            for i in instances
            for rank in i.reported_dp_ranks
        ]
        if labelled:
            yield from gauge_lines(
                f"{prefix}dp_rank_running",
                "Requests in the steps of a data-parallel rank.",
                [(labels, rank.queue.running) for labels, rank in labelled],
            )
            yield from gauge_lines(
                f"{prefix}dp_rank_waiting",
                "Requests in the queue of a data-parallel rank.",
                [(labels, rank.queue.waiting) for labels, rank in labelled],
            )

    def _held_gauges(self, prefix: str) -> Iterator[str]:
        """Gauges of the KV that instances hold, from the KV events of instances and node stores."""
        held = [
            ({"instance": instance.name, "role": instance.spec.role.value, "tier": tier}, number)
            for router in self._routers
            if router.conductor is not None
            for fleet in (router.conductor.pairs, router.conductor.coupled)
            for instance, tier, number in fleet.holdings.num_tokens()
        ]
        if held:
            text = "Tokens whose KV an instance holds on its devices, in its store and on SSDs."
            yield from gauge_lines(f"{prefix}instance_held_tokens", text, held)

    def _load_gauges(self, prefix: str) -> Iterator[str]:
        """Gauges for autoscalers, which require a TTFT objective of the conductor."""
        now, loads, desired = self._router.now(), [], []
        for router in self._routers:
            if router.conductor is None or router.conductor.roles is None:
                continue
            load = router.conductor.roles.load(now)
            sides = (("prefill", load.prefill), ("decode", load.decode))
            for (role, share), number in zip(sides, load.desired_instances(), strict=True):
                labels = {"model": router.model, "role": role}
                loads.append((labels, share))
                desired.append((labels, float(number)))
        if loads:
            text = "Load of a role; 1 is the most that the objectives allow."
            yield from gauge_lines(f"{prefix}load", text, loads)
            text = "Number of instances at which the load of a role would be 0.7."
            yield from gauge_lines(f"{prefix}desired_instances", text, desired)

    async def models(self, request: HttpRequest) -> None:
        """GET /v1/models: the models of all pools, as their instances describe them."""
        pools = self._process.pools.in_use
        if len(pools) == 1:
            await self.forward_to_instance(request)
            return
        check_key(request.headers, self._process.config.api_keys)
        cards: dict[str, Any] = {}
        for pool in pools:
            names = self._process.pools.names_of(pool)
            for name in sorted(names):
                cards[name] = {"id": name, "object": "model", "created": 0, "owned_by": "mooncake"}
            for card in await self._cards_of(pool, request):
                if not names or card.get("id") in names:
                    cards[card.get("id", "")] = card
        respond_json(request, 200, {"object": "list", "data": list(cards.values())})

    async def _cards_of(self, pool: InstancePool, request: HttpRequest) -> list[dict[str, Any]]:
        """The model cards of a live instance of `pool`; empty if none answers."""
        try:
            answer = await self._fetch_from_any(pool, request)
            return msgspec.json.decode(answer, type=ModelList).data
        except (UpstreamError, NoInstance, *DECODE_ERRORS):
            return []

    async def forward_to_instance(self, request: HttpRequest) -> None:
        """Forward models, tokenize and detokenize to the first live instance that answers."""
        check_key(request.headers, self._process.config.api_keys)
        pool = self._process.pools.pool_of(_model_of(request))
        try:
            body = await self._fetch_from_any(pool, request)
        except UpstreamError as error:
            respond_error(request, error, b"")
            return
        request.respond(200, body, "application/json")

    async def _fetch_from_any(self, pool: InstancePool, request: HttpRequest) -> bytes:
        """The answer of the first live instance that has one."""
        last: UpstreamError | None = None
        for instance in pool.require(pool.undisaggregated_role() or Role.DECODE):
            deadline = self._router.now() + ANSWER_TIMEOUT_S
            try:
                return await instance.connections.fetch(
                    _forwarded_request(request, instance), deadline
                )
            except UpstreamError as error:
                last = error
                if error.is_client_fault:
                    break
        assert last is not None
        raise last


class ModelList(Struct):
    """An instance's answer to `GET /v1/models`."""

    data: list[dict[str, Any]] = []


class NamedModel(Struct):
    """The `model` field of a body."""

    model: str | None = None


def _model_of(request: HttpRequest) -> str | None:
    """The model that a non-generating request names in its path or body."""
    if request.path.startswith(MODEL_PATH):
        return unquote(request.path[len(MODEL_PATH) :])
    try:
        return msgspec.json.decode(request.body, type=NamedModel).model if request.body else None
    except DECODE_ERRORS:
        return None  # the instance will reject it


def _forwarded_request(request: HttpRequest, instance: Instance) -> bytes:
    forward = forwarded_headers(request.headers)
    if request.method != "POST":
        return instance.build_get(request.path, forward)
    return instance.build_post(
        request.path, request_id_of(request.headers), forward, bytes(request.body)
    )


def instance_info(instance: Instance) -> dict[str, Any]:
    """An instance as JSON, for the health and admin endpoints."""
    return {
        "name": instance.name,
        "role": instance.spec.role.value,
        "state": instance.state.value,
        "error": instance.error,
        "running": instance.total_running,
        "prompt_tokens": instance.total_prompt_tokens,
        "dp_ranks": [msgspec.to_builtins(rank.queue) for rank in instance.reported_dp_ranks],
        "source": instance.spec.source,
        "device": describe_device(instance.topology),
        "models": list(instance.spec.models),
        "kv_pool": None if instance.kv_pool is None else msgspec.to_builtins(instance.kv_pool),
    }
