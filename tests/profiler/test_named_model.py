"""What a profile may have built, and what only the user may name."""

from __future__ import annotations

from typing import Any

import pytest

from pplan.cost_models.errors import ModelError
from pplan.profiler.names import input_function_for, loss_for, may_name, model_for, quote_name
from pplan.profiler.profile_file import Profile

COST = {
    "micro_batch_size": 1,
    "forward_seconds": 1,
    "backward_seconds": 1,
    "output_bytes": 4,
    "saved_bytes": 4,
}


def profile(model: str, loss: str | None = None, **settings: Any) -> Profile:
    content: dict[str, Any] = {"schema": 1, "model": model, "settings": settings}
    content["layers"] = [{"name": "a", "parameter_bytes": 4, "costs": [COST]}]
    content["loss"] = None if loss is None else {"name": loss, "costs": [COST]}
    return Profile.model_validate(content)


@pytest.mark.parametrize(
    "name", ["vgg19", "resnet50", "hf:gpt2", "hf:xlm-roberta", "hf:qwen2_5_vl", "hf:kosmos-2.5"]
)
def test_names_of_models(name: str) -> None:
    assert may_name(name)
    assert model_for(profile(name), None, {}).name == name


@pytest.mark.parametrize(
    "name",
    [
        *(
            "os:system",
            "a.b",
            "a/b",
            "a\\b",
            "hf:a/b",
            "hf:../a",
            "hf:a.json",
            "a.json",
            "hf:",
            "",
            "hf:.",
            "hf:..",
            "a b",
        ),
        *(
            "vgg19\n",
            "hf:gpt2\n",
            "\u043es",
            "vgg\uff11\uff19",
            "hf:hf:gpt2",
            "__import__('os')",
            "a" * 101,
            "~",
            "$a",
        ),
    ],
)
def test_names_of_anything_else(name: str) -> None:
    assert not may_name(name)
    with pytest.raises(ModelError, match="a file's word runs no code"):
        model_for(profile(name), None, {"depth": 3})
    named = model_for(profile(name), "zoo:make", {"depth": 3})
    assert (named.name, named.settings, named.by_user) == ("zoo:make", {"depth": 3}, True)


@pytest.mark.parametrize(
    "settings",
    [
        {"layers": 2, "hidden": 64, "tie_word_embeddings": False, "drop_path_rate": 0.1, "n_inner": None},
        {"hidden_act": "gelu_new", "depths": [2, 2, 6], "layer_types": ["full_attention"]},
    ],
)
def test_sizes_of_a_configuration(settings: dict[str, Any]) -> None:
    assert model_for(profile("hf:gpt2", **settings), None, {"layers": 3}).settings == settings | {"layers": 3}


@pytest.mark.parametrize(
    "settings",
    [
        {"trust_remote_code": True},
        {"auto_map": {"AutoModel": "a--b.C"}},
        {"architectures": ["Evil"]},
        {"attn_implementation": "org/kernel"},
        {"_attn_implementation": "eager"},
        {"hidden_act": "org/kernel:act"},
        {"backbone": 3},
        {"use_pretrained_backbone": True},
        {"use_kernels": True},
        {"a\nb": 1},
        {"name": "x"},
        {"sizes": {"a": 1}},
        {"sizes": [[[[[1]]]]]},
    ],
)
def test_settings_that_lead_elsewhere(settings: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="a file's word runs no code"):
        model_for(profile("hf:gpt2", **settings), None, {})


def test_what_to_type() -> None:
    def hint(name: str, **settings: Any) -> str:
        with pytest.raises(ModelError) as caught:
            model_for(profile(name, **settings), None, {})
        return caught.value.hint

    assert hint("zoo.a:make", width=7, kind="b c").endswith(
        "model='zoo.a:make', settings={'width': 7, 'kind': 'b c'}"
    )
    general = "Name the model yourself: model='package.module:factory', with its `settings`."
    for name, settings in (
        ("a\x1b:b", {}),
        ("zoo:make", {"a\n": 1}),
        ("zoo:make", {"a": "\x1b"}),
        ("\u043es:system", {}),
    ):
        assert hint(name, **settings) == general


def test_losses() -> None:
    assert loss_for(profile("vgg19"), None) == "none"
    assert loss_for(profile("vgg19", "mse"), None) == "mse"
    assert loss_for(profile("vgg19", "evil:loss"), "my:loss") == "my:loss"
    for name in ("evil:loss", "crossentropy", "x" * 500, "\x1b[31m"):
        with pytest.raises(ModelError, match="a file's word runs no code"):
            loss_for(profile("vgg19", name), None)


def test_functions_of_inputs() -> None:
    plain = profile("vgg19")
    named = plain.model_copy(update={"input_like": "evil:batch"})
    assert input_function_for(plain, None) is None
    assert input_function_for(plain, "my:batch") == input_function_for(named, "my:batch") == "my:batch"
    with pytest.raises(ModelError, match="a file's word runs no code") as caught:
        input_function_for(named, None)
    assert "input_like='evil:batch'" in str(caught.value.hint)


def test_names_are_shown_in_one_short_line() -> None:
    assert quote_name("a\n\x1b\u043e'") == '"a\\n\\x1b\\u043e\'"'
    assert len(quote_name("x" * 10**6)) < 100
