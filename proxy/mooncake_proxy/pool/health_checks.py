"""Health checks: active ones with hysteresis, and passive ones by the failures of requests.

A check also reads what an instance reports about itself: compatibility, topology, queue lengths.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from mooncake_proxy.errors import (
    DECODE_ERRORS,
    ConnectFailed,
    ConnectionLost,
    DeadlineExceeded,
    MalformedResponse,
    OutOfSockets,
    Rejected,
    UpstreamError,
    UpstreamTimeout,
    is_draining,
)
from mooncake_proxy.pool.dp_ranks import RankQueue
from mooncake_proxy.pool.instance_reports import Compatibility, PoolReport
from mooncake_proxy.pool.instances import Instance
from mooncake_proxy.pool.model_pools import ModelPools
from mooncake_proxy.pool.pair_topology import PairTopology

logger = logging.getLogger(__name__)
T = TypeVar("T")
TOPOLOGY_PATH = "/kv/topology"
MODELS_PATH = "/v1/models"


class _ModelCard(msgspec.Struct):
    """A name that an instance accepts as a request's model."""

    id: str
    # The model of which it is an adapter (vLLM, SGLang).
    parent: str | None = None


class _ModelList(msgspec.Struct):
    """An instance's answer to `GET /v1/models`."""

    data: list[_ModelCard]


_topology_decoder = msgspec.json.Decoder(PairTopology)


class _Reports(msgspec.Struct, frozen=True):
    """Parts of a health body. Each is decoded separately: other engines may use other formats."""

    kv_pool: msgspec.Raw = msgspec.Raw(b"null")
    data_parallel_ranks: msgspec.Raw = msgspec.Raw(b"[]")
    bytes_received: msgspec.Raw = msgspec.Raw(b"{}")


_models_decoder = msgspec.json.Decoder(_ModelList)
_compatibility_decoder = msgspec.json.Decoder(Compatibility)
_reports_decoder = msgspec.json.Decoder(_Reports)
_pool_decoder = msgspec.json.Decoder(PoolReport | None)
_queues_decoder = msgspec.json.Decoder(list[RankQueue])
_bytes_decoder = msgspec.json.Decoder(dict[str, int])


@dataclass(slots=True)
class HealthTrack:
    """Consecutive successes and failures of one instance's checks."""

    num_good: int = 0
    num_bad: int = 0
    is_known: bool = False
    # The latest verdict.
    last_verdict: bool = False
    # Loop times at which consecutive checks began that got no answer at all: of the first one, and
    # of the latest `fall`.
    unanswered: list[float] = field(default_factory=list)

    def note_ejection(self) -> None:
        """Restart the count of good checks: requests have failed although checks succeeded."""
        self.num_good = 0
        self.last_verdict = False

    def note_answer(self, began: float, *, is_unanswered: bool, fall: int) -> None:
        """Note whether there was an answer to the check that began at loop time `began`."""
        if is_unanswered:
            self.unanswered.append(began)
            del self.unanswered[1:-fall]
        else:
            self.unanswered.clear()

    def observe(self, *, good: bool, rise: int, fall: int) -> bool | None:
        """Count a check.

        Args:
            good: whether the check succeeded.
            rise: consecutive successes that are needed for the verdict "up".
            fall: consecutive failures that are needed for the verdict "down".

        Returns:
            The verdict, or None while too few checks agree. The very first check decides alone.
        """
        self.num_good = self.num_good + 1 if good else 0
        self.num_bad = 0 if good else self.num_bad + 1
        is_first, self.is_known = not self.is_known, True
        if is_first or self.num_good >= rise or self.num_bad >= fall:
            self.last_verdict = good
            return good
        return None


# Errors of checks to which the instance has not answered.
_UNANSWERED = (ConnectFailed, ConnectionLost, DeadlineExceeded, UpstreamTimeout)


