"""What this machine, or the container it lends us, has to offer."""

from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes of host memory that can still be allocated."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    try:  # a container's limit; caches count as used, but can be dropped
        limit, used = ((CGROUP / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        cache = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except OSError:
        return free
    return free if limit == "max" else min(free, int(limit) - int(used) + int(cache["file"]))
