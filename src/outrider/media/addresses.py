"""Which addresses a server may be sent to by its clients.

Names are resolved first, and what was checked is what is connected to, so that a name cannot point elsewhere
the second time it is asked.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket

from outrider.media.limits import InvalidMedia

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# Where an IPv6 address carries an IPv4 one that a gateway would use.
CARRIERS = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("64:ff9b:1::/48"))


async def resolve(host: str, port: int, allow_private: bool) -> list[str]:
    """The addresses of a host, in the system's order. One private address among them refuses the host."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError):
        raise InvalidMedia(f"the host {host[:100]!r} of a picture's URL is not known") from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    if not addresses:
        raise InvalidMedia(f"the host {host[:100]!r} of a picture's URL has no address")
    if not allow_private:
        for address in addresses:
            if not is_public(address):
                raise InvalidMedia(
                    f"the host {host[:100]!r} of a picture's URL is not on the public internet "
                    "(the server's --allow-private-urls allows that)"
                )
    return addresses


def is_public(address: str) -> bool:
    try:
        parsed: Address = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return _is_public(parsed)


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if inner is not None:
            return _is_public(inner)
        if any(address in network for network in CARRIERS):
            return _is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address.is_site_local:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)
