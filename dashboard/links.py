"""A scenario as a part of an address, so that a page can be sent to somebody."""

from __future__ import annotations

import base64
import binascii
import zlib

from tonnage.dashboard.reading import MOST_TEXT_BYTES
from tonnage.sim.domain import BadInputError

# What browsers, proxies and chat programs pass on whole.
LONGEST_LINK = 8000
_DAMAGED = "link: it is damaged or cut; ask for it again, or for the scenario as a file"


def encoded(text: str) -> str:
    """Return the text packed into letters that an address may hold."""
    packed = zlib.compress(text.encode("utf-8"), 9)
    return base64.urlsafe_b64encode(packed).decode("ascii").rstrip("=")


def decoded(token: str) -> str:
    """Return the text of a link; BadInputError for one that is damaged or far too long."""
    if len(token) > LONGEST_LINK:
        raise BadInputError(f"link: longer than {LONGEST_LINK} letters; send the scenario's file")
    unpacker = zlib.decompressobj()
    try:
        packed = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        data = unpacker.decompress(packed, MOST_TEXT_BYTES + 1)
        text = data.decode("utf-8")
    except (binascii.Error, zlib.error, ValueError) as error:
        raise BadInputError(_DAMAGED) from error
    if len(data) > MOST_TEXT_BYTES:
        raise BadInputError("link: holds more than a scenario; send the scenario's file")
    if not unpacker.eof:
        raise BadInputError(_DAMAGED)
    return text
