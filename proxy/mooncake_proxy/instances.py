"""The instances behind the proxy: what they are, whether they are live, what they carry now."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product

from msgspec import Struct

from mooncake_proxy.bootstrap import Bootstrap
from mooncake_proxy.errors import Conflict, NoInstance, NotFound
from mooncake_proxy.http1.connection import ClientContext
from mooncake_proxy.http1.origin import Origin
from mooncake_proxy.http1.pool import Pool

logger = logging.getLogger(__name__)


class Role(Enum):
    """What an instance is for. BOTH serves whole requests by itself, without a hand-over."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    def __init__(self, label: str) -> None:
        # `value` and the hash of an enum are Python calls; these are read several times a request.
        self.label = label
        self.index = len(type(self).__members__)


class State(Enum):
    """Whether an instance gets new requests."""

    UP = "up"
    DOWN = "down"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """What an operator says about an instance."""

    origin: Origin
    role: Role
    # A D that sends the first token again (vLLM): then P's is not forwarded.
    emits_first_token: bool = False
    # A D that may answer `stop_reason: "recomputed"` (vLLM-Ascend's recompute scheduler).
    recomputes: bool = False
    # Where a P with vLLM's own Mooncake connector has its bootstrap server.
    bootstrap_port: int | None = None
    # Who declared it: flags, file, api, kubernetes. Each source only removes its own.
    source: str = "flags"

    @property
    def repeats_first_token(self) -> bool:
        """Whether its stream holds the first token too. One that may give a request back sends its
        whole stream: nothing of P's may stand before what is decoded anew."""
        return self.emits_first_token or self.recomputes

    @property
    def name(self) -> str:
        """How the instance is called in metrics, logs and the admin API: its URL."""
        return str(self.origin)


class Pairing(Struct, frozen=True):
    """What an instance says of itself and its peers; foreign ones say nothing."""

    # This incarnation.
    engine_id: str = ""
    # Incarnations that it can't exchange KV with.
    refused_peers: frozenset[str] = frozenset()


class Instance:
    """One instance with its connections and its load as this proxy knows it."""

    __slots__ = (
        "_context",
        "_heads",
        "bootstrap",
        "error",
        "is_draining",
        "is_up",
        "name",
        "num_elsewhere",
        "num_prompt_tokens",
        "num_running",
        "pairing",
        "pool",
        "spec",
        "warned",
    )

    def __init__(self, spec: InstanceSpec, context: ClientContext) -> None:
        self._context = context
        self.bootstrap: Bootstrap | None = None
        self.become(spec)
        self.name = spec.name
        self.pool = Pool(spec.origin, context)
        self.is_up = True
        self.is_draining = False
        # Why it is down, for people.
        self.error = ""
        self.num_running = 0
        self.num_prompt_tokens = 0
        # The same two counts as the other worker processes report them.
        self.num_elsewhere = (0, 0)
        self.pairing = Pairing()
        self.warned: set[str] = set()
        self._heads: dict[str, bytes] = {}

    def become(self, spec: InstanceSpec) -> None:
        """Take over new facts about it."""
        self.spec = spec
        if self.bootstrap is not None:
            self.bootstrap.close()
            self.bootstrap = None
        if spec.bootstrap_port is not None and spec.role is Role.PREFILL:
            self.bootstrap = Bootstrap(spec.origin, spec.bootstrap_port, self._context)

    @property
    def state(self) -> State:
        """UP, DOWN or DRAINING."""
        if self.is_draining:
            return State.DRAINING
        return State.UP if self.is_up else State.DOWN

    @property
    def total_running(self) -> int:
        """Requests on it from all worker processes."""
        return self.num_running + self.num_elsewhere[0]

    @property
    def total_prompt_tokens(self) -> int:
        """Prompt tokens of those requests."""
        return self.num_prompt_tokens + self.num_elsewhere[1]

    def fits(self, peer: Instance) -> bool:
        """Whether neither of the two has refused to exchange KV with the other."""
        own, other = self.pairing, peer.pairing
        return own.engine_id not in other.refused_peers and other.engine_id not in own.refused_peers

    def request(self, path: str, request_id: str, extra: bytes, body: bytes) -> bytes:
        """A POST of JSON to this instance, ready to be written."""
        head = self._heads.get(path)
        if head is None:
            origin = self.spec.origin
            head = (
                f"POST {origin.prefix}{path} HTTP/1.1\r\nhost: {origin.authority}\r\n"
                "content-type: application/json\r\nx-request-id: "
            ).encode("latin-1")
            self._heads[path] = head
        return b"%b%b\r\n%bcontent-length: %d\r\n\r\n%b" % (
            head,
            request_id.encode("latin-1"),
            extra,
            len(body),
            body,
        )

    def get(self, path: str) -> bytes:
        """A GET to this instance."""
        origin = self.spec.origin
        return (f"GET {origin.prefix}{path} HTTP/1.1\r\nhost: {origin.authority}\r\n\r\n").encode(
            "latin-1"
        )

    def warn_once(self, key: str, message: str) -> None:
        """Log a fact about this instance the first time it shows."""
        if key not in self.warned:
            self.warned.add(key)
            logger.warning("%s: %s", self.name, message)


