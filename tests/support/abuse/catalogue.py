"""All attacks, in the order of the table."""

from __future__ import annotations

from support.abuse import bodies, connections, faults, fuzzing, peer_ports

ATTACKS = (
    *bodies.ATTACKS,
    *connections.ATTACKS,
    *peer_ports.ATTACKS,
    *fuzzing.ATTACKS,
    *faults.ATTACKS,
)
BY_NAME = {attack.name: attack for attack in ATTACKS}
