"""The sending process of the plain-stream limit: ``python -m mooncake_hal.bench.socket_stream``."""

from __future__ import annotations

import socket
import sys
import threading
from contextlib import ExitStack

from mooncake_hal.bench.machine_limits import LOOPBACK, touched, tune


def main(port: int, sockets: int, total_bytes: int) -> None:
    """Open the sockets, and send a share of the bytes over each whenever the receiver requests
    it."""
    share = total_bytes // sockets
    with ExitStack() as stack:
        content = touched(stack, total_bytes)

        def serve(at: int) -> None:
            with socket.create_connection((LOOPBACK, port)) as connection:
                tune(connection)
                while connection.recv(2):
                    connection.sendall(content[at * share : (at + 1) * share])

        threads = [threading.Thread(target=serve, args=(at,)) for at in range(sockets)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:4]))
