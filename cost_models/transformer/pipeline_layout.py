"""Pipeline layouts: what each (virtual) stage of a transformer holds, and which of them can be trained.

A stage is a text of letters, as in Megatron-LM's layouts: E the embedding, t a block, m a multi-token
predictor, L the head with its loss. Any stage may be empty: megatron-core hands the tensors on. torchtitan
builds an optimizer for each stage, and refuses one without a parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..quantities import format_count


def stage_letters(blocks: Sequence[int], predictors: int = 0, predictor_offset: int = 0) -> list[str]:
    """Return the letters of stages with so many blocks, and predictors so many stages before the last.

    >>> stage_letters((0, 2, 1, 0), predictors=1, predictor_offset=1)
    ['E', 'tt', 'tm', 'L']
    """
    stages = ["t" * count for count in blocks]
    stages[-1 - predictor_offset] += "m" * predictors
    return [
        "E" * (place == 0) + letters + "L" * (place == len(stages) - 1)
        for place, letters in enumerate(stages)
    ]


def layout_problems(
    stages: Sequence[str], pipeline: int, blocks: int, predictors: int, *, spread: bool = False
) -> list[str]:
    """Return why these stages do not train a model with so many blocks and multi-token predictors.

    The rules of megatron-core 0.16's `PipelineParallelLayerLayout`. The list is empty for a legal layout.

    Args: stages: The letters of each stage. pipeline: Devices of the pipeline. blocks: Transformer blocks of
    the model. predictors: Multi-token predictors of the model. spread: Allow predictors on several stages,
    and one loss slot (L) for the model and for each predictor, as forks of megatron-core do.
    """
    letters = "".join(stages)
    problems = []
    if unknown := sorted(set(letters) - set("EtmL")):
        problems.append(f"{unknown[0]!r} is none of E, t, m, L and |")
    if len(stages) % pipeline:
        problems.append(
            f"{format_count(len(stages), 'stage')}: no multiple of the pipeline's size {pipeline}"
        )
    if not letters.startswith("E"):
        problems.append("the first layer is not E, the embedding")
    if not letters.endswith("L"):
        problems.append("the last layer is not L, the loss")
    problems += [
        f"{letter} stands {letters.count(letter)} times, not once"
        for letter in ("E" if spread and letters.count("L") == 1 + predictors else "EL")
        if letters.count(letter) > 1
    ]
    if (count := letters.count("t")) != blocks:
        problems.append(f"it places {format_count(count, 'transformer block')} (t), the model has {blocks}")
    if (count := letters.count("m")) != predictors:
        problems.append(
            f"it places {format_count(count, 'multi-token predictor')} (m), the model has {predictors}"
        )
    return problems + _predictor_problems(stages, pipeline, spread=spread)


def _predictor_problems(stages: Sequence[str], pipeline: int, *, spread: bool) -> list[str]:
    """Return why the predictors cannot stand where they do."""
    letters, problems = "".join(stages), []
    places = [place for place, text in enumerate(stages) if "m" in text]
    if places and "t" in letters[letters.index("m") :]:
        problems.append("a transformer block (t) stands after a multi-token predictor (m)")
    if len(places) > 1 and not spread:
        problems.append(
            f"the multi-token predictors (m) are on the stages {places[0]} to {places[-1]}, not on one"
        )
    if places and len(stages) % pipeline == 0 and places[0] < len(stages) - pipeline:
        problems.append(
            f"the multi-token predictors (m) are on stage {places[0]}, "
            "not on the last virtual stage of a rank"
        )
    return problems
