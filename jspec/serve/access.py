"""Access control: the host names that the server accepts, and the web pages that may use it."""

import dataclasses

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from jspec.serve.errors import Refusal
from jspec.serve.hosts import Names, is_same, name_of, origin_of

ANY = "*"
_PROBED = "/health"  # health probes may use any host name
_PAGE = "/"  # other sites may link to the page
_ADVICE = "start the server with --allow-origin for these pages"


@dataclasses.dataclass(frozen=True)
class Access:
    """The hosts and web pages that may use a server without a key.

    Attributes:
        host: the address that the server listens on.
        hosts: additional host names by which clients may address the server, or `*`.
        origins: origins on other sites whose pages may use the server, or `*`. This list also applies to a server with
            a key.

    Raises:
        ValueError: an entry of `hosts` is not a host, or an entry of `origins` is not an origin.
    """

    host: str = "127.0.0.1"
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        hosts = tuple(host if host == ANY else name_of(host) for host in self.hosts)
        origins = tuple(origin if origin == ANY else origin_of(origin) for origin in self.origins)
        object.__setattr__(self, "hosts", hosts)
        object.__setattr__(self, "origins", origins)


class Guard:
    """Middleware that rejects foreign hosts and pages with status 403 before it reads the request body.

    Without this guard, any web page could use a server on its visitor's machine. The page could use the server's
    address, or a domain name that resolves to that machine (DNS rebinding). If the server has a key, only the key
    is checked. Responses to pages from allowed origins carry CORS headers, including on errors and streams.

    Args:
        app: the application to guard.
        access: the hosts and pages that may use the application.
        has_key: whether the application requires a key.
    """

    def __init__(self, app: ASGIApp, access: Access, has_key: bool):
        self._app, self._has_key, self._origins = app, has_key, access.origins
        self._names = None if ANY in access.hosts else Names(access.host, access.hosts)
        self._with_cors = CORSMiddleware(
            self._answer,
            access.origins,
            ("GET", "POST"),
            (ANY,),
            allow_private_network=True,
            expose_headers=("Retry-After",),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        allowed = scope["type"] == "http" and self._allows(Headers(scope=scope).getlist("origin"))
        await (self._with_cors if allowed else self._answer)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = self._has_key or scope["type"] != "http" or scope["path"] == _PROBED
        refusal = None if is_open else self._refusal(scope)
        app: ASGIApp = self._app
        if refusal is not None:
            app = JSONResponse(refusal.as_json(), refusal.status)
        await app(scope, receive, send)

    def _allows(self, origins: list[str]) -> bool:
        return len(origins) == 1 and (ANY in self._origins or origins[0] in self._origins)

    def _refusal(self, scope: Scope) -> Refusal | None:
        headers = Headers(scope=scope)
        hosts, origins = _hosts(scope, headers), headers.getlist("origin")
        if not any(hosts):
            return Refusal(403, "The request has no host; send a Host header.", code="unknown_host")
        if self._names is not None and (foreign := [host for host in hosts if host not in self._names]):
            return Refusal(
                403,
                f"{foreign[0]!r} is not a name of this server; start the server with --allow-host for that name, or "
                "with an API key.",
                code="unknown_host",
            )
        if self._allows(origins):
            return None
        if foreign := [origin for origin in origins if not is_same(origin, hosts[0])]:
            return Refusal(403, f"Pages from {foreign[0]!r} may not use this server; {_ADVICE}.", code="cross_origin")
        # Browsers send some requests without an origin, but Sec-Fetch-Site shows whether another site's page sent them.
        is_link = scope["method"] in ("GET", "HEAD") and scope["path"] == _PAGE
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not is_link:
            return Refusal(403, f"Pages from other sites may not use this server; {_ADVICE}.", code="cross_origin")
        return None


def _hosts(scope: Scope, headers: Headers) -> list[str]:
    """Return the hosts that a request names: in its Host header, and in its target if that is an absolute URL."""
    _, is_url, rest = scope["path"].partition("://")
    target = [rest.partition("/")[0]] if is_url and not scope["path"].startswith("/") else []
    return headers.getlist("host") + target


class StripTrailingSlash:
    """Middleware that removes trailing slashes from the path."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        path = scope.get("path", "/")
        await self._app(scope if path == "/" else {**scope, "path": path.rstrip("/") or "/"}, receive, send)
