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
# Each pattern passes over a text once: it may be a page of megabytes without a blank.
_PORT = re.compile(r":\d+$")
_ADDRESS = re.compile(r"://[^\s\"'<>]+")
_AFTER_SCHEME = re.compile(r"(?<=://)(?:[^\s\"<>:]|:(?!//))+")
# Of the query, or after #. A glob's question mark has no name and equals sign behind it. What JSON escapes, a quote or
# the end of a line, ends it.
_VALUE = re.compile(r"(?<=[?&#;])([\w.~%\[\]-]+=)((?:[^\s&#;\"'<>\\]|\\[^\s\"'nrt])+)")
# They have 34 letters and digits; hf_checkpoints is a folder.
_HUB_TOKEN = re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{30,}")


def redact(text: str, *addresses: str) -> str:
    """The text without what only its writer should know.

    Args:
        addresses: whose credentials are left out wherever they stand, too."""
    for secret in sorted({one for address in addresses for one in _secrets(address)}, key=len, reverse=True):
        short = len(secret) < 6  # which is part of words
        text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)" if short else re.escape(secret), REDACTED, text)
    if "://" in text:
        text = _AFTER_SCHEME.sub(lambda found: _without_user(found[0]), text)
        text = _ADDRESS.sub(lambda found: _VALUE.sub(rf"\1{REDACTED}", found[0]), text)
    return _HUB_TOKEN.sub(REDACTED, text)


def bare(address: str) -> str:
    """An address without credentials and query, such as for a name."""
    return re.sub(rf"{REDACTED}@|[?&#;][\w.~%\[\]-]+={REDACTED}", "", redact(address))


def _user(rest: str) -> str:
    """Who asks, of an address's text after ://. Before the last @ of the host; and, because secret keys have slashes,
    before the first one of what has a colon that no port follows."""
    host = rest.partition("/")[0]
    if "@" in host:
        return host.rpartition("@")[0]
    return rest.partition("@")[0] if "@" in rest and ":" in _PORT.sub("", host.partition("::")[0]) else ""


def _without_user(rest: str) -> str:
    user = _user(rest)
    return REDACTED + rest[len(user) :] if user else rest


def _secrets(address: str) -> Iterator[str]:
    """Credentials of an address, as they are written there and as stores read them."""
    found: list[str] = []
    for user in filter(None, map(_user, _AFTER_SCHEME.findall(address))):
        found += [user, *user.split(":", 1)]
    if "://" in address:
        found += [value for _, value in _VALUE.findall(address) if len(value) > 5]
    for one in found:
        yield from filter(None, (one, unquote(one)))