class PassiveHealth:
    """Ejects an instance after `limit` consecutive requests that failed because of it; 0: never."""

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def failed(self, instance: Instance, error: UpstreamError) -> bool:
        """Note a failed request. Returns True if the instance must be ejected.

        Error statuses don't count, because the instance has answered.
        """
        if not isinstance(
            error, ConnectFailed | ConnectionLost | UpstreamTimeout | MalformedResponse
        ):
            return False
        instance.num_failures += 1
        if not 0 < self._limit <= instance.num_failures:
            return False
        instance.num_failures = 0  # after its recovery the count starts at zero
        return True


@dataclass(frozen=True, slots=True)
class HealthConfig:
    """Settings of active checks. `interval_s` 0 disables them: all instances count as up."""

    interval_s: float = 1.0
    timeout_s: float = 2.0
    path: str = "/health"
    rise: int = 2
    fall: int = 3


# SGLang's /health answers 200 once any request has got output since it was asked, which takes as
# long as a step, and 503 after 20 s without output. It adds a request of one token itself, so that
# idle servers compute for it.
SGLANG_HEALTH = HealthConfig(interval_s=10.0, timeout_s=22.0)


class HealthChecker:
    """Checks all instances at an interval, and reports verdicts to the pools.

    Args:
        config: settings of the checks.
        pools: the instances.
        on_verdict: called with an instance whose health has changed.
        on_restart: called with an instance that was restarted between two checks.
    """

    def __init__(
        self,
        config: HealthConfig,
        pools: ModelPools,
        on_verdict: Callable[[Instance], None],
        on_restart: Callable[[Instance], None],
    ) -> None:
        self._config = config
        self._pools = pools
        self._on_verdict = on_verdict
        self._on_restart = on_restart
        self._tracks: dict[str, HealthTrack] = {}

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            await self.check_all()
            await asyncio.sleep(self._config.interval_s)

    async def check_all(self) -> None:
        """Check all instances concurrently, once."""
        instances = list(self._pools)
        if instances:
            await asyncio.gather(*(self.check(instance) for instance in instances))
        for instance in instances:
            self._fail_silent(instance)
        names = {instance.name for instance in instances}
        self._tracks = {name: track for name, track in self._tracks.items() if name in names}

    async def check(self, instance: Instance) -> None:
        """Check one instance, and apply the verdict."""
        began = instance.connections.context.loop.time()
        try:
            error = await self._fetch_health(instance)
        except Exception as exc:  # a bad report of one instance must not end the loop or the proxy
            logger.exception("the health check of %s has failed", instance.name)
            error = MalformedResponse(instance.name, f"{self._config.path}: {exc!r}")
        if instance not in self._pools:  # it was removed meanwhile
            return
        if isinstance(error, OutOfSockets):
            logger.error("can't check the health of %s: %s", instance.name, error)
            return
        track = self._tracks.setdefault(instance.name, HealthTrack())
        if track.last_verdict and not instance.is_up:
            track.note_ejection()
        is_unanswered, fall = isinstance(error, _UNANSWERED), self._config.fall
        track.note_answer(began, is_unanswered=is_unanswered, fall=fall)
        if is_draining(error):
            fall = 1
        verdict = track.observe(good=error is None, rise=self._config.rise, fall=fall)
        if verdict is not None:
            was_up = instance.is_up
            self._pools.set_up(instance, up=verdict, error=self._describe(error))
            if was_up is not verdict:
                if not verdict:  # it may come back with others
                    instance.base_models, instance.lists_models = None, True
                self._on_verdict(instance)

    def _fail_silent(self, instance: Instance) -> None:
        """Fail the requests on an instance that has vanished or hangs, so that others take them.

        It may just be slow. So not those for which it has sent something since the first check that
        it left unanswered, and of those sent to it since then only such as have outlasted `fall`
        checks. If no other instance of its role is up, all stay: this host may have lost its
        network.
        """
        track, fall = self._tracks.get(instance.name), self._config.fall
        if track is None or instance.is_up or len(track.unanswered) < fall:
            return
        if instance not in self._pools:
            return
        if not self._pools.home(instance.name).live(instance.spec.role):
            return
        first, latest = track.unanswered[0], track.unanswered[-fall]
        num_failed = instance.connections.fail_silent(first, latest)
        if num_failed:
            logger.warning("%s: %d requests in flight have failed", instance.name, num_failed)

    async def _fetch_health(self, instance: Instance) -> UpstreamError | None:
        """Request an instance's health and process its reports. Returns the error, None if good."""
        connections = instance.connections
        deadline = connections.context.loop.time() + self._config.timeout_s
        try:
            body = await connections.fetch(instance.build_get(self._config.path), deadline)
        except UpstreamError as exc:
            return exc
        compatibility = _decoded(_compatibility_decoder, body, Compatibility())
        reports = _decoded(_reports_decoder, body, _Reports())
        instance.kv_pool = _decoded(_pool_decoder, reports.kv_pool, None)
        instance.bytes_received = _decoded(_bytes_decoder, reports.bytes_received, {})
        epoch = compatibility.engine_id
        if epoch and (instance.topology is None or instance.topology.engine_id != epoch):
            await self._fetch_topology(instance, epoch, deadline)
        if instance not in self._pools:  # it was removed meanwhile
            return None
        former = instance.compatibility.engine_id
        if epoch and epoch != former:
            instance.base_models, instance.lists_models = None, True
            if former:
                self._on_restart(instance)
        self._pools.note_compatibility(instance, compatibility)
        is_unknown = instance.base_models is None and instance.lists_models
        if is_unknown and (instance.kv_events is not None or instance.store_kv_events):
            await self._fetch_models(instance, deadline)
        if instance.dp_ranks is not None:
            queues = _decoded(_queues_decoder, reports.data_parallel_ranks, [])
            instance.dp_ranks.note_queues(queues)
        return None

    async def _fetch_topology(self, instance: Instance, engine_id: str, deadline: float) -> None:
        """Fetch an instance's topology, once per epoch, so that incompatible pairs are known before
        any request uses them. Without an answer, the next check asks again."""
        topology: PairTopology | None = PairTopology(engine_id)  # if it publishes none
        try:
            body = await instance.connections.fetch(instance.build_get(TOPOLOGY_PATH), deadline)
            published = _topology_decoder.decode(body)
            if published.engine_id == engine_id:
                topology = published
        except UpstreamError as exc:
            if not exc.is_client_fault:
                topology = None
                message = f"its topology is not known yet, {TOPOLOGY_PATH}: {exc}"
                instance.warn_once(f"topology {engine_id}", message)
        except DECODE_ERRORS as exc:
            logger.warning("%s: %s can't be read: %s", instance.name, TOPOLOGY_PATH, exc)
        self._pools.note_topology(instance, topology)

    async def _fetch_models(self, instance: Instance, deadline: float) -> None:
        """Fetch which names mean an instance's model itself: events name only the adapters that
        have KV already. Without an answer, the next check asks again; an instance that refuses, or
        answers in another format, is asked once per start."""
        try:
            body = await instance.connections.fetch(instance.build_get(MODELS_PATH), deadline)
            cards = _models_decoder.decode(body).data
        except Rejected as exc:
            instance.lists_models = not exc.is_client_fault
        except UpstreamError:
            return
        except DECODE_ERRORS:
            instance.lists_models = False
        else:
            instance.base_models = frozenset(card.id for card in cards if card.parent is None)
        if not instance.lists_models:
            logger.info("%s does not list its models at %s", instance.name, MODELS_PATH)

    def _describe(self, error: UpstreamError | None) -> str:
        if isinstance(error, Rejected):
            text = error.body[:200].decode("utf-8", "replace")
            return f"{self._config.path} answered {error.status}: {text}"
        return "" if error is None else error.detail


def _decoded(decoder: msgspec.json.Decoder[T], part: bytes | msgspec.Raw, otherwise: T) -> T:
    """Decode part of a health body, or return `otherwise`.

    Bodies of other engines may have any format, and need not be UTF-8.
    """
    try:
        return decoder.decode(part)
    except DECODE_ERRORS:
        return otherwise
