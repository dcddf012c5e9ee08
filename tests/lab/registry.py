"""A real registry for tests: Debian's docker-registry on a free port of this machine, with its own storage.

Docker's own registry wants passwords as bcrypt, which perl's crypt() of Debian makes.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAM = "docker-registry"
START_SECONDS = 20


@dataclass(frozen=True)
class Lab:
    """A running registry: `address` is host:port, `log` its log file, `storage` what it holds."""

    address: str
    log: Path
    storage: Path

    def requests(self, pattern: str = "") -> list[str]:
        """The lines `METHOD path HTTP/x" status` of its access log that hold `pattern`, a regular expression."""
        time.sleep(0.1)  # it logs after it answers
        lines = re.findall(r'"((?:GET|HEAD|PUT|POST|PATCH|DELETE) .+? \d{3}) ', self.log.read_text())
        return [line for line in lines if re.search(pattern, line)]


def missing() -> str | None:
    """Why no registry can be started here, None when one can."""
    return None if shutil.which(PROGRAM) else f"no {PROGRAM} here (Debian's package {PROGRAM})"


@contextmanager
def registry(folder: Path, user: str | None = None, password: str | None = None, *, tls: bool = False) -> Iterator[Lab]:
    """A registry whose files lie in `folder`; with `user` and `password` it serves nobody else.

    With `tls` it speaks HTTPS alone, with a certificate that `folder`/cert.pem itself vouches for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    auth = ""
    if user is not None and password is not None:
        (folder / "htpasswd").write_text(f"{user}:{_bcrypt(password)}\n")
        auth = f"auth: {{htpasswd: {{realm: lab, path: {folder}/htpasswd}}}}\n"
    (folder / "config.yml").write_text(
        f"version: 0.1\nlog: {{level: info}}\n{auth}"
        f"storage: {{filesystem: {{rootdirectory: {folder}/storage}}, delete: {{enabled: true}}}}\n"
        f"http: {{addr: {address}{_certificate(folder) if tls else ''}}}\n"
    )
    lab = Lab(address, folder / "registry.log", folder / "storage")
    with lab.log.open("wb") as log:
        command = [PROGRAM, "serve", str(folder / "config.yml")]
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        _wait(lab, child)
        yield lab
    finally:
        child.kill()
        child.wait()


def _certificate(folder: Path) -> str:
    """Make a key and a certificate for this machine; returns the setting that names them."""
    key, certificate = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=lab",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-keyout",
            key,
            "-out",
            certificate,
        ],
        check=True,
        capture_output=True,
    )
    return f", tls: {{certificate: {certificate}, key: {key}}}"


def _wait(lab: Lab, child: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline and child.poll() is None:
        try:
            opener.open(f"http://{lab.address}/v2/", timeout=1).close()
            return
        except urllib.error.HTTPError:  # it answers, and wants a password
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"{PROGRAM} does not start:\n{lab.log.read_text()}")


def _bcrypt(password: str) -> str:
    """`password` as htpasswd -B writes it."""
    program = "print crypt($ARGV[0], '$2y$05$' . 'abcdefghijklmnopqrstuu')"
    done = subprocess.run(["perl", "-e", program, password], capture_output=True, text=True)
    if done.returncode or not done.stdout.startswith("$2y$"):
        raise RuntimeError(f"no bcrypt from perl: {done.stderr}")
    return done.stdout
