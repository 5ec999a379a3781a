"""Hosts and origins, parsed into the form that browsers use, and the server's own names."""

import ipaddress
import re
import socket
from collections.abc import Iterable

_PORTS = {"http": 80, "https": 443}
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[^\s\[\]:/?#@\\]+)(?::(\d{0,5}))?")
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(.+)")
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Names:
    """The hosts that a server answers to, on any port, because a proxy in front of it may use another port.

    A name must be listed, because the owner of any other name can make it resolve to this machine. An address must be
    one that the server listens on. If the server listens on all addresses, any address is allowed.

    Args:
        host: the address that the server listens on.
        others: additional names.

    Raises:
        ValueError: one of `others` is not a host.
    """

    def __init__(self, host: str, others: Iterable[str] = ()):
        self._address = _address(host.partition("%")[0])  # clients omit a zone id such as the one in fe80::1%eth0
        self._names = {"localhost", host.lower(), *map(name_of, others)}
        if self._address is None or not self._address.is_loopback:
            self._names.add(socket.gethostname().lower())

    def __contains__(self, authority: str) -> bool:
        try:
            name, _ = split(authority)
        except ValueError:
            return False
        if (address := _address(name)) is None:
            return name in self._names
        is_open = self._address is not None and self._address.is_unspecified
        return is_open or address.is_loopback or address == self._address or name in self._names


def name_of(host: str) -> str:
    """Return a host name in lower-case ASCII without its trailing dot, or an IP address in its shortest form.

    Raises:
        ValueError: `host` is not a host.
    """
    if (address := _address(host)) is not None:
        return str(address)
    try:
        name = host.removesuffix(".").encode("idna").decode().lower()
    except UnicodeError:
        name = ""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{host!r} is not a host; write a name such as example.com, without a scheme, port or path.")
    return name


def split(authority: str) -> tuple[str, int | None]:
    """Split ``host:port`` into the host, normalised by `name_of`, and the port, or None if there is no port.

    Raises:
        ValueError: `authority` is not a host, or has more than a host and a port.
    """
    match = _AUTHORITY.fullmatch(authority.lower())
    if match is None:
        raise ValueError(f"{authority!r} is not a host and a port.")
    return name_of(match[1]), int(match[2]) if match[2] else None


def origin_of(text: str) -> str:
    """Return an origin as browsers send it: in lower-case ASCII, without its scheme's default port.

    Raises:
        ValueError: `text` is not an origin.
    """
    match = _ORIGIN.fullmatch(text.lower())
    try:
        name, port = split(match[2]) if match else ("", None)
    except ValueError:
        name, port = "", None
    if match is None or not name:
        raise ValueError(f"{text!r} is not an origin; write an origin such as https://example.com, without a path.")
    shown = f"[{name}]" if ":" in name else name
    return f"{match[1]}://{shown}" + ("" if port in (None, _PORTS.get(match[1])) else f":{port}")


def is_same(origin: str, authority: str) -> bool:
    """Return whether `origin` has this ``host:port``. Both schemes match, because a proxy may add TLS."""
    match = _ORIGIN.fullmatch(origin.lower())
    if match is None or match[1] not in _PORTS:
        return False
    default_port = _PORTS[match[1]]
    try:
        (name, port), (host, its_port) = split(match[2]), split(authority)
    except ValueError:
        return False
    return (name, port or default_port) == (host, its_port or default_port)


def _address(host: str) -> Address | None:
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
