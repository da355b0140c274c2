"""What the multi-process tests share: ranks in fresh processes, simulated hosts, leftovers.

`Ranks` runs a function on every rank of a world and never hangs; `Host` and `Lan` are
network, mount and host-name namespaces that stand for machines; `Census` counts what
processes leave behind.
"""

from harness.hosts import Host, Lan, why_no_hosts
from harness.leftovers import Census, open_files, resident_bytes
from harness.ranks import BACKEND, Failure, Me, Outcome, Ranks, preload

__all__ = [
    "BACKEND",
    "Census",
    "Failure",
    "Host",
    "Lan",
    "Me",
    "Outcome",
    "Ranks",
    "open_files",
    "preload",
    "resident_bytes",
    "why_no_hosts",
]
