"""Resolves the hosts of clients' URLs and decides which addresses the server may connect to.

The caller must connect to the returned addresses and must not resolve the name again: a second lookup could
return a private address that was never checked.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket

from outrider.media.limits import InvalidMedia

log = logging.getLogger(__name__)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# An IPv6 address here holds an IPv4 address in its last 32 bits; a gateway connects to that one (RFC 6052).
NAT64_NETWORK = ipaddress.ip_network("64:ff9b::/96")
# For gateways inside one's own network (RFC 8215): not public, whatever IPv4 address is in it.
LOCAL_NAT64_NETWORK = ipaddress.ip_network("64:ff9b:1::/48")


async def resolve(host: str, port: int, allow_private: bool) -> list[str]:
    """Return the addresses of a host, in the system's order. Refuse a host with any private address."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError) as error:
        log.info("the host %r of an image's URL cannot be resolved: %r", host[:100], error)
        raise InvalidMedia("the host cannot be resolved") from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    if not addresses:
        raise InvalidMedia("the host cannot be resolved")
    if not allow_private:
        for address in addresses:
            if not is_public(address):
                log.info("the host %r of an image's URL has the address %s", host[:100], address)
                raise InvalidMedia(
                    "the host is not on the public internet "
                    "(the server's option --allow-private-urls allows private addresses)"
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
        if address in NAT64_NETWORK:
            return _is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address.is_site_local or address in LOCAL_NAT64_NETWORK:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)
