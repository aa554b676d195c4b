"""/v1/models, and loading and unloading of adapters while the server runs (with an admin's key)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from swift.serving.errors import ApiError, JsonResponse
from swift.serving.exchange import exchange_of
from swift.serving.schema import Body
from swift.serving.served import ServedModel
from swift.serving.services import Services, services_of

_Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9._:/-]+$")]


class LoadAdapterRequest(Body):
    """Body of /v1/load_lora_adapter, as vLLM has it. The path is one of the server's machine."""

    lora_name: _Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    base_model_name: str | None = None


class UnloadAdapterRequest(Body):
    """Body of /v1/unload_lora_adapter."""

    lora_name: str


async def list_models(http: HttpRequest) -> Response:
    """The names that requests may use."""
    services = services_of(http)
    return JsonResponse({"object": "list", "data": [_entry(services, model) for model in services.models.all()]})


async def show_model(http: HttpRequest, model: str) -> Response:
    """One of them."""
    services = services_of(http)
    return JsonResponse(_entry(services, services.models.find(model)))


async def load_adapter(http: HttpRequest, body: LoadAdapterRequest) -> Response:
    """Offer an adapter under a name of its own."""
    services = services_of(http)
    _only_admins(http)
    if "\0" in body.lora_path:
        raise ApiError(400, "lora_path is not a path", param="lora_path")
    await services.models.load_adapter(body.lora_name, Path(body.lora_path), body.base_model_name)
    return JsonResponse({"message": f"the adapter {body.lora_name} is there"})


async def unload_adapter(http: HttpRequest, body: UnloadAdapterRequest) -> Response:
    """Stop offering an adapter."""
    _only_admins(http)
    await services_of(http).models.unload_adapter(body.lora_name)
    return JsonResponse({"message": f"the adapter {body.lora_name} is gone"})


def _only_admins(http: HttpRequest) -> None:
    key = exchange_of(http.scope).key
    assert key is not None  # the gate found one
    services_of(http).keys.require_admin(key)


def _entry(services: Services, model: ServedModel) -> dict[str, Any]:
    talker = model.talker
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": services.config.owned_by,
        "root": model.root,
        "parent": model.parent,
        "max_model_len": None if talker is None else talker.backend.info.context_length,
    }
