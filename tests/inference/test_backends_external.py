"""Engines of other projects are refused by name, not by an import that fails."""

from __future__ import annotations

import pytest

from swift.config import InferConfig
from swift.core.errors import UsageError
from swift.inference.backends.choose import make_backend
from swift.inference.loading import prepare


@pytest.mark.parametrize("name", ["openvino"])
def test_an_engine_that_is_not_driven_is_refused_by_name(tiny_model_dir, name):
    config = InferConfig()
    config.model.model = str(tiny_model_dir)
    config.infer.device = "cpu"
    config.engine.infer_backend = name
    with pytest.raises(UsageError, match=f"doesn't drive {name} yet") as caught:
        make_backend(prepare(config))
    assert "--infer_backend swift" in (caught.value.fix or "")
