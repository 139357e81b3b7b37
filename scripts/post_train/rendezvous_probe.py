"""Checks that the nodes of a run can connect: the first listens at the rendezvous address, the others call it once.

python rendezvous_probe.py listen|call HOST PORT CALLERS SECONDS
"""

import socket
import sys
import time


def listen(host: str, port: int, callers: int, seconds: float) -> None:
    """Wait until all callers have connected. Binds to all interfaces, as the rendezvous does; callers use `host`."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        server = socket.create_server(("", port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        sys.exit(f"MASTER_PORT {port} is not free ({error.strerror}); choose another")
    end = time.monotonic() + seconds
    with server:
        for missing in range(callers, 0, -1):
            server.settimeout(max(0.01, end - time.monotonic()))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                sys.exit(
                    f"{missing} of {callers} other nodes have not reached {host}:{port} "
                    f"in {seconds:g} s"
                )
            connection.close()


def call(host: str, port: int, seconds: float) -> None:
    """Connect once; the listener may not be up yet."""
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=seconds).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                sys.exit(
                    f"MASTER_ADDR {host}:{port} cannot be reached ({error.strerror or error}); "
                    "check name and firewall"
                )
            time.sleep(0.2)


if __name__ == "__main__":
    role, host, port, callers, seconds = sys.argv[1:]
    if role == "listen":
        listen(host, int(port), int(callers), float(seconds))
    else:
        call(host, int(port), float(seconds))
