"""The models that benchmarks/model_coverage.py tries, with the settings or the input that each is tried with.

Of torchvision every model, of timm a small one of each family, of transformers architectures of all kinds,
from their configurations made small.
"""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

import torch
from torch import nn

from pplan.cost_models.errors import PplanError
from pplan.profiler.models import from_module, load_model
from pplan.profiler.user_model import LoadedModel

TEXT = """
    albert apertus arcee bamba bart bert bert-generation big_bird bigbird_pegasus biogpt bitnet
    blenderbot blenderbot-small bloom camembert canine codegen cohere cohere2 convbert ctrl data2vec-text
    dbrx deberta deberta-v2 deepseek_v2 deepseek_v3 diffllama distilbert doge dots1 electra ernie
    ernie4_5 ernie4_5_moe esm exaone4 falcon falcon_h1 falcon_mamba flaubert fnet fsmt funnel gemma
    gemma2 gemma3_text glm glm4 glm4_moe gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese
    gpt_oss gptj granite granitemoe granitemoehybrid granitemoeshared helium hunyuan_v1_dense
    hunyuan_v1_moe ibert jamba jetmoe layoutlm led lfm2 lilt llama llama4_text longformer longt5 luke
    m2m_100 mamba mamba2 marian mbart megatron-bert minimax ministral mistral mixtral mobilebert
    modernbert modernbert-decoder mpnet mpt mra mt5 mvp nemotron nllb-moe nystromformer olmo olmo2 olmo3
    olmoe openai-gpt opt pegasus pegasus_x persimmon phi phi3 phimoe plbart prophetnet qwen2 qwen2_moe
    qwen3 qwen3_moe qwen3_next recurrent_gemma reformer rembert roberta roberta-prelayernorm roc_bert
    roformer rwkv seed_oss smollm3 squeezebert stablelm starcoder2 switch_transformers t5 umt5 xglm xlm
    xlm-roberta xlm-roberta-xl xlnet xmod yoso zamba zamba2
"""
OTHERS = """
    align altclip aria audio-spectrogram-transformer autoformer beit bit blip blip-2 bridgetower
    chinese_clip clap clip clipseg conditional_detr convnext convnextv2 cvt dab-detr data2vec-audio
    data2vec-vision decision_transformer deformable_detr deit depth_anything detr dinov2
    dinov2_with_registers dinov3_vit dpt efficientnet flava focalnet git groupvit hiera hubert idefics3
    ijepa imagegpt informer instructblip internvl kosmos-2 layoutlmv3 levit llava lxmert mobilenet_v1
    mobilenet_v2 mobilevit mobilevitv2 moonshine owlvit paligemma patchtsmixer patchtst perceiver
    pix2struct poolformer pvt pvt_v2 qwen2_5_vl qwen2_audio qwen2_vl regnet resnet rt_detr segformer sew
    siglip siglip2 speech_to_text swiftformer swin swin2sr swinv2 table-transformer textnet
    time_series_transformer timesfm timesformer trocr unispeech videomae vilt visual_bert vit vit_mae
    vit_msn vivit wav2vec2 wav2vec2-bert wav2vec2-conformer wavlm whisper xclip yolos
"""
SMALL = {"layers": 2, "hidden": 32, "heads": 4, "sequence": 8, "vocabulary": 64}
"""Of transformers' models; those that a configuration has no key for are left out."""
OWN_SIZES: dict[str, dict[str, Any]] = {
    "bridgetower": {"hidden": 128},
    "dpt": {"layers": 4},
    "swin2sr": {"hidden": 48},
    "zamba": {"layers": 8},
    "canine": {"max_position_embeddings": 128},
    "lilt": {"hidden": 48},
    "perceiver": {"hidden": 64, "num_latents": 16, "d_latents": 64, "max_position_embeddings": 64},
    "qwen2_vl": {"hidden": 512},
    "qwen2_5_vl": {"hidden": 512},
    "depth_anything": {"layers": 4},
    "reformer": {"hidden": 64, "axial_pos_shape": [8, 8], "sequence": 64},
}
"""Where the family's own rules ask for others."""
TIMM = """
    beit_base_patch16_224 eca_botnext26ts_256 mobileone_s1 cait_xxs24_224 coat_tiny convit_tiny
    convmixer_1024_20_ks9_p14 convnext_atto_rms cpubone_nano crossvit_tiny_240 csatv2 cs3darknet_focus_s
    cspnext_tiny davit_tiny deepseek_vit_412m deit_tiny_patch16_224 densenet121 dla34 dpn48b
    edgenext_xx_small efficientformer_l1 efficientformerv2_s0 efficientnet_b0 efficientvim_m1
    efficientvit_b0 efficientvit_m0 eva02_tiny_patch14_224 fasternet_t0 fastvit_t8 focalnet_tiny_srf
    gcvit_xxtiny gemma4_vit_167m ghostnet_050 hardcorenas_b hgnetv2_b0 hiera_tiny_224 sam2_hiera_tiny
    hrnet_w18_small iformer_t inception_next_atto inception_resnet_v2 inception_v3 inception_v4
    lcnetv2_small levit_128s lowformer_b0 mambaout_femto coatnet_pico_rw_224 poolformer_s12 gmlp_ti16_224
    mobilenetv3_small_050 mobilenetv5_base mobilevit_xxs mvitv2_tiny naflexvit_base_patch16_gap
    nasnetalarge nest_tiny nextvit_small nf_regnet_b0 pit_ti_224 pnasnet5large pvt_v2_b0 qwen3_vit_88m
    rdnet_tiny regnetx_002 repghostnet_050 repvit_m0_9 res2net50_26w_4s resnest26d resnet18 resnetv2_18
    rexnet_100 selecsls42 legacy_seresnet18 sequencer2d_s shvit_s1 skresnet18 starnet_s050 swiftformer_xs
    swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 swinv2_cr_tiny_224 tiny_vit_5m_224
    tnt_s_legacy_patch16_224 tresnet_m twins_svt_small vgg11 visformer_tiny vit_tiny_patch16_224
    vit_tiny_r_s16_p8_224 vit_srelpos_small_patch16_224 samvit_base_patch16_224 vitamin_small_224
    volo_d1_224 ese_vovnet19b_slim_dw legacy_xception xception41p xcit_nano_12_p8_224
"""
"""A small one of each family: of each module of timm.models."""
_PICTURES: dict[str, tuple[int, ...] | None] = {
    "raft": (3, 128, 128),
    "mc3": (3, 4, 64, 64),
    "r3d": (3, 4, 64, 64),
    "r2plus1d": (3, 4, 64, 64),
    "swin3d": (3, 4, 64, 64),
    "s3d": None,
    "inception_v3": None,
    "quantized_inception": None,
}
"""Of torchvision's models that take no pictures of 64 x 64, by how their names begin; None: their own."""
_BUILT_FOR: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "vit_h": ("VisionTransformer", {"image_size": 56}, (3, 56, 56)),
    "vit_": ("VisionTransformer", {"image_size": 64}, (3, 64, 64)),
    "maxvit": ("MaxVit", {"input_size": (64, 64), "partition_size": 2}, (3, 64, 64)),
    "mvit": ("MViT", {"spatial_size": (64, 64), "temporal_size": 4}, (3, 4, 64, 64)),
}
"""Those that are built for one size of picture: what their class is given for a small one."""


