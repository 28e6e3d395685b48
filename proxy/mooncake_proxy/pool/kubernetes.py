"""Discovers instances in Kubernetes: polls the API server for ready pods with a label selector.

A pod declares its role in the label `mooncake-hal/role` (prefill, decode or both), and its port in
the annotation `mooncake-hal/port`, by default the first container port. Other annotations take the
place of the options that apply to every instance. The proxy's service account needs the permission
to `list` pods.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from urllib.parse import quote

import msgspec
from msgspec import Struct, field

from mooncake_proxy.errors import ConfigError, UpstreamError
from mooncake_proxy.http1.connection_pool import ConnectionPool, timeout
from mooncake_proxy.http1.http_wire import MAX_PORT, Origin
from mooncake_proxy.http1.upstream_connection import ClientContext, ClientLimits
from mooncake_proxy.pool.dp_ranks import MAX_DP_RANKS
from mooncake_proxy.pool.instance_reports import KVEventEndpoints
from mooncake_proxy.pool.instances import InstanceSpec, Role
from mooncake_proxy.pool.membership import InstanceDefaults, follow_source, parse_store_events
from mooncake_proxy.pool.model_pools import ModelPools

logger = logging.getLogger(__name__)
SOURCE = "kubernetes"
ROLE_LABEL = "mooncake-hal/role"
PORT_ANNOTATION = "mooncake-hal/port"
EMITS_ANNOTATION = "mooncake-hal/decode-emits-first-token"
BOOTSTRAP_ANNOTATION = "mooncake-hal/prefill-bootstrap-port"
EVENTS_ANNOTATION = "mooncake-hal/kv-events-port"
REPLAY_ANNOTATION = "mooncake-hal/kv-events-replay-port"
RANKS_ANNOTATION = "mooncake-hal/data-parallel-size"
# Comma-separated names of the model. An annotation, because label values can't contain a slash.
MODELS_ANNOTATION = "mooncake-hal/models"
# `--store-kv-events` of each store that the pod uses, separated by spaces.
STORES_ANNOTATION = "mooncake-hal/store-kv-events"
POLL_S = 2.0
TIMEOUT_S = 10.0
_NOTHING_DECLARED = InstanceDefaults()
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class ContainerPort(Struct, rename="camel"):
    """A port of a container."""

    container_port: int


class Container(Struct):
    """A container's ports."""

    ports: list[ContainerPort] = []


class PodSpec(Struct):
    """The pod's containers."""

    containers: list[Container] = []


class PodCondition(Struct):
    """One of the pod's conditions."""

    type: str
    status: str


class PodStatus(Struct, rename="camel"):
    """The pod's address and conditions."""

    pod_ip: str = field(name="podIP", default="")
    conditions: list[PodCondition] = []


class PodMetadata(Struct, rename="camel"):
    """Name, labels and annotations."""

    name: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    deletion_timestamp: str | None = None


class Pod(Struct):
    """A pod in a list."""

    metadata: PodMetadata
    spec: PodSpec
    status: PodStatus


class PodList(Struct):
    """The API server's response."""

    items: list[Pod]


@dataclass(frozen=True, slots=True)
class KubernetesConfig:
    """The API server, and which pods to list."""

    api: str
    namespace: str
    selector: str
    token_file: Path | None
    ca_file: Path | None

    @classmethod
    def parse(cls, text: str, api: str | None) -> KubernetesConfig:
        """Parse `NAMESPACE/SELECTOR`.

        Args:
            text: the value of `--kubernetes`.
            api: URL of the API server; None: that of the cluster that the proxy runs in.
        """
        namespace, slash, selector = text.partition("/")
        if not (namespace and slash and selector):
            raise ConfigError(f"--kubernetes {text!r}: wanted NAMESPACE/LABEL=VALUE")
        if api is not None:
            return cls(api, namespace, selector, None, None)
        host = os.environ.get("KUBERNETES_SERVICE_HOST")
        if host is None:
            raise ConfigError("--kubernetes outside a cluster: give --kubernetes-api URL")
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        host = f"[{host}]" if ":" in host else host
        api = f"https://{host}:{port}"
        return cls(api, namespace, selector, _ACCOUNT / "token", _ACCOUNT / "ca.crt")