class Fleet:
    """All instances. Lists of live ones are kept ready; they change rarely and are read always."""

    def __init__(self, context: ClientContext) -> None:
        self._context = context
        self._instances: dict[str, Instance] = {}
        # By Role.index.
        self._live: list[tuple[Instance, ...]] = [()] * len(Role)
        self._leaving: set[str] = set()
        self.version = 0
        # Whether a request can be prefilled by one instance and decoded by another now.
        self.hands_over = False
        # Whether some live instances can't exchange KV with others; else nobody need look.
        self.has_misfits = False
        self._paired: frozenset[Instance] = frozenset()
        # Whether any instance may give requests back: then token ids are recorded.
        self.recomputes = False
        self._refresh()

    def __iter__(self) -> Iterator[Instance]:
        return iter(tuple(self._instances.values()))

    def __len__(self) -> int:
        return len(self._instances)

    def get(self, name: str) -> Instance:
        """The instance of that name, or NotFound with the names there are."""
        instance = self._instances.get(name)
        if instance is None:
            known = ", ".join(self._instances) or "none"
            raise NotFound(f"no instance {name!r}; known: {known}")
        return instance

    def live(self, role: Role) -> tuple[Instance, ...]:
        """Instances that take new requests of a role."""
        return self._live[role.index]

    def whole(self) -> Role | None:
        """The role that can serve whole requests now: BOTH if there is one, else DECODE."""
        if self._live[Role.BOTH.index]:
            return Role.BOTH
        return Role.DECODE if self._live[Role.DECODE.index] else None

    def require(self, role: Role) -> tuple[Instance, ...]:
        """The same, or NoInstance."""
        live = self._live[role.index]
        if not live:
            raise NoInstance(self._explain(role), code=f"no_live_{role.value}")
        return live

    def is_paired(self, instance: Instance) -> bool:
        """Whether a live instance of the other role can exchange KV with it."""
        return instance in self._paired

    def require_pair(self) -> None:
        """A live P and a live D that can exchange KV, or NoInstance."""
        self.require(Role.PREFILL)
        self.require(Role.DECODE)
        if not self.hands_over:
            message = "no live prefill instance can exchange KV with a live decode instance"
            raise NoInstance(f"{message}; their logs say why", code="no_fitting_pair")

    # ------------------------------------------------ changes

    def add(self, spec: InstanceSpec) -> Instance:
        """A new instance, or new facts about a known one, which is resumed."""
        known = self._instances.get(spec.name)
        if known is not None:
            if known.spec.role is not spec.role:
                self.switch_role(spec.name, spec.role)
            known.become(spec)
            return self.resume(spec.name)
        instance = self._instances[spec.name] = Instance(spec, self._context)
        logger.info("instance added: %s (%s)", spec.name, spec.role.value)
        self._refresh()
        return instance

    def drain(self, name: str, *, then_remove: bool = False) -> Instance:
        """No new requests; what runs is finished. `then_remove` forgets it when it is idle."""
        instance = self.get(name)
        instance.is_draining = True
        if then_remove:
            self._leaving.add(name)
        self._refresh()
        self.forget_drained(instance)
        return instance

    def resume(self, name: str) -> Instance:
        """Undo a drain or an ejection: it gets requests, until a health check says otherwise."""
        instance = self.get(name)
        instance.is_draining = False
        self._leaving.discard(name)
        self.set_up(instance, up=True)
        self._refresh()
        return instance

    def remove(self, name: str) -> None:
        """Forget it now. What runs on it keeps its connection until it ends."""
        instance = self.get(name)
        del self._instances[name]
        self._leaving.discard(name)
        instance.pool.close()
        logger.info("instance removed: %s", name)
        self._refresh()

    def switch_role(self, name: str, role: Role) -> Instance:
        """P becomes D or the reverse; only when nothing runs on it."""
        instance = self.get(name)
        if instance.total_running:
            raise Conflict(
                f"{name} runs {instance.total_running} requests and only an idle instance can "
                "switch its role: drain it first"
            )
        instance.become(replace(instance.spec, role=role))
        instance.warned.clear()
        self._refresh()
        logger.info("instance %s is now %s", name, role.value)
        return instance

    def set_up(self, instance: Instance, *, up: bool, error: str = "") -> None:
        """The verdict of the health checks."""
        instance.error = "" if up else error
        if instance.is_up is up:
            return
        instance.is_up = up
        if up:
            logger.info("instance up: %s", instance.name)
        else:
            logger.warning("instance down: %s: %s", instance.name, error)
        self._refresh()

    def note_pairing(self, instance: Instance, pairing: Pairing) -> None:
        """An instance has said who it is, and which peers it can't exchange KV with."""
        if instance.pairing != pairing:
            instance.pairing = pairing
            self._refresh()

    def close(self) -> None:
        """Close all connections."""
        for instance in self._instances.values():
            instance.pool.close()

    def forget_drained(self, instance: Instance) -> None:
        """A request on a draining instance ended: was it the last of one that shall leave?"""
        if (
            instance.num_running == 0
            and instance.name in self._leaving
            and instance.name in self._instances
        ):
            self.remove(instance.name)

    def _refresh(self) -> None:
        self.version += 1
        takes = [i for i in self._instances.values() if i.is_up and not i.is_draining]
        self.recomputes = any(i.spec.recomputes for i in takes)
        for role in Role:
            self._live[role.index] = tuple(i for i in takes if i.spec.role is role)
        self._pair_up()

    def _pair_up(self) -> None:
        """Who can exchange KV. Refusals are rare: where there are none, nobody is compared."""
        prefills, decodes = self.live(Role.PREFILL), self.live(Role.DECODE)
        self.has_misfits = False
        self.hands_over = bool(prefills and decodes)
        if not any(i.pairing.refused_peers for i in (*prefills, *decodes)):
            return
        paired: set[Instance] = set()
        for prefill, decode in product(prefills, decodes):
            if prefill.fits(decode):
                paired |= {prefill, decode}
            else:
                self.has_misfits = True
                prefill.warn_once(
                    f"misfit {decode.pairing.engine_id}",
                    f"can't exchange KV with {decode.name}: no request goes from one to the other",
                )
        self._paired = frozenset(paired)
        self.hands_over = bool(paired)

    def _explain(self, role: Role) -> str:
        wanted = [i for i in self._instances.values() if i.spec.role is role]
        if not wanted:
            flag = "backend-url" if role is Role.BOTH else role.value
            return f"no {role.value} instance is configured (--{flag} URL)"
        facts = "; ".join(f"{i.name} {i.state.value} {i.error}".rstrip() for i in wanted)
        return f"no live {role.value} instance: {facts}"
