"""What stands below the options in every verb's help: examples, and what the exit statuses mean."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "profile": (
        "pplan profile vgg19",
        "pplan profile my_package.models:make_model --device cuda:0 --micro-batch-sizes 1,2,4,8",
        "pplan profile hf:gpt2 --device analytic:h100 --amp bf16",
    ),
    "profile-links": ("torchrun --nproc-per-node 4 --no-python pplan profile-links",),
    "import": ("pplan import costs.csv", "pplan import graph.txt --model vgg16 -o vgg16.profile.json"),
    "solve": (
        "pplan solve --gpus 8",
        "pplan solve vgg19.profile.json --gpus 16 --topology dgx-h100 --mini-batch 512 --optimizer adamw",
        "pplan solve --gpus 4 --gpu a100-40gb --runtime torchgpipe --details",
    ),
    "export": ("pplan export torchgpipe", "pplan export torch vgg19.plan.json --script train.py"),
    "import-plan": ("pplan import-plan 12,34 --profile vgg19.profile.json --mini-batch 256",),
    "show": ("pplan show", "pplan show vgg19.profile.json --all"),
    "explain": ("pplan explain", "pplan explain --current 12,34"),
    "check": ("pplan check", "pplan check vgg19.plan.json --emulate --fail-above 15%"),
    "compare": ("pplan compare --planners", "pplan compare new.plan.json old.plan.json --fail-above 10%"),
    "simulate": (
        "pplan simulate --schedule zb-h1 --micro-batches 32",
        "pplan simulate --trace step.json --svg step.svg",
        "pplan simulate --schedule 1f1b --stages 8 --micro-batches 32 --forward-ms 18.5 --backward-ms 37",
    ),
    "report": ("pplan report", "pplan report vgg19.plan.json --explain -o vgg19.html"),
    "verify": ("pplan verify vgg19.plan.json",),
    "schedules": ("pplan schedules", "pplan schedules show zb-h1"),
    "topology": ("pplan topology", "pplan topology show dgx-a100"),
    "degrees": ("pplan degrees config.json --gpus 64 --gpu h100",),
    "profile-kernels": ("pplan profile-kernels --device cuda:0",),
    "doctor": ("pplan doctor",),
    "schema": ("pplan schema", "pplan schema plan"),
    "config": ("pplan config",),
}
_STATUSES = (
    "Exit status: 0 done; 1 an internal error of pplan; 2 what you or the machine must change{more}; "
    "130 interrupted."
)
_MORE = {
    "solve": "; 3 no feasible plan",
    "degrees": "; 3 no feasible plan",
    "check": "; 4 beyond --fail-above",
    "compare": "; 4 beyond --fail-above",
    "verify": "; 4 something differs",
}


def help_footer(verb: str) -> str:
    """The examples of a verb, each on a line of its own, and its exit statuses."""
    examples = "\n\n".join(f"$ {example}" for example in EXAMPLES[verb])
    return f"Examples:\n\n{examples}\n\n{_STATUSES.format(more=_MORE.get(verb, ''))}"
