"""Every family of causal language models that the installed transformers has, counted on the meta device."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.transformer.configuration import transformer_shape

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
FAMILIES = sorted(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@cache
def real_parameters(family: str) -> tuple[dict[str, Any], int]:
    """Of the family's own configuration; one that transformers does not build without more is skipped."""
    try:
        config = transformers.CONFIG_MAPPING[family]()
        keys = config.to_dict()  # building some of them changes it
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:  # whatever its own code raises
        pytest.skip(f"transformers does not build it: {type(error).__name__}")
    return keys, sum(each.numel() for each in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_counted_or_refused(family: str) -> None:
    """Without a note exactly, with one within 3 %; of models that read more than text the text alone is
    counted, and more or less of it belongs to another part."""
    keys, parameters = real_parameters(family)
    try:
        shape = transformer_shape(keys)
    except UsageError:
        return
    if "text model alone" in shape.note:
        return
    wrong = abs(shape.parameters() / parameters - 1)
    assert wrong < 0.03 if shape.note else wrong == 0
