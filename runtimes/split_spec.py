"""A plan's cuts for `torch.distributed.pipelining.pipeline()`, which traces the user's model as it is.

Its `split_spec` names submodules before which the model is cut: only cuts in front of a submodule that is a
layer of its own, and is called once, can be told.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cost_models.document import MadeBy
from ..cost_models.errors import ExportError
from ..planner.plan_file import Plan
from .formats.export_document import check_names, load_document
from .formats.torch_export import TorchExport, export

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.pipelining import SplitPoint

    from ..profiler.chain.layers import LayerChain


def split_spec(
    source: Plan | TorchExport | str | Path, model: nn.Module, example_input: object
) -> dict[str, SplitPoint]:
    """`{name of the first submodule of a stage: SplitPoint.BEGINNING}`, for every stage but the first.

    `source`: a plan, its export for torch, or the export's file. `example_input`: as of `pplan.sequential`.
    `pipeline(model, micro_batch, split_spec=...)` then has the plan's stages, in its order.

    Raises UsageError, FileError, ModelError; ExportError where the model is not the plan's, or a stage begins
    where there is no submodule of its own.
    """
    from torch.distributed.pipelining import SplitPoint

    from ..profiler.chain.layers import build_chain

    if isinstance(source, Plan):
        source, _ = export(source, device="cuda", made_by=MadeBy())
    document = load_document(source, TorchExport)
    chain = build_chain(model, example_input, granularity=document.granularity, verify=True)
    names = [layer.name for layer in chain.layers]
    check_names(document, document.parts[-1], len(names), names, chain.model_name)
    return {_first_module(chain, first): SplitPoint.BEGINNING for first in document.parts[1:-1]}


def _first_module(chain: LayerChain, first: int) -> str:
    layer: Any = chain.layers[first]
    uses = [other.path for other in chain.layers].count(layer.path)
    if layer.path is not None and uses == 1:
        return str(layer.path)
    if layer.path is None:
        why = f"layer {first}, {layer.name}, is no submodule of {chain.model_name}"
    else:
        why = f"layer {first}, {layer.path}, is called {uses} times in {chain.model_name}"
    raise ExportError(
        f"a stage begins with what pipeline() cannot be told: {why}",
        "Train it with pplan.runtimes.torch_pipelining.build, or cut in front of submodules: "
        "pplan.profile(granularity='module:PATTERN'), with the names of those that may begin a stage.",
    )
