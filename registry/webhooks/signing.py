"""The bytes and the headers of a webhook, signed as Standard Webhooks says. Pure.

webhook-id         the same at each try: a receiver that knows it has had this event
webhook-timestamp  unix seconds of this try
webhook-signature  v1,<base64 of HMAC-SHA256 over "id.timestamp.body">, one for each secret
"""

from __future__ import annotations

import base64
import hmac
import json
from typing import Any

__all__ = ["body_of", "headers_of"]


def headers_of(event_id: str, body: bytes, keys: tuple[bytes, ...], now_s: float) -> dict[str, str]:
    """The headers of one try. keys: of registry/webhook_secrets.py; each signs."""
    timestamp = str(int(now_s))
    signed = f"{event_id}.{timestamp}.".encode() + body
    signatures = [f"v1,{base64.b64encode(hmac.digest(key, signed, 'sha256')).decode()}" for key in keys]
    return {
        "content-type": "application/json",
        "user-agent": "Penstock",
        "webhook-id": event_id,
        "webhook-timestamp": timestamp,
        "webhook-signature": " ".join(signatures),
    }


def body_of(event: dict[str, Any]) -> bytes:
    """The bytes that are signed and sent."""
    return json.dumps(event, separators=(",", ":")).encode()
