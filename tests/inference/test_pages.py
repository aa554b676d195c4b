"""Where packed weights lie: side by side in large pages, once, and given back when the last one is gone."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from architectures import build

from swift.inference.paged.linear import Panels, ServedLinear, has_products, serve_linears
from swift.inference.paged.pages import PAGE, Pages
from swift.inference.paged.weights import ServedWeights

SMAPS = Path("/proc/self/smaps")
LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
needs_products = pytest.mark.skipif(not has_products(), reason="no compiled loops on this machine")


def mapping_of(address: int) -> str:
    """What the system says of the memory that an address lies in; empty if nothing is there."""
    found = ""
    for line in SMAPS.read_text().splitlines():
        border = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if border:
            inside = int(border[1], 16) <= address < int(border[2], 16)
            found = found or ("\n" if inside else "")
        if found and inside:
            found += line + "\n"
    return found


def addresses(model: torch.nn.Module) -> list[int]:
    return [layer.packed._panels.ctypes.data for layer in model.modules() if isinstance(layer, ServedLinear)]


def test_tensors_lie_side_by_side_and_keep_their_numbers():
    pages = Pages()
    wanted = []
    for k, dtype in enumerate([torch.float32, torch.bfloat16, torch.int8, torch.float16] * 5):
        tensor = pages.empty((k + 1, 7, 3), dtype)
        tensor.fill_(k)
        wanted.append(tensor)
    places = sorted((t.data_ptr(), t.numel() * t.element_size()) for t in wanted)
    for (place, size), (following, _) in pairwise(places):
        assert place + size <= following < place + size + 64
    for k, tensor in enumerate(wanted):
        assert tensor.shape == (k + 1, 7, 3) and (tensor == k).all()
        assert tensor.data_ptr() % 64 == 0
    assert pages.empty((0, 5), torch.float32).shape == (0, 5)


@pytest.mark.skipif(not SMAPS.exists(), reason="the system doesn't tell of its memory")
def test_memory_goes_back_with_the_last_tensor_and_can_be_had_again():
    pages = Pages()
    one, two = pages.empty((PAGE,), torch.int8).fill_(1), pages.empty((PAGE,), torch.int8).fill_(2)
    place = two.data_ptr()
    del one
    assert mapping_of(place) and (two == 2).all()
    before = resident()
    del two
    assert resident() < before - PAGE
    large = pages.empty((200 * PAGE,), torch.int8)  # more than what is set aside at once
    large[[0, -1]] = 3
    assert large[[0, -1]].tolist() == [3, 3]


@pytest.mark.skipif(not (SMAPS.exists() and LARGE_PAGES.exists()), reason="a system without large pages")
@needs_products
def test_weights_are_in_memory_that_large_pages_were_asked_for():
    model = build("llama")
    serve_linears(model)
    mappings = {mapping_of(place) for place in addresses(model)}
    assert all(" hg" in re.search(r"VmFlags:(.*)", mapping)[1] for mapping in mappings)
    assert min(addresses(model)) % PAGE == 0


@needs_products
def test_weights_are_held_once_also_when_they_are_replaced():
    model = build("llama-tied")
    serve_linears(model)
    layers = [layer for layer in model.modules() if isinstance(layer, ServedLinear)]
    places = addresses(model)
    needed = sum(layer.packed._panels.nbytes + 63 for layer in layers)
    assert max(places) - min(places) < needed
    ServedWeights(model).update((name, torch.randn_like(p)) for name, p in build("llama-tied").named_parameters())
    assert addresses(model) == places


@needs_products
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize("columns", [48, 97, 5])
def test_what_is_filled_again_multiplies_as_if_it_were_new(held, columns):
    old, new, x = torch.randn(columns, 33), 3 * torch.randn(columns, 33), torch.randn(9, 33)
    panels = Panels(old, held, Pages())
    panels.fill(new.t().contiguous().t())  # of any layout
    assert torch.equal(panels(x), Panels(new, held)(x))
    assert not torch.equal(panels(x), Panels(old, held)(x))


@pytest.mark.skipif(not SMAPS.exists(), reason="the system doesn't tell of its memory")
@needs_products
def test_weights_that_are_let_go_of_give_their_memory_back():
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(4)])
    given = {name: p.detach().clone() for name, p in model.named_parameters()}
    serve_linears(model)
    weights, x = ServedWeights(model), torch.randn(5, 1024)
    with torch.no_grad():
        wanted = model(x)
        before = resident()
        weights.sleep(2)
        assert resident() < before - 7 * PAGE  # of four matrices of two pages
        weights.update(given.items())
        assert torch.equal(model(x), wanted)


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
