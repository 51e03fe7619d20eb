"""The verbs in one table, with the examples of their help, and the verbs of earlier versions."""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """A verb, or a group of them.

    `summary`: the first line of its docstring. `panel`: its heading in the list of verbs; None hides it.
    `status`: what its exit status may be besides those of all verbs. `is_group`: holds the verbs whose names
    begin with its own; it runs a command itself if it has examples. `common_options`: what --help shows
    besides the options of all verbs; --help-all shows the rest. Empty: it shows all.
    """

    summary: str
    examples: tuple[str, ...] = ()
    panel: str | None = None
    status: str = ""
    is_group: bool = False
    common_options: str = ""


MAIN, LOOK, TRUST, MACHINE = "The main job", "Look", "Trust", "Machine"
VERBS = {
    "demo": Entry(
        "Plan GPT-2 XL on eight A100: no GPU, no download.",
        ("pplan demo",),
        MAIN,
    ),
    "profile": Entry(
        "Measure a model layer by layer.",
        (
            "pplan profile vgg19",
            "pplan profile my_package.models:make_model --device cuda:0 --micro-batch-sizes 1,2,4,8",
            "pplan profile hf:gpt2 --device analytic:h100 --amp bf16",
        ),
        MAIN,
        common_options=(
            "--sequence --input --input-like --classes --micro-batch-sizes --dtype --device --granularity "
            "--keep-together --set --loss --compile --amp --budget --resume --tp --config"
        ),
    ),
    "import": Entry(
        "Make a profile of other tools' costs, or a plan of a partition.",
        (
            "pplan import costs.csv",
            "pplan import graph.txt --model vgg16 -o vgg16.profile.json",
            "pplan import 12,34 --profile vgg19.profile.json --mini-batch 256",
        ),
        MAIN,
        common_options=(
            "--format --model --micro-batch-size --granularity --tp --profile --schedule --virtual-stages "
            "--replicas --recompute --runtime --mini-batch --micro-batches --optimizer --precision --zero "
            "--gpus --gpu --memory --topology"
        ),
    ),
    "solve": Entry(
        "Find the fastest plan, and how far it is from the best possible.",
        (
            "pplan solve --gpus 8",
            "pplan solve vgg19.profile.json --gpus 16 --topology dgx-h100 --mini-batch 512 --optimizer adamw",
            "pplan solve --gpus 4 --gpu a100-40gb --runtime torchgpipe --details",
            "pplan solve config.json --gpus 64 --gpu h100",
            "pplan solve vgg19.plan.json --lost 3,7",
        ),
        MAIN,
        "3 no feasible plan",
        common_options=(
            "--gpus --gpu --memory --topology --runtime --mini-batch --micro-batches --schedule "
            "--recompute --optimizer --precision --zero --tp --time-limit --objective --sweep --pp "
            "--sequence --lost --details"
        ),
    ),
    "export": Entry(
        "Write a plan for a training runtime, or a script that trains.",
        ("pplan export torchgpipe", "pplan export torch vgg19.plan.json --script train.py"),
        MAIN,
    ),
    "show": Entry(
        "Show a profile or a plan in tables.",
        (
            "pplan show",
            "pplan show vgg19.profile.json --all",
            "pplan show --provenance vgg19.plan.json",
        ),
        LOOK,
    ),
    "explain": Entry(
        "Explain a plan: its limits, the second best, what changes bring.",
        ("pplan explain", "pplan explain --current 12,34"),
        LOOK,
    ),
    "compare": Entry(
        "Compare plans side by side, or with those of other planners.",
        ("pplan compare --planners", "pplan compare new.plan.json old.plan.json --fail-above 10%"),
        LOOK,
        "4 beyond --fail-above",
    ),
    "report": Entry(
        "Write plans as one HTML page.",
        ("pplan report", "pplan report vgg19.plan.json --explain -o vgg19.html"),
        LOOK,
    ),
    "simulate": Entry(
        "Simulate a step of a plan, or of given costs, under a schedule.",
        (
            "pplan simulate --schedule zb-h1 --micro-batches 32",
            "pplan simulate --trace step.json --plot step.pdf --plot-schedules gpipe,zb-h1",
            "pplan simulate --schedule 1f1b --stages 8 --micro-batches 32 --forward-ms 18.5 --backward-ms 37",
            "pplan simulate --list",
        ),
        LOOK,
        common_options=(
            "--schedule --stages --micro-batches --virtual-stages --replicas --forward-ms --backward-ms "
            "--weight-ms --transfer-ms --profile --gpu --memory --topology --trace --plot --list --text "
            "--actions"
        ),
    ),
    "check": Entry(
        "Run a plan for a few steps, and measure what was predicted.",
        ("pplan check", "pplan check vgg19.plan.json --emulate --fail-above 15%"),
        TRUST,
        "4 beyond --fail-above",
    ),
    "lint": Entry(
        "Check plan files, or a pipeline layout, without running them.",
        (
            "pplan lint vgg19.plan.json",
            "pplan lint 'Et*3|(tt|)*29m|L' --model config.json --pp 16",
            "pplan lint 'Et*15|t*16|t*16|t*17|t*16L' --model config.json --gpus 40 --gpu h100 --tp 8",
            "pplan lint even --model config.json --pp 8 --virtual-stages 4",
        ),
        TRUST,
        "4 something differs, or does not fit",
        common_options=(
            "--profile --model --gpus --gpu --memory --topology --implementation --sequence --layers "
            "--predictors --pp --tp --cp --ep --virtual-stages --micro-batch-size --mini-batch --zero "
            "--recompute"
        ),
    ),
    "machine": Entry(
        "Show machines, look at this one, and measure it.",
        panel=MACHINE,
        is_group=True,
    ),
    "machine list": Entry(
        "List the machines that --topology knows.",
        ("pplan machine list",),
        MACHINE,
    ),
    "machine show": Entry(
        "Show devices, links and transfer times of a machine.",
        ("pplan machine show dgx-a100", "pplan machine show dgx-a100 --gpus 8 --toml"),
        MACHINE,
    ),
    "machine doctor": Entry(
        "Tell what works on this computer, and what to install.",
        ("pplan machine doctor",),
        MACHINE,
        "2 something that pplan needs is missing",
    ),
    "machine measure": Entry(
        "Measure links, kernels and whole layers for solve --machine.",
        (
            "pplan machine measure --for config.json",
            "torchrun --nproc-per-node 8 --no-python pplan machine measure --for config.json",
        ),
        MACHINE,
        is_group=True,
    ),
    "machine measure links": Entry(
        "Measure the links between devices; writes links.toml.",
        ("torchrun --nproc-per-node 4 --no-python pplan machine measure links",),
        MACHINE,
    ),
    "machine measure kernels": Entry(
        "Measure a transformer's kernels; writes kernels.csv.",
        ("pplan machine measure kernels config.json --device cuda:0",),
        MACHINE,
    ),
    "schema": Entry(
        "Print the JSON Schema of a kind of file.",
        ("pplan schema", "pplan schema plan"),
    ),
    "config": Entry(
        "Show the defaults of options that are set here.",
        ("pplan config",),
    ),
}
"""By name. The function of `machine list` is `machine_list_command` in the module of its group."""
PROGRAM = Entry(
    "Measure a PyTorch model layer by layer, and find the fastest pipeline plan for your GPUs.",
    ("pplan profile vgg19", "pplan solve --gpus 8", "pplan export torchgpipe"),
)
REMOVED = {
    "degrees": "pplan solve config.json --gpus N --gpu NAME",
    "doctor": "pplan machine doctor",
    "import-plan": "pplan import PARTITION",
    "profile-kernels": "pplan machine measure kernels CONFIG",
    "profile-links": "pplan machine measure links",
    "replan": "pplan solve PLAN --lost N",
    "schedules": "pplan simulate --list, or pplan simulate --list --schedule NAME",
    "topology": "pplan machine list, or pplan machine show NAME",
    "verify": "pplan lint PLAN",
}
"""Verbs of earlier versions, and the commands that do their work now."""
