"""Serves the files of the playground from memory, with headers under which a browser runs nothing but these files."""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = pathlib.Path(__file__).parent / "static"
_INDEX = "index.html"
_TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Scripts, styles and calls of this origin alone. Pictures that the user adds are blobs. With Trusted Types, a browser
# refuses to make elements or scripts of text, so that an answer of a model can never become more than text.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob: data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS: Mapping[str, str] = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    # A browser asks each time whether a file has changed, so that files of two versions never meet.
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class _Page:
    """One file and its headers."""

    content: bytes
    headers: Mapping[str, str]

    @classmethod
    def of(cls, path: pathlib.Path) -> _Page:
        """Reads a file. Raises OSError if it cannot be read."""
        content = path.read_bytes()
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        return cls(content, {**_HEADERS, "content-type": _TYPES[path.suffix], "etag": tag})

    async def answer(self, request: Request) -> Response:
        """Returns the file, or says that the browser's copy of it is still good."""
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if self.headers["etag"] in known or "*" in known:
            return Response(status_code=304, headers=self.headers)
        return Response(self.content, headers=self.headers)


def playground_routes() -> list[Route]:
    """Returns `/` and the files that it loads, below `/playground/`. They take GET and HEAD.

    Raises OSError if the files are not installed.
    """
    pages = {path.name: _Page.of(path) for path in sorted(_FOLDER.iterdir()) if path.suffix in _TYPES}
    index = Route("/", pages.pop(_INDEX).answer)
    return [index, *(Route(f"/playground/{name}", page.answer) for name, page in pages.items())]
