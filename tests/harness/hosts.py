"""Simulated hosts: namespaces that stand for machines.

A host has its own network, host name, mounts (with its own /dev/shm), IPC and process
ids. It lives as long as one idle process in it; nothing is named in the real system, so
nothing remains when that process ends, however the test ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PATH = os.environ.get("PATH", "") + os.pathsep + "/usr/sbin" + os.pathsep + "/sbin"
_PR_SET_PDEATHSIG = 1


@functools.cache
def why_no_hosts() -> str | None:
    """None where simulated hosts can be made, else the reason to skip."""
    if os.geteuid() != 0:
        return "simulated hosts are network namespaces: they need root"
    try:
        with Host("probe", shm="1m") as host:
            host.run(["ip", "link", "add", "probe0", "type", "veth", "peer", "name", "probe1"])
            host.run(["ip", "link", "add", "probe2", "type", "bridge"])
    except (OSError, subprocess.SubprocessError) as error:
        return f"simulated hosts cannot be made here: {error}"
    return None


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Host:
    """One simulated machine.

    Args:
        name: its host name.
        shm: size of its /dev/shm, as `mount -o size=` takes it.
        hosts: text of its /etc/hosts; by default it knows itself as a loopback address.
        network_of: a host whose network it uses, as containers of one pod do.
    """

    def __init__(
        self,
        name: str,
        *,
        shm: str = "1g",
        hosts: str | None = None,
        network_of: Host | None = None,
    ) -> None:
        self.name = name
        self._directory = tempfile.TemporaryDirectory(prefix=f"host_{name}_")
        mount = f"mount -t tmpfs -o size={shm} tmpfs /dev/shm"
        path = Path(self._directory.name) / "hosts"
        path.write_text(hosts or f"127.0.0.1 localhost {name}\n::1 localhost\n")
        setup = (
            f"hostname {name} && {mount} && mount --bind {path} /etc/hosts && ip link set lo up"
        )
        network = ["nsenter", "--target", str(network_of.pid), "--net"] if network_of else []
        self._holder = subprocess.Popen(
            [
                *network,
                *("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork"),
                *([] if network_of else ["--net"]),
                *("--kill-child", "sh", "-c"),
                f"{setup} && echo ready && exec sleep infinity",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PATH": _PATH},
            text=True,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline().strip() != "ready":
            _, problem = self._holder.communicate(timeout=10)
            raise OSError(f"host {name}: {problem.strip()}")
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        self.pid: int = int(children.read_text().split()[0])
        """The idle process whose namespaces the host is."""
        self.own_pids = {self.pid, self._holder.pid}

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Starts `command` on the host, in a session of its own."""
        environment: Mapping[str, str] = options.pop("env", os.environ)
        enter = ["nsenter", "--target", str(self.pid)]
        enter += ["--mount", "--net", "--uts", "--ipc", "--pid", "--wd=" + os.getcwd()]
        return subprocess.Popen(
            [*enter, *command],
            env={**environment, "PATH": _PATH},
            text=True,
            start_new_session=True,
            **options,
        )

    def run(self, command: Sequence[str], *, timeout: float = 20, **options: Any) -> str:
        """Runs `command` on the host and returns what it printed.

        Raises:
            subprocess.CalledProcessError: it failed; the text has its standard error.
            subprocess.TimeoutExpired: it did not end; it has been killed.
        """
        child = self.popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
        try:
            output, _ = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            end_session(child)
            raise
        if child.returncode != 0:
            raise subprocess.CalledProcessError(child.returncode, list(command), output)
        return output

    def close(self) -> None:
        """Ends the host and every process on it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._holder.kill()
        self._holder.communicate()
        self._directory.cleanup()


def end_session(child: subprocess.Popen[str]) -> tuple[str, str]:
    """Kills a child that leads a session, and all in it; returns what it had written."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    try:
        output, errors = child.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        return "", "output still held open by a process outside the session"
    return output or "", errors or ""


class Lan:
    """Simulated hosts `host0`, `host1`, ... joined by a switch.

    Each has an interface `eth0` with addresses 10.77.0.<n+1>/24 and fd77::<n+1>/64.

    Args:
        count: number of hosts.
        ipv4: whether `eth0` has its IPv4 address.
        etc_hosts: text of every host's /etc/hosts; `{name}` and `{address}` stand for the
            host's own. By default every host knows every host.
    """

    def __init__(
        self, count: int, *, ipv4: bool = True, etc_hosts: str | None = None, shm: str = "1g"
    ) -> None:
        self.hosts: list[Host] = []
        self._switch = Host("switch", shm="1m")
        everyone = "127.0.0.1 localhost\n::1 localhost\n" + "".join(
            f"{self.address(n) if ipv4 else self.address6(n)} host{n}\n" for n in range(count)
        )
        try:
            self._switch.run(["ip", "link", "add", "lan", "type", "bridge"])
            self._switch.run(["ip", "link", "set", "lan", "up"])
            for n in range(count):
                text = (etc_hosts or everyone).format(name=f"host{n}", address=self.address(n))
                host = Host(f"host{n}", hosts=text, shm=shm)
                self.hosts.append(host)
                # Process ids as the switch sees them are of no use here: the link is made
                # from outside its namespaces of processes.
                _ip(self._switch, f"link add port{n} type veth peer name eth0 netns {host.pid}")
                _ip(self._switch, f"link set port{n} master lan up")
                if ipv4:
                    host.run(["ip", "addr", "add", f"{self.address(n)}/24", "dev", "eth0"])
                host.run(
                    ["ip", "addr", "add", f"{self.address6(n)}/64", "dev", "eth0", "nodad"]
                )
                host.run(["ip", "link", "set", "eth0", "up"])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Lan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def address(n: int) -> str:
        """IPv4 address of host `n`."""
        return f"10.77.0.{n + 1}"

    @staticmethod
    def address6(n: int) -> str:
        """IPv6 address of host `n`."""
        return f"fd77::{n + 1}"

    def cut(self, n: int) -> None:
        """Unplugs host `n` from the switch; nobody gets a reset."""
        _ip(self._switch, f"link set port{n} down")

    def join(self, n: int) -> None:
        """Plugs host `n` in again."""
        _ip(self._switch, f"link set port{n} up")

    def close(self) -> None:
        """Ends all hosts."""
        for host in [*self.hosts, self._switch]:
            host.close()


def _ip(host: Host, arguments: str) -> None:
    """Runs `ip` in the network of `host` but with this process's view of process ids."""
    subprocess.run(
        ["nsenter", "--target", str(host.pid), "--net", "ip", *arguments.split()],
        check=True,
        timeout=20,
        env={**os.environ, "PATH": _PATH},
    )