def specs_of_pods(
    pods: PodList, defaults: InstanceDefaults = _NOTHING_DECLARED
) -> list[InstanceSpec]:
    """The instances in these pods; pods that aren't ready or have no role are left out."""
    found = []
    for pod in pods.items:
        role = pod.metadata.labels.get(ROLE_LABEL, "")
        port = _port_of(pod)
        if role not in [r.value for r in Role] or port is None or not _is_ready(pod):
            continue
        annotations = pod.metadata.annotations
        origin = Origin("http", pod.status.pod_ip, port)
        models = annotations.get(MODELS_ANNOTATION, "")
        names = tuple(name.strip() for name in models.split(",") if name.strip())
        spec = defaults.spec(origin, Role(role), SOURCE, names)
        emits, num_ranks = annotations.get(EMITS_ANNOTATION), spec.data_parallel_size
        declared = partial(_declared, annotations)
        found.append(
            replace(
                spec,
                emits_first_token=spec.emits_first_token if emits is None else emits == "true",
                bootstrap_port=declared(BOOTSTRAP_ANNOTATION, spec.bootstrap_port),
                kv_events_port=declared(EVENTS_ANNOTATION, spec.kv_events_port),
                kv_events_replay_port=declared(REPLAY_ANNOTATION, spec.kv_events_replay_port),
                store_kv_events=_store_events(annotations.get(STORES_ANNOTATION, "")),
                data_parallel_size=declared(RANKS_ANNOTATION, num_ranks, MAX_DP_RANKS) or 1,
            )
        )
    return found


def _declared(
    annotations: Mapping[str, str], name: str, otherwise: int | None, most: int = MAX_PORT
) -> int | None:
    """The number in an annotation, or `otherwise` if there is no valid one."""
    text = annotations.get(name)
    number = None if text is None else _number(name, text, most)
    return otherwise if number is None else number


@lru_cache(maxsize=256)  # so that a wrong one is logged once, not at every poll
def _number(annotation: str, text: str, most: int) -> int | None:
    if text.isdecimal() and len(text) <= len(str(most)) and 1 <= int(text) <= most:
        return int(text)
    logger.warning("annotation %s of pods: %r: wanted 1 to %d", annotation, text[:20], most)
    return None


@lru_cache(maxsize=256)
def _store_events(annotation: str) -> tuple[KVEventEndpoints, ...]:
    try:
        return tuple(parse_store_events(text) for text in annotation.split())
    except ConfigError as exc:
        logger.warning(
            "pods without KV events of stores, annotation %s: %s", STORES_ANNOTATION, exc
        )
        return ()


def _is_ready(pod: Pod) -> bool:
    is_ready = any(c.type == "Ready" and c.status == "True" for c in pod.status.conditions)
    return is_ready and bool(pod.status.pod_ip) and pod.metadata.deletion_timestamp is None


def _port_of(pod: Pod) -> int | None:
    first = next((port.container_port for c in pod.spec.containers for port in c.ports), None)
    return _declared(pod.metadata.annotations, PORT_ANNOTATION, first)


class KubernetesWatch:
    """Keeps the pools in sync with the cluster. They don't change while the API server is down."""

    def __init__(
        self,
        config: KubernetesConfig,
        pools: ModelPools,
        defaults: InstanceDefaults = _NOTHING_DECLARED,
    ) -> None:
        self._config = config
        self._pools = pools
        self._defaults = defaults
        tls = None
        if config.ca_file is not None:
            tls = ssl.create_default_context(cafile=str(config.ca_file))
        self._connections = ConnectionPool(
            Origin.parse(config.api), ClientContext(ClientLimits(), tls=tls)
        )

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await self.poll_once()
            await asyncio.sleep(POLL_S)

    async def poll_once(self) -> None:
        """List the pods once and apply the result."""
        try:
            async with timeout(TIMEOUT_S):  # this context's connections have no timeout sweep
                pods = await self._list()
        except (UpstreamError, asyncio.TimeoutError, OSError, ValueError) as exc:
            logger.warning("cannot list pods, instances stay as they are: %r", exc)
            return
        follow_source(self._pools, specs_of_pods(pods, self._defaults), SOURCE)

    async def _list(self) -> PodList:
        config = self._config
        selector = quote(config.selector, safe="")
        path = f"/api/v1/namespaces/{config.namespace}/pods?labelSelector={selector}"
        token = ""
        if config.token_file is not None:
            # Read for every request, because the kubelet renews it.
            token = f"authorization: Bearer {config.token_file.read_text('ascii').strip()}\r\n"
        head = f"GET {path} HTTP/1.1\r\nhost: {self._connections.origin.authority}\r\n{token}\r\n"
        deadline = self._connections.context.loop.time() + TIMEOUT_S
        body = await self._connections.fetch(head.encode("ascii"), deadline)
        return msgspec.json.decode(body, type=PodList)
