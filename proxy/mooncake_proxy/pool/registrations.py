"""Instances that register themselves (`--register`), and the leases that keep them in the pool.

An instance renews its registration after every third of its lease, and unregisters when it drains.
One that is silent for a whole lease gets no more requests and is removed. Messages are signed with
a secret that instances and proxies share, and numbered to detect replays.

Of two starts at one URL the later one counts, while its lease lasts. Afterwards any start counts
that is new here: clocks are set back, and differ between hosts that take over a URL.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from mooncake_api.instance_protocol import (
    REGISTER_HEADER,
    RegistrationMessage,
    is_signed,
    signed_digest,
)
from mooncake_proxy.errors import DECODE_ERRORS, BadRequest, Conflict, Forbidden, Refusal
from mooncake_proxy.http1.http_wire import Origin
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
HEADER = REGISTER_HEADER.lower().encode()
MAX_LEASE_S = 600.0
# Bound of the instances whose starts and last message number are kept, and of the former starts.
MAX_KNOWN_INSTANCES = 4096
MAX_FORMER_STARTS = 16


_decode = msgspec.json.Decoder(RegistrationMessage).decode


@dataclass(slots=True)
class _KnownStarts:
    """The start of the instance at a URL with the number of its latest message, and the starts
    before it, whose messages must not be replayed."""

    started_at: float
    number: int
    former: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_FORMER_STARTS))

    def note(self, started_at: float, number: int) -> None:
        """Note a message that was accepted."""
        if started_at != self.started_at:
            self.former.append(self.started_at)
        self.started_at, self.number = started_at, number


@dataclass(slots=True)
class Registrations:
    """The registered instances and their leases.

    Args:
        pools: the pools to add instances to.
        now: monotonic clock, in seconds.
        secret: signs the messages; empty: no instance can register.
        forward: publishes a change to the proxy's other workers, which keep the same leases.
    """

    pools: ModelPools
    now: Callable[[], float]
    secret: bytes = b""
    forward: Callable[[MembershipChange], None] = lambda change: None
    _leases: dict[str, tuple[float, float]] = field(default_factory=dict)
    _seen: dict[str, _KnownStarts] = field(default_factory=dict)

    def is_known(self, headers: dict[bytes, bytes]) -> bool:
        """Whether the request's head is signed by an instance. Only then is its body read."""
        if not self.secret:
            return False
        return signed_digest(self.secret, headers.get(HEADER, b"")) is not None

    def receive(self, headers: dict[bytes, bytes], body: bytes) -> Instance | None:
        """Process a registration message.

        Returns:
            The instance; None if it has left the pool.

        Raises:
            Forbidden: the message is not signed with the secret.
            BadRequest: the message is malformed.
            Conflict: the message is older than one received before, or the instance was declared by
                another source.
        """
        if not self.secret:
            raise Forbidden("instances can't register here: start with --register-secret-file")
        if not is_signed(self.secret, headers.get(HEADER, b""), body):
            raise Forbidden("not signed with this proxy's --register-secret-file")
        try:
            message = _decode(body)
            role = Role(message.role)
        except DECODE_ERRORS as exc:
            raise BadRequest(f"registration: {exc}") from exc
        if not 0 < message.lease_s <= MAX_LEASE_S:
            raise BadRequest(f"registration: lease_s {message.lease_s}: wanted up to {MAX_LEASE_S}")
        url = str(Origin.parse(message.url))
        change = MembershipChange(
            ChangeOperation.DRAIN if message.is_draining else ChangeOperation.ADD,
            url,
            role,
            remove=message.is_draining,
            source=SOURCE,
            lease_s=message.lease_s,
            registered=(message.started_at, message.number),
        )
        if self._is_old(change):
            raise Conflict(f"{url}: this registration is older than what is known of it")
        instance = self._apply_new(change)
        self.forward(change)
        return instance

    def apply(self, change: MembershipChange) -> Instance | None:
        """Apply a change that another worker has verified, unless a newer one is known."""
        return None if self._is_old(change) else self._apply_new(change)

    def _is_old(self, change: MembershipChange) -> bool:
        name = str(Origin.parse(change.url))
        known = self._seen.get(name)
        if known is None or change.registered is None:
            return False
        started_at, number = change.registered
        if started_at == known.started_at:
            return number <= known.number
        is_earlier = started_at < known.started_at and name in self._leases
        return is_earlier or started_at in known.former

    def _apply_new(self, change: MembershipChange) -> Instance | None:
        name = str(Origin.parse(change.url))
        instance = self._change_pool(name, change)
        if change.registered is not None:
            known = self._seen.pop(name, None) or _KnownStarts(*change.registered)
            known.note(*change.registered)
            self._seen[name] = known
        if len(self._seen) > MAX_KNOWN_INSTANCES:
            del self._seen[next(iter(self._seen))]
        return instance

    def _change_pool(self, name: str, change: MembershipChange) -> Instance | None:
        present = next((each for each in self.pools if each.name == name), None)
        if change.operation is not ChangeOperation.ADD:
            if self._leases.pop(name, None) is None:
                return None
            logger.info("instance %s has unregistered", name)
            self.pools.removed.pop(name, None)
            return None if present is None else apply_change(self.pools, change)
        if present is not None and present.spec.source != SOURCE:
            raise Conflict(
                f"{name} is declared by {present.spec.source}, and needs no registration"
            )
        is_renewed = name in self._leases and present is not None
        self._leases[name] = (self.now() + change.lease_s, change.lease_s)
        if name in self.pools.removed:
            # An operator has removed this one. One that is started anew may join.
            return apply_change(self.pools, change) if self._is_start(name, change) else present
        if is_renewed and present is not None and present.declared == spec_of(change):
            return present  # keeps what operators and health checks have decided since
        return apply_change(self.pools, change)

    def _is_start(self, name: str, change: MembershipChange) -> bool:
        known = self._seen.get(name)
        return known is None or (change.registered or (0.0, 0))[0] != known.started_at

    def postpone_expiry(self, stopped_s: float) -> None:
        """Extend all leases by `stopped_s` seconds, in which this process read no renewals."""
        self._leases = {
            name: (ends_at + stopped_s, lease_s)
            for name, (ends_at, lease_s) in self._leases.items()
        }

    def expire(self) -> None:
        """Drain and remove instances whose lease has expired; called a few times per second."""
        now = self.now()
        for name, (ends_at, lease_s) in tuple(self._leases.items()):
            if now < ends_at:
                continue
            del self._leases[name]
            self.pools.removed.pop(name, None)
            logger.warning(
                "instance %s has not renewed its registration for %g s: it gets no more requests",
                *(name, lease_s),
            )
            try:
                self.pools.drain(name, then_remove=True)
            except Refusal as exc:
                logger.info("instance %s is gone already: %s", name, exc)
