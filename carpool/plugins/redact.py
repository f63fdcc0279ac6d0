"""Credentials in addresses (`https://USER:PASSWORD@host/a.jsonl?token=...`), which no record, message or report shows.

`redact` is called where text leaves a process: by standard output and error of `carpool train` and of ranks, the files
of a run's folder, what trackers get, errors that ranks record, and the report. It knows an address by its look. Stores
say what they were given in other words, too ("no bucket KEY:SECRET@data"): who calls one redacts its errors by the
address itself.

    redact("https://anna:pw@host/a.jsonl?token=x")        ->  https://REDACTED@host/a.jsonl?token=REDACTED
    redact("no bucket KEY:SEC@data", "s3://KEY:SEC@data")  ->  no bucket REDACTED@data
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import unquote

REDACTED = "REDACTED"
_ADDRESS = re.compile(r"[A-Za-z][\w+.-]*://[^\s\"'<>]+")
# Before the last @ of the host; and, because secret keys have slashes, of what has a colon that no port follows.
_USER = re.compile(r"(?<=://)(?:[^\s/\"<>]+|(?:(?!::)[^\s/@\"<>])*:(?!\d+/|//|:)[^\s@\"<>]*)(?=@)")
# Of the query, or after #. A glob's question mark has no name and equals sign behind it.
_VALUE = re.compile(r"(?<=[?&#;])([\w.~%\[\]-]+=)([^\s&#;\"'<>]+)")
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{8,}")


def redact(text: str, *addresses: str) -> str:
    """The text without what only its writer should know.

    Args:
        addresses: whose credentials are left out wherever they stand, too."""
    for secret in sorted({one for address in addresses for one in _secrets(address)}, key=len, reverse=True):
        short = len(secret) < 6  # which is part of words
        text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)" if short else re.escape(secret), REDACTED, text)
    if "://" in text:
        text = _USER.sub(REDACTED, text)
        text = _ADDRESS.sub(lambda found: _VALUE.sub(rf"\1{REDACTED}", found[0]), text)
    return _HUB_TOKEN.sub(REDACTED, text) if "hf_" in text else text


def bare(address: str) -> str:
    """An address without credentials and query, such as for a name."""
    return re.sub(rf"{REDACTED}@|[?&#;][\w.~%\[\]-]+={REDACTED}", "", redact(address))


def _secrets(address: str) -> Iterator[str]:
    """Credentials of an address, as they are written there and as stores read them."""
    found: list[str] = []
    for user in _USER.findall(address):
        found += [user, *user.split(":", 1)]
    if "://" in address:
        found += [value for _, value in _VALUE.findall(address) if len(value) > 5]
    for one in found:
        yield from filter(None, (one, unquote(one)))
