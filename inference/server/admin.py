"""Admin routes: drain, policy, drafters. The gate closes them to all but admin keys."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import FastAPI, Path
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from inference.scheduler import Scheduler
from inference.server.errors import ApiError, invalid, json_response
from inference.server.options import Administration
from learner.selection import parse_policy
from schemas import checks

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": description}
    for status, description in ((400, "Refused"), (403, "No admin key"), (404, "Not there"))
}


class PolicyChange(BaseModel):
    """The policy to select by from the next request on."""

    model_config = ConfigDict(extra="forbid")

    policy: str


def add_admin_routes(app: FastAPI, scheduler: Scheduler, administration: Administration) -> None:
    """Add the routes."""

    @app.get("/admin/status", responses=_ERRORS)
    async def status() -> Response:
        """Versions and counts."""
        return json_response(
            administration.describe()
            | {"running": scheduler.num_running, "waiting": scheduler.num_waiting}
        )

    @app.post("/admin/drain", responses=_ERRORS)
    async def drain() -> Response:
        """Take no more requests; those that were taken are finished."""
        scheduler.drain()
        return json_response({"status": "draining"})

    @app.post("/admin/resume", responses=_ERRORS)
    async def resume() -> Response:
        """Take requests again."""
        scheduler.drain(is_draining=False)
        return json_response({"status": "serving"})

    @app.post("/admin/policy", responses=_ERRORS)
    async def policy(change: PolicyChange) -> Response:
        """Select by another policy."""
        try:
            await asyncio.wrap_future(
                scheduler.order(lambda worker: worker.change_policy(change.policy))
            )
        except ValueError as error:
            raise invalid("policy", str(error)) from error
        return json_response({"policy": str(parse_policy(change.policy))})

    @app.post("/admin/drafters/{drafter_id}/{version}", responses=_ERRORS)
    async def swap(drafter_id: str, version: Annotated[int, Path(ge=0, lt=2**63)]) -> Response:
        """Serve a published version of a drafter."""
        if not checks.IDENTIFIER.fullmatch(drafter_id):
            raise invalid("drafter_id", f"expected /{checks.IDENTIFIER.pattern}/")
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(None, administration.swap, drafter_id, version)
        except KeyError as error:
            raise ApiError(404, str(error.args[0]), param="drafter_id") from error
        except ValueError as error:
            raise invalid("version", str(error)) from error
        return json_response({"drafter_id": drafter_id, "version": version})
