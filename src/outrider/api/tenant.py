"""Whose request it is, as far as cached prefixes go: nobody can probe another's prompts by timing."""

from __future__ import annotations

import hashlib
from contextvars import ContextVar

from starlette.datastructures import Headers

current_tenant: ContextVar[str] = ContextVar("current_tenant", default="")


def tenant_of(headers: Headers) -> str:
    """A name made from the key that was sent, right or wrong; the key itself goes no further."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    key = headers.get("x-api-key", "") or (bearer.strip() if scheme.lower() == "bearer" else "")
    return hashlib.sha256(key.encode()).hexdigest()[:32] if key else ""


def cache_salt(given: str | None) -> str:
    """For the request under way: its tenant and what it says itself."""
    tenant = current_tenant.get()
    return f"{tenant}/{given or ''}" if tenant or given else ""
