"""What connections need before `outrider serve` loads a model: a certificate, file descriptors."""

from __future__ import annotations

import resource
from contextlib import suppress
from typing import TYPE_CHECKING

from outrider.config import InvalidConfig

if TYPE_CHECKING:
    import ssl

OTHER_DESCRIPTORS = 256  # beside those of connections: weights, caches, images, libraries; chosen by hand


def tls_context(cert: str | None, key: str | None) -> ssl.SSLContext | None:
    """None: without --tls-cert the server speaks plain HTTP."""
    if cert is None:
        if key is not None:
            raise InvalidConfig("--tls-key needs --tls-cert, the certificate that it belongs to")
        return None
    import ssl  # here, since the supervisor should stay small

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    for flag, file in (("--tls-cert", cert), ("--tls-key", key)):
        _check_readable(flag, file)
    try:
        context.load_cert_chain(cert, key, password=_refuse_password)
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).replace("_", " ").lower()
        files = cert if key is None else f"{cert} and {key}"
        raise InvalidConfig(
            f"--tls-cert, --tls-key: {files} are not a certificate chain and its private key in PEM format "
            f"({reason})"
        ) from None
    return context


def _check_readable(flag: str, file: str | None) -> None:
    if file is None:
        return
    try:
        with open(file, "rb"):
            pass
    except OSError as error:
        raise InvalidConfig(f"{flag} {file} cannot be read: {error.strerror}") from None


def _refuse_password() -> str:
    raise InvalidConfig("--tls-key: the private key is encrypted. Decrypt it: openssl pkey -in KEY -out FILE")


def allow_connections(max_connections: int) -> None:
    """Raise the process's limit of open files as far as --max-connections needs it."""
    needed = max_connections + OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard == resource.RLIM_INFINITY or hard >= needed:
        with suppress(ValueError, OSError):  # macOS has a lower limit of its own than the one that it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
            return
    raise InvalidConfig(
        f"--max-connections {max_connections} needs {needed} open files, and this process may not have so "
        "many (ulimit -Hn): use a smaller number"
    )
