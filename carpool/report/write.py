"""From a template to a file: one page that needs nothing else, written at once, so that nobody sees half of one.

Whatever comes from a run is escaped by the template: a model's samples are text that nobody has checked. The page's
policy lets the browser run page.js, by its hash, and no other script.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from carpool.plugins.redact import redact
from carpool.report.units import bytes_text, count_text, ms_text, percent_text

HERE = Path(__file__).parent
# Control characters other than tab and line ends, and half surrogates, are not allowed in HTML, and a byte-level model
# does produce them. Marks that turn the direction of writing could make a page say what its source does not.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def fill(template: str, **context: Any) -> str:
    """The page as HTML. Raises ImportError if jinja2 is missing."""
    try:
        import jinja2
    except ImportError as error:
        raise ImportError("a page needs jinja2, which is missing: pip install jinja2") from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(bytes=bytes_text, ms=ms_text, percent=percent_text, count=count_text)
    script = (HERE / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = environment.get_template(template).render(**context, script=script, script_hash=f"sha256-{digest}")
    return _UNPRINTABLE.sub("\ufffd", page)


def write_page(output: Path, what: str, render: Callable[[], str]) -> Path:
    """Replace the file by what `render` makes, at once; returns its path. `what`: "report", "page".

    Raises:
        ValueError: it cannot be written there, which is looked at first."""
    if output.is_dir() or not output.parent.is_dir():
        problem = "is a folder" if output.is_dir() else f"cannot be written: the folder {output.parent} does not exist"
        raise ValueError(f"{output} {problem}; name a file to write the {what} to")
    page = render()
    draft = output.with_name(f".{output.name}.part")
    try:
        draft.write_text(redact(page), encoding="utf-8")
        os.replace(draft, output)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise ValueError(f"{output} cannot be written ({error.strerror}); name another file for the {what}") from error
    return output
