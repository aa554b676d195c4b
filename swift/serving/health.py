"""/health and /ready: whether the process can do its work, and whether requests would be answered.

After a failure nobody may ask any more, so no answer would show that the engine works again: then the question about
its health asks it for one token.
"""

from __future__ import annotations

import asyncio
import secrets
import time

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from swift.core.errors import SwiftError
from swift.inference.requests import Request, SamplingParams
from swift.serving.errors import JsonResponse
from swift.serving.mailbox import Mailbox
from swift.serving.served import Talker
from swift.serving.services import Services, services_of

_PROBE_S = 5.0  # at most one probe in that time, and as long to answer it


async def health(http: HttpRequest) -> Response:
    """Whether the process can do its work: not while its engine fails."""
    services = services_of(http)
    trouble = "the model can't be loaded" if services.models.state == "failed" else await _trouble(services)
    if trouble:
        return JsonResponse({"status": "failing", "reason": trouble}, 503)
    return JsonResponse({"status": "ok"})


async def ready(http: HttpRequest) -> Response:
    """Whether requests would be answered: 503 until the model is loaded and warm."""
    services = services_of(http)
    trouble = await _trouble(services)
    if services.models.state != "ready" or trouble:
        return JsonResponse({"status": trouble or services.models.state}, 503)
    return JsonResponse({"status": "ready", "models": services.models.names()})


async def _trouble(services: Services) -> str | None:
    models = services.models
    if models.trouble and time.monotonic() - models.failed_at > _PROBE_S:
        talkers = [model.talker for model in models.all() if model.talker is not None and model.parent is None]
        failures = [failure for talker in talkers if (failure := await _probe(services, talker))]
        if failures:
            models.went_wrong(failures[0])
        else:
            models.went_well()
    return models.trouble


async def _probe(services: Services, talker: Talker) -> str | None:
    """What keeps an engine from making one token, if anything does."""
    mailbox = Mailbox(asyncio.get_running_loop())
    request = Request(f"probe-{secrets.token_hex(8)}", [0], SamplingParams(max_new_tokens=1))
    try:
        talker.backend.submit(request, services.bridge.sink(mailbox, 0))
        items = await asyncio.wait_for(mailbox.take(), _PROBE_S)
    except SwiftError as error:
        return error.message
    except TimeoutError:
        talker.backend.cancel(request.id)
        return f"the engine made no token in {_PROBE_S:g} s"
    errors = [update.error for _, update in items if update.finish_reason in ("error", "cancelled")]
    return None if not errors else errors[0].message if errors[0] else "the engine failed"
