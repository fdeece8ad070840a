"""Which names mean this machine and nobody else. Pure; any thread."""

from __future__ import annotations

import ipaddress
import re

_HOST_HEADER = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]]+))(?::\d{1,5})?")


def is_loopback(host: str) -> bool:
    """Whether a name or an address is this machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def names_loopback(host_header: str) -> bool:
    """The same of a Host header: a page's name that was made to point here is not ours."""
    found = _HOST_HEADER.fullmatch(host_header)
    return found is not None and is_loopback(found[1] or found[2])
