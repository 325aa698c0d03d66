"""The dashboard: static files, and the headers that keep them from loading or running anything else."""

from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles

STATIC = Path(__file__).parent / "static"
HEADERS = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "cache-control": "no-cache",  # after an update, no old script beside a new page
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class _Files(StaticFiles):
    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(HEADERS)
        return response


def add_dashboard(app: FastAPI) -> None:
    """The page at `/`, its files below `/static`; docs/dashboard.md says what it shows."""

    @app.get("/", include_in_schema=False)
    def dashboard() -> Response:
        return FileResponse(STATIC / "index.html", headers=HEADERS)

    app.mount("/static", _Files(directory=STATIC), "static")
