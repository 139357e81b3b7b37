"""Simulated hosts on one machine: network namespaces with separate addresses and names, connected by a virtual link."""

import os
import shutil
import signal
import subprocess
from contextlib import contextmanager
from pathlib import Path

NETWORK = "10.213.47"  # of addresses that are not routed
INTERFACE = "eth0"


def missing():
    """Why there can be no such hosts here; empty if there can."""
    for tool in ("ip", "pdsh", "setsid"):
        if not shutil.which(tool):
            return f"{tool} is not installed"
    probe = f"probe-{os.getpid()}"
    made = subprocess.run(
        ["ip", "netns", "add", probe], capture_output=True, text=True, check=False
    )
    if made.returncode:
        return f"network namespaces are not permitted here: {made.stderr.strip()}"
    ran = subprocess.run(
        ["ip", "netns", "exec", probe, "true"], capture_output=True, text=True, check=False
    )
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return (
        f"network namespaces cannot be entered here: {ran.stderr.strip()}" if ran.returncode else ""
    )


@contextmanager
def two_hosts():
    """Names of two hosts that reach each other by them, and nobody else."""
    names = [f"sage-{os.getpid()}-{letter}" for letter in "ab"]
    addresses = [f"{NETWORK}.{number}" for number in (1, 2)]
    table = "127.0.0.1 localhost\n" + "".join(
        f"{a} {n}\n" for a, n in zip(addresses, names, strict=True)
    )
    try:
        for name in names:
            ip("netns", "add", name)
            folder = Path("/etc/netns", name)  # `ip netns exec` puts its files over those of /etc
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(table)
        first, second = names
        ip(
            "link",
            "add",
            INTERFACE,
            "netns",
            first,
            "type",
            "veth",
            "peer",
            "name",
            INTERFACE,
            "netns",
            second,
        )
        for name, address in zip(names, addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", INTERFACE, "up")
        yield names
    finally:
        for name in names:
            kill_all(name)
            subprocess.run(["ip", "netns", "del", name], check=False)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def kill_all(host):
    """As if it had lost power: every process there is gone at once."""
    found = subprocess.run(
        ["ip", "netns", "pids", host], capture_output=True, text=True, check=False
    ).stdout.split()
    for pid in map(int, found):
        os.kill(pid, signal.SIGKILL)
    return len(found)
