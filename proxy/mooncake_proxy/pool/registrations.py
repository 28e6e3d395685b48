"""Instances that announce themselves (`--register`), and the leases that keep them in the pool.

An instance posts what it is every third of its lease, and that it leaves when it drains. One that
is silent for a lease gets no more requests and is forgotten. Messages are signed with a secret that
instances and proxies share, and numbered, so that an old one is not taken again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from msgspec import Struct

from mooncake_proxy.errors import UNREADABLE, BadRequest, Conflict, Forbidden, Refusal
from mooncake_proxy.http1.http_wire import Origin
from mooncake_proxy.http1.signed_head import is_signed, signed_digest
from mooncake_proxy.pool.instances import Instance, Role
from mooncake_proxy.pool.membership import (
    ChangeOperation,
    MembershipChange,
    apply_change,
    spec_of,
)
from mooncake_proxy.pool.model_pools import ModelPools

logger = logging.getLogger(__name__)
SOURCE = "register"
HEADER = b"x-mooncake-register"
MAX_LEASE_S = 600.0
# Instances whose last number is known.
MAX_KNOWN = 4096


class Registration(Struct):
    """What an instance says of itself. `started_at` is when it started, in seconds since 1970: of
    two that have had the same URL, the later one counts. `number` grows with every message."""

    url: str
    started_at: float
    number: int
    role: Role = Role.BOTH
    lease_s: float = 15.0
    is_leaving: bool = False


_decode = msgspec.json.Decoder(Registration).decode


@dataclass(slots=True)
class Registrations:
    """Who has announced itself, and until when that counts. `now` is a monotonic clock; `forward`
    tells the other workers of this proxy, which keep the same leases."""

    pools: ModelPools
    now: Callable[[], float]
    secret: bytes = b""
    forward: Callable[[MembershipChange], None] = lambda change: None
    _leases: dict[str, tuple[float, float]] = field(default_factory=dict)
    _seen: dict[str, tuple[float, int]] = field(default_factory=dict)

    def is_known(self, headers: dict[bytes, bytes]) -> bool:
        """Whether a request's head is one of an instance: only then its body is read."""
        if not self.secret:
            return False
        return signed_digest(self.secret, headers.get(HEADER, b"")) is not None

    def receive(self, headers: dict[bytes, bytes], body: bytes) -> Instance | None:
        """Take an announcement; the instance, None when it left. Forbidden for strangers, Conflict
        for one that is older than what is known, or that the operator has declared otherwise."""
        if not self.secret:
            raise Forbidden("instances can't register here: start with --register-secret-file")
        if not is_signed(self.secret, headers.get(HEADER, b""), body):
            raise Forbidden("not signed with this proxy's --register-secret-file")
        try:
            said = _decode(body)
        except UNREADABLE as exc:
            raise BadRequest(f"registration: {exc}") from exc
        if not 0 < said.lease_s <= MAX_LEASE_S:
            raise BadRequest(f"registration: lease_s {said.lease_s}: wanted up to {MAX_LEASE_S}")
        url = str(Origin.parse(said.url))
        if (said.started_at, said.number) <= self._seen.get(url, (0.0, -1)):
            raise Conflict(f"{url}: this registration is older than what is known of it")
        change = MembershipChange(
            ChangeOperation.DRAIN if said.is_leaving else ChangeOperation.ADD,
            url,
            said.role,
            remove=said.is_leaving,
            source=SOURCE,
            lease_s=said.lease_s,
        )
        instance = self.follow(change)
        self._seen.pop(url, None)
        self._seen[url] = (said.started_at, said.number)
        if len(self._seen) > MAX_KNOWN:
            del self._seen[next(iter(self._seen))]
        self.forward(change)
        return instance

    def follow(self, change: MembershipChange) -> Instance | None:
        """The same of a change that this worker or another one has checked."""
        name = str(Origin.parse(change.url))
        if change.operation is not ChangeOperation.ADD:
            if self._leases.pop(name, None) is None:
                return None
            logger.info("instance %s leaves", name)
            return apply_change(self.pools, change)
        present = next((each for each in self.pools if each.name == name), None)
        if present is not None and present.spec.source != SOURCE:
            raise Conflict(
                f"{name} is declared by {present.spec.source}, and needs no registration"
            )
        is_renewed = name in self._leases and present is not None
        self._leases[name] = (self.now() + change.lease_s, change.lease_s)
        if is_renewed and present is not None and present.declared == spec_of(change):
            return present  # what operators and health checks have decided since stays
        return apply_change(self.pools, change)

    def expire(self) -> None:
        """Let those go whose lease has ended; a few times a second."""
        now = self.now()
        for name, (ends_at, lease_s) in tuple(self._leases.items()):
            if now < ends_at:
                continue
            del self._leases[name]
            logger.warning(
                "instance %s has not renewed its registration for %g s: it gets no more requests",
                *(name, lease_s),
            )
            try:
                self.pools.drain(name, then_remove=True)
            except Refusal as exc:
                logger.info("instance %s is gone already: %s", name, exc)
