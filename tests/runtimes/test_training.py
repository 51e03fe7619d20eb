"""Training by a plan against training the plain model: losses, norms, gradients, weights, evaluation."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.functional import cross_entropy

from pplan.planner.plan_file import Plan
from pplan.runtimes.exports import export

from .training_worker import batch, made

MakePlan = Callable[..., Plan]
RunRanks = Callable[..., str]
WORKER = Path(__file__).with_name("training_worker.py")
PIPES = ("torchgpipe", "fairscale")
LAYERS = {"vision": 9, "norm": 10, "dropout": 9, "text": 10, "own loss": 11}


@dataclass(frozen=True)
class Case:
    """A row: what is trained, and how. `runtimes`: those that train it so."""

    name: str
    model: str = "vision"
    stages: int = 2
    balance: tuple[int, ...] = ()
    replicas: int = 1
    schedule: str = "1f1b"
    virtual_stages: int = 1
    recompute: str = "never"
    reduction: str = "mean"
    clip: float = 0.05
    samples: tuple[int, ...] = (8, 8, 8)
    evaluated: int = 13
    adam: bool = False
    autocast: bool = False
    scale: float = 0.0
    zero: int = 0
    micro_batches: int = 0
    """Of a batch of 8 samples; 0: four for all replicas."""
    sync: bool = False
    checkpoint: str = ""
    reloads: bool = False
    """The model of the build is another; `load_state_dict` gives its weights."""
    first: int = 0
    """Steps that another case trained, whose checkpoint is read."""
    runtimes: tuple[str, ...] = ("torch", "deepspeed", *PIPES)
    tolerance: float = 1e-9


CASES = [
    Case("plain"),
    Case("smaller-batch", samples=(8, 5, 3)),
    Case("adam", adam=True),
    Case("text", "text", reduction="sum", runtimes=("torch", "deepspeed")),
    Case("text-smaller", "text", reduction="sum", samples=(8, 7, 6), runtimes=("torch", "deepspeed")),
    Case("own-loss", "own loss", evaluated=16, runtimes=("torch", "deepspeed")),
    Case("autocast", autocast=True, tolerance=0.03),
    Case("scaler", scale=1024.0),
    Case("recompute", recompute="always"),
    Case("zero-bubble", "text", schedule="zb-h1", reduction="sum", runtimes=("torch",)),
    Case("offload", recompute="offload", runtimes=("torch",)),
    Case("replicas", replicas=2, samples=(8, 5, 3), runtimes=("torch", "deepspeed")),
    Case("replicas-text", "text", replicas=2, reduction="sum", runtimes=("torch", "deepspeed")),
    Case("zero", replicas=2, zero=1, adam=True, runtimes=("torch",)),
    Case("zero-text", "text", replicas=2, zero=1, reduction="sum", runtimes=("torch",)),
    # Whole batches: what every replica normalises is what the plain model does.
    Case("sync-norm", "norm", 1, replicas=2, micro_batches=1, sync=True, runtimes=("torch", "deepspeed")),
    Case("four-stages", "text", 4, (3, 3, 3, 1), reduction="sum", runtimes=("torch", "deepspeed")),
]
TWICE = [
    Case(f"{model}-{recompute}", model, recompute=recompute)
    for model in ("norm", "dropout")
    for recompute in ("never", "always")
]
"""What micro-batches change, with and without running layers again."""
RELOADS = Case("reloads", replicas=2, zero=1, reloads=True, runtimes=("torch", "deepspeed"))
KEPT = Case("kept-gradients", replicas=2, zero=1, runtimes=("deepspeed",), checkpoint="kept")
"""DeepSpeed's optimizer keeps the gradients."""


