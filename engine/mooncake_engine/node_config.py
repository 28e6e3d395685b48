"""NodeConfig: options of an instance whose ranks run on several hosts, without cluster manager."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mooncake_engine.errors import ConfigError
from mooncake_hal.options import option, positive_int, read_secret_file


def read_node_secret(path: Path) -> str:
    """Reads the secret with which the nodes of an instance authenticate each other.

    Raises:
        ConfigError: the file can't be read, is empty, or holds a secret that is too short.
    """
    return read_secret_file(
        path, "--node-secret-file", f"openssl rand -hex 32 > {path}", ConfigError
    )


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """The hosts (nodes) of an instance's ranks: each of ``nnodes`` runs the same number of ranks,
    in order. Node 0 also runs the API and the scheduler; the others join it.

    Raises:
        ConfigError: the values contradict each other.
    """

    nnodes: int = field(
        default=1,
        metadata=option(
            metavar="N",
            parse=positive_int,
            help="number of hosts that the ranks are divided over evenly; run serve on each",
        ),
    )
    node_rank: int = field(
        default=0,
        metadata=option(
            metavar="R",
            help="index of this host; 0 runs the API, the others join it",
        ),
    )
    master_addr: str = field(
        default="127.0.0.1",
        metadata=option(metavar="HOST", help="address of node 0"),
    )
    master_port: int = field(
        default=29501,
        metadata=option(metavar="PORT", help="port on which node 0 waits for the others"),
    )
    secret: str = field(
        default="",
        metadata=option(
            "--node-secret-file",
            parse=Path,
            to_field=read_node_secret,
            default=None,
            metavar="FILE",
            help="file with the secret that all nodes of an instance share; required for several "
            "nodes",
        ),
    )

    def __post_init__(self) -> None:
        if self.nnodes == 1 and self.node_rank == 0:
            return
        if not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(
                f"--node-rank must be from 0 to {self.nnodes - 1} with --nnodes {self.nnodes}, "
                f"got {self.node_rank}"
            )
        if not 0 < self.master_port < 65_536:
            raise ConfigError(f"--master-port must be from 1 to 65535, got {self.master_port}")
        if not self.secret:
            raise ConfigError(
                f"--nnodes {self.nnodes} needs --node-secret-file with the same secret on every "
                "node: any host that joins an instance sees its prompts and can run code in it"
            )

    def check(self, num_ranks: int, others: Mapping[str, bool]) -> None:
        """Check that the ranks can be divided over the nodes.

        Args:
            num_ranks: number of ranks in all.
            others: options that exclude several nodes, and whether they are set.

        Raises:
            ConfigError: the number can't be divided, or an option excludes several nodes.
        """
        if self.nnodes == 1:
            return
        if num_ranks % self.nnodes:
            raise ConfigError(
                f"--nnodes {self.nnodes} was requested with {num_ranks} ranks (--dp-size times "
                "--tp-size times --pp-size): each node runs the same number of ranks; use a "
                "divisor of their number"
            )
        for name, is_set in others.items():
            if is_set:
                raise ConfigError(
                    f"--nnodes {self.nnodes} was requested with {name}, which does not support "
                    "several nodes: leave one of them out"
                )

    def ranks_of(self, node: int, num_ranks: int) -> range:
        """Returns the ranks of a node, of ``num_ranks`` in all."""
        per_node = num_ranks // self.nnodes
        return range(node * per_node, (node + 1) * per_node)
