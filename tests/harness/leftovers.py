"""What processes hold and what they leave behind."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.hosts import Host


def open_files(pid: int | str = "self") -> dict[int, str]:
    """The file descriptors of a process and what they refer to."""
    found: dict[int, str] = {}
    directory = f"/proc/{pid}/fd"
    for name in os.listdir(directory):
        # The descriptor of the listing itself is gone by now.
        with contextlib.suppress(FileNotFoundError):
            found[int(name)] = os.readlink(f"{directory}/{name}")
    return found


def resident_bytes(pid: int | str = "self") -> int:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Census:
    """Everything on a simulated host that could outlive a process."""

    processes: frozenset[str]
    shm: frozenset[str]
    unix: frozenset[str]
    """Bound Unix sockets, abstract names with a leading @, and unnamed ones by inode."""
    tcp: frozenset[str]
    """TCP and UDP sockets, without those in TIME_WAIT, which the kernel keeps."""

    @classmethod
    def of(cls, host: Host) -> Census:
        """Counts what `host` holds; exact, because nothing else lives in its namespaces."""
        network = os.readlink(f"/proc/{host.pid}/ns/net")
        processes = set()
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) not in host.own_pids:
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{entry}/ns/net") == network:
                        command = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")[0]
                        processes.add(f"{entry} {command.decode(errors='replace')}")
        table = Path(f"/proc/{host.pid}/net")
        unix = set()
        for line in (table / "unix").read_text().splitlines()[1:]:
            fields = line.split()
            unix.add(fields[7] if len(fields) > 7 else f"inode {fields[6]}")
        tcp = set()
        for name in ("tcp", "tcp6", "udp", "udp6"):
            if (table / name).exists():
                for line in (table / name).read_text().splitlines()[1:]:
                    fields = line.split()
                    if fields[3] != "06":
                        tcp.add(f"{name} {fields[1]} -> {fields[2]} state {fields[3]}")
        shm = os.listdir(f"/proc/{host.pid}/root/dev/shm")
        return cls(frozenset(processes), frozenset(shm), frozenset(unix), frozenset(tcp))

    def since(self, before: Census) -> dict[str, list[str]]:
        """What is here now and was not `before`, by kind; empty when nothing is left."""
        new = {
            "processes": self.processes - before.processes,
            "shm": self.shm - before.shm,
            "unix": self.unix - before.unix,
            "tcp": self.tcp - before.tcp,
        }
        return {kind: sorted(names) for kind, names in new.items() if names}
