"""HAProxy with the configuration in deploy/, on free loopback ports, for tests and benchmarks."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

CONFIG = Path(__file__).resolve().parent.parent / "deploy" / "haproxy.cfg"
PROGRAM = shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin") or shutil.which("haproxy")
START_S = 240.0  # only a guard


@dataclass(frozen=True)
class Proxy:
    url: str
    admin_socket: Path

    def tell(self, command: str) -> str:
        """A command of HAProxy's runtime API, and its answer."""
        with socket.socket(socket.AF_UNIX) as admin:
            admin.connect(str(self.admin_socket))
            admin.sendall(f"{command}\n".encode())
            return b"".join(iter(lambda: admin.recv(4096), b"")).decode()


def configured(servers: Mapping[str, int], port: int, admin_socket: Path, **changes: str) -> str:
    """The configuration with other addresses. `servers`: ports by name. `changes`: of whole settings."""
    text = CONFIG.read_text()
    text = re.sub(r"(?m)^ +server .*\n", "", text)
    text += "".join(f"    server {name} 127.0.0.1:{at}\n" for name, at in servers.items())
    replaced = {"bind :8080": f"bind 127.0.0.1:{port}", "/run/haproxy/admin.sock": str(admin_socket)}
    for old, new in {**replaced, **changes}.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


@contextmanager
def proxying(servers: Mapping[str, int], **changes: str) -> Iterator[Proxy]:
    assert PROGRAM is not None
    with tempfile.TemporaryDirectory(prefix="haproxy") as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port, admin_socket, file = free.getsockname()[1], Path(folder, "admin.sock"), Path(folder, "cfg")
        free.close()
        file.write_text(configured(servers, port, admin_socket, **changes))
        process = subprocess.Popen([PROGRAM, "-db", "-f", str(file)], stderr=subprocess.PIPE, text=True)
        try:
            _wait_for(process, port)
            yield Proxy(f"http://127.0.0.1:{port}", admin_socket)
        finally:
            process.kill()
            process.wait()


def _wait_for(process: subprocess.Popen[str], port: int) -> None:
    for _ in range(int(START_S / 0.02)):
        if process.poll() is not None:
            assert process.stderr is not None
            raise AssertionError(f"HAProxy has ended: {process.stderr.read()}")
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.02):
            return
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.02)
    raise AssertionError("HAProxy does not listen")