def names(library: str) -> list[str]:
    """Of `torchvision`, `timm`, `text` or `others`."""
    if library == "torchvision":
        return list(importlib.import_module("torchvision").models.list_models())
    if library == "timm":
        return [f"timm:{name}" for name in TIMM.split()]
    return [f"hf:{name}" for name in (TEXT if library == "text" else OTHERS).split()]


def load(name: str, shape: tuple[int, ...] | None = None) -> LoadedModel:
    """The model of this name, made small where its sizes are free. Raises PplanError."""
    if name.startswith("timm:"):
        return _timm(name, shape)
    if name.startswith("hf:"):
        return _transformers(name)
    return _torchvision(name, shape)


def _torchvision(name: str, shape: tuple[int, ...] | None) -> LoadedModel:
    if shape is not None:
        return load_model(name, input_shape=shape)
    for start, (kind, options, small) in _BUILT_FOR.items():
        if name.startswith(start):
            return from_module(_built_small(name, kind, options), torch.randn((2, *small)), name=name)
    own = [shape for start, shape in _PICTURES.items() if name.startswith(start)]
    return load_model(name, input_shape=own[0] if own else (3, 64, 64))


def _built_small(name: str, kind: str, options: dict[str, Any]) -> nn.Module:
    """By torchvision's builder, which passes such options on for none of them."""
    models = importlib.import_module("torchvision").models
    builder = models.get_model_builder(name)
    module = importlib.import_module(builder.__module__)
    own = getattr(module, kind)
    torch.manual_seed(0)
    with mock.patch.object(module, kind, lambda **theirs: own(**theirs | options)):
        model: nn.Module = builder(weights=None)
    return model


def _transformers(name: str) -> LoadedModel:
    settings: dict[str, Any] = SMALL | OWN_SIZES.get(name.removeprefix("hf:"), {})
    while True:
        try:
            return load_model(name, settings=settings)
        except PplanError as error:
            word = error.what.partition("=")[0]
            if word not in settings or (
                "has no key for it" not in error.what and "takes no tokens" not in error.what
            ):
                raise
            del settings[word]


def _timm(name: str, shape: tuple[int, ...] | None) -> LoadedModel:
    timm: Any = importlib.import_module("timm")
    torch.manual_seed(0)
    model = timm.create_model(name.removeprefix("timm:"))
    own = model.default_cfg
    if shape is None:
        fixed = own.get("fixed_input_size")
        shape = own["input_size"] if fixed else own.get("min_input_size", (3, 128, 128))
    return from_module(model.train(), torch.randn((2, *shape)), name=name)
