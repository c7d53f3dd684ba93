"""Whom the platform may call on behalf of a job: hosts that are named, and never the cluster's own inside.

A job's owner chooses the address of a reward service or of a model as judge, so it is checked twice: by its name when
the job is submitted and when it is called, and by the address that the name stands for at that moment.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from spo.errors import FieldViolation, InvalidInput

_PORTS = {"http": 80, "https": 443}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class AddressRules:
    """hosts: `name` (ports 80 and 443) or `name:port`; networks: those that need not be public, as CIDR."""

    hosts: frozenset[str]
    networks: tuple[Network, ...] = ()

    @classmethod
    def of(cls, hosts: Iterable[str], networks: Iterable[str] = ()) -> AddressRules:
        """The rules of two lists. Raises InvalidInput on what is no network."""
        try:
            read = tuple(ipaddress.ip_network(network) for network in networks)
        except ValueError as error:
            raise InvalidInput(f"not a network: {error}", code="address_not_allowed") from None
        return cls(frozenset(host.lower() for host in hosts), read)

    def require_named(self, url: str, pointer: str = "/url") -> None:
        """Raises InvalidInput (code "address_not_allowed") unless the URL is of http or https and its host is named."""
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").lower(), parts.port or _PORTS.get(parts.scheme, 0)
        except ValueError:
            raise _refusal(pointer, "must be a URL") from None
        if parts.scheme not in _PORTS or not host or parts.username is not None or parts.password is not None:
            raise _refusal(pointer, "must be an address of http or https with a host and without a user")
        named = f"[{host}]" if ":" in host else host
        usual = port in _PORTS.values() and named in self.hosts
        if not usual and f"{named}:{port}" not in self.hosts:
            raise _refusal(pointer, f"{named}:{port} is not among the hosts that SPO_VERIFIER_HTTP_HOSTS allows")

    def reaches(self, address: str) -> bool:
        """Whether an IP address may be connected to: public, also in what it embeds, or in one of the networks."""
        try:
            own = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return False
        return any(own in network for network in self.networks) or all(map(_is_public, _meant_by(own)))


def _meant_by(address: Address) -> list[Address]:
    """The address and those that it stands for: IPv4 within IPv6."""
    meant: list[Address] = [address]
    if isinstance(address, ipaddress.IPv6Address):
        embedded = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if address in _NAT64:
            embedded.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        meant += [each for each in embedded if each is not None]
    # What is only a way to write an IPv4 address is as public as that one.
    return meant[1:] if len(meant) > 1 else meant


def _is_public(address: Address) -> bool:
    return address.is_global and not address.is_multicast


def _refusal(pointer: str, message: str) -> InvalidInput:
    return InvalidInput(
        f"this address is not called: {message}",
        code="address_not_allowed",
        violations=(FieldViolation(pointer, message),),
    )
