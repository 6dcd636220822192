"""Checks the API key on every path. vLLM's own check leaves out /invocations, /tokenize, /pause and others."""

from __future__ import annotations

import os
import secrets
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

OPEN = ("/health", "/ping")  # for probes


class ApiKey:
    """The ASGI middleware. OPTIONS requests pass: browsers send them before a request (CORS), without credentials."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_request = scope["type"] in ("http", "websocket") and scope.get("method") != "OPTIONS"
        if is_request and scope["path"] not in OPEN:
            given = Headers(scope=scope).get("authorization", "").encode()
            if not secrets.compare_digest(given, self.expected):
                await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
                return
        await self.app(scope, receive, send)