def case_file(case: Case, runtime: str, make_plan: MakePlan, folder: Path) -> dict[str, Any]:
    one = runtime in PIPES
    layers = LAYERS[case.model]
    sizes = list(case.balance) or [layers // case.stages] * case.stages
    sizes[-1] += layers - sum(sizes)
    plan = make_plan(
        sizes,
        schedule="gpipe" if one else case.schedule,
        micro_batches=(count := case.micro_batches or 4 // case.replicas),
        micro_batch_size=8 // count,
        replicas=[case.replicas] * case.stages,
        recompute="never" if case.recompute == "offload" else case.recompute,
        zero=case.zero,
        profile={"file": "p.json", "sha256": "0", "granularity": "fine"},
    )
    document, remark = export(runtime, plan, device="cpu" if one else None)
    assert remark is None
    if case.recompute == "offload":
        document = document.model_copy(update={"recompute": ["offload"] * case.stages})
    path = folder / f"{case.name}.{runtime}.json"
    document.save(path, force=True)
    names = (
        "name",
        "model",
        "reduction",
        "clip",
        "samples",
        "evaluated",
        "adam",
        "autocast",
        "scale",
        "first",
        "reloads",
        "sync",
    )
    row = {name: getattr(case, name) for name in names} | {"file": str(path)}
    single = runtime == "deepspeed" or case.checkpoint
    checkpoint = str(folder.parent / case.checkpoint) if case.checkpoint else ""
    return row | {"checkpoint": checkpoint, "dtype": "float32" if single else "float64"}


SAVING = Case("", adam=True, tolerance=1e-5)
TEXT = replace(SAVING, model="text", reduction="sum", checkpoint="text")
CHECKPOINTS = [
    *(
        replace(SAVING, name=f"{runtime}-saves", checkpoint=runtime, runtimes=(runtime,))
        for runtime in ("torch", "torchgpipe", "deepspeed")
    ),
    replace(TEXT, name="text-saves", runtimes=("torch",)),
    *(
        replace(SAVING, name=f"{reader}-reads-{writer}", checkpoint=writer, first=3, runtimes=(reader,))
        for reader, writer in (
            ("torchgpipe", "torch"),
            ("deepspeed", "torchgpipe"),
            ("fairscale", "deepspeed"),
            ("torch", "plain"),
        )
    ),
    replace(
        *(SAVING,),
        name="shards-read-deepspeed",
        checkpoint="deepspeed",
        first=3,
        replicas=2,
        zero=1,
        runtimes=("torch",),
    ),
    replace(
        *(TEXT,), name="four-stages-read-two", stages=4, balance=(3, 3, 3, 1), first=3, runtimes=("torch",)
    ),
]
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def save_plainly(path: Path) -> None:
    """The plain model's checkpoint after three steps, by torch.distributed.checkpoint alone."""
    model = made("vision", torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(3):
        given, target = batch("vision", 8, step, torch.float32)
        optimizer.zero_grad()
        torch.autograd.backward(cross_entropy(model(given), target))
        torch.nn.utils.clip_grad_norm_([own for own in model.parameters() if own.grad is not None], 0.05)
        optimizer.step()
        scheduler.step()
    weights, states = get_state_dict(model, optimizer, options=OPTIONS)
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        save({"model": weights, "optimizer": states}, checkpoint_id=path)


Results = dict[tuple[str, str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(make_plan: MakePlan, run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What the processes of every case found; a job for each runtime and number of processes. Those that
    read checkpoints come after those that write them."""
    found: Results = {}
    top = tmp_path_factory.mktemp("training")
    save_plainly(top / "plain")
    cases = sorted(
        (*CASES, *TWICE, *CHECKPOINTS, KEPT, RELOADS, replace(KEPT, name="kept-again", first=3)),
        key=lambda own: own.first,
    )
    jobs: dict[tuple[int, int, str], list[Case]] = {}
    for case in cases:
        for runtime in case.runtimes:
            if importlib.util.find_spec(runtime) is not None:
                count = 1 if runtime in PIPES else case.stages * case.replicas
                jobs.setdefault((case.first, count, runtime), []).append(case)
    for (first, count, runtime), own_cases in jobs.items():
        folder = top / f"{runtime}-{count}-{first}"
        folder.mkdir()
        rows = [case_file(own, runtime, make_plan, folder) for own in own_cases]
        (folder / "cases.json").write_text(json.dumps(rows))
        run_ranks([str(WORKER), str(folder)], folder, count)
        for own in own_cases:
            files = [folder / f"{own.name}.{rank}.json" for rank in range(count)]
            found[runtime, own.name] = [json.loads(file.read_text()) for file in files]
    return found


ROWS = [(runtime, case) for case in (*CASES, *CHECKPOINTS) for runtime in case.runtimes]
ROWS.append(("torch", RELOADS))


def largest_difference(one: Any, other: Any) -> float:
    return float((torch.as_tensor(one).double() - torch.as_tensor(other).double()).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize(("runtime", "case"), ROWS, ids=[f"{runtime}-{case.name}" for runtime, case in ROWS])
def test_training_is_the_plain_models(results: Results, runtime: str, case: Case) -> None:
    if (runtime, case.name) not in results:
        pytest.skip(f"{runtime} is not installed")
    ranks = results[runtime, case.name]
    for own in ranks:
        assert "error" not in own, own["error"]
    plain, tolerance = ranks[0]["plain"], max(case.tolerance, 1e-5 if runtime == "deepspeed" else 0)
    for own in ranks:
        for name, value in own["planned"].items():
            assert largest_difference(value, plain[name]) < tolerance, name
    names = {name for own in ranks for name in own["planned"]}
    assert names == set(plain)
    assert max(plain["norms"]) > case.clip


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["torch", "deepspeed", *PIPES])
@pytest.mark.parametrize("model", ["norm", "dropout"])
def test_recomputation_changes_nothing(results: Results, runtime: str, model: str) -> None:
    """Dropout drops the same, and the statistics of batch norms count a micro-batch once."""
    if (runtime, f"{model}-always") not in results:
        pytest.skip(f"{runtime} is not installed")
    for never, always in zip(
        results[runtime, f"{model}-never"], results[runtime, f"{model}-always"], strict=True
    ):
        assert "error" not in always, always["error"]
        assert always["planned"] == never["planned"]
        if model == "norm":
            assert always["planned"]["state norm.num_batches_tracked"] == [4 * 3]
        else:
            assert (
                abs(always["planned"]["losses"][0] - results[runtime, "plain"][0]["plain"]["losses"][0])
                > 1e-3
            )


@pytest.mark.slow
def test_the_plain_model_reads_a_checkpoint_of_stages(results: Results, tmp_path_factory: Any) -> None:
    """By torch alone, weights and the optimizer's states."""
    ranks = results["torch", "torch-saves"]
    assert "error" not in ranks[0], ranks[0]["error"]
    model = made("vision", torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    weights, own_states = get_state_dict(model, optimizer, options=OPTIONS)
    states: dict[str, Any] = dict(own_states)
    state = {"model": weights, "optimizer": {key: own for key, own in states.items() if "unused" not in key}}
    path = max(tmp_path_factory.getbasetemp().glob("training*/torch"))
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        load(state, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=weights,
        optim_state_dict=states | state["optimizer"],
        options=OPTIONS,
    )
    for name, value in model.state_dict().items():
        assert largest_difference(value.flatten(), ranks[0]["planned"][f"state {name}"]) == 0
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 / 8)
    assert optimizer.state[next(model.parameters())]["step"] == 3


@pytest.mark.slow
def test_deepspeeds_own_optimizer_trains_clips_and_goes_on(results: Results) -> None:
    if ("deepspeed", KEPT.name) not in results:
        pytest.skip("deepspeed is not installed")
    for name in (KEPT.name, "kept-again", RELOADS.name):
        ranks = results["deepspeed", name]
        for own in ranks:
            assert "error" not in own, own["error"]
            for key, value in own["planned"].items():
                if key != "norms":
                    assert largest_difference(value, ranks[0]["plain"][key]) < 1e-5, key
