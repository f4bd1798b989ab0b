"""The NIXL notifications that vLLM's connectors exchange, read without trusting them."""

from __future__ import annotations

import msgspec

HEARTBEAT = b"HB:"
REGISTRATION = b"PUSH_REG:"


class Registration(msgspec.Struct):
    """The part of a push registration that we need; the block ids are skipped, not decoded."""

    request_id: str = ""
    """D's internal request id."""
    decode_engine_id: str = ""


_registration = msgspec.msgpack.Decoder(Registration)


def completion(notification: object) -> tuple[str, int] | None:
    """Request id and count of a completion, `<id>:<count>`; None when it is something else."""
    if not isinstance(notification, bytes) or notification.startswith((HEARTBEAT, REGISTRATION)):
        return None
    request, colon, count = notification.rpartition(b":")
    # Nine digits: a count of ranks, and no number that a ring's field can't hold.
    if not (colon and request and count.isdigit() and len(count) <= 9):
        return None
    try:
        return request.decode(), int(count)
    except UnicodeDecodeError:
        return None


def registration(notification: object) -> Registration | None:
    """The registration in a push notification of D's; None when it can't be read."""
    if not isinstance(notification, bytes) or not notification.startswith(REGISTRATION):
        return None
    try:
        found = _registration.decode(notification[len(REGISTRATION) :])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return found if found.request_id else None
