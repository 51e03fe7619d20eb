"""The files that are mutated: one of each kind that pplan reads, made by pplan where it writes them."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from pplan.cli.app import main
from pplan.cost_models.runtime import RUNTIMES

TIED, PLAIN = "tied.profile.json", "plain.profile.json"
PROFILES = (TIED, PLAIN)
MACHINE = ("--gpus", "4", "--gpu", "a100-40gb", "--mini-batch", "16")
SOLVED = {"tied.plan.json": TIED, "plain.plan.json": PLAIN}
IMPORTED: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "replicas.plan.json": (PLAIN, "4,3", ("--replicas", "2", "--schedule", "1f1b")),
    "interleaved.plan.json": (TIED, "2,2,1,2", ("--virtual-stages", "2")),
    "1f1b.plan.json": (PLAIN, "3,4", ("--schedule", "1f1b")),
    "gpipe.plan.json": (PLAIN, "3,4", ("--schedule", "gpipe")),
    "naive.plan.json": (PLAIN, "3,4", ("--schedule", "naive")),
}
PLANS = {**SOLVED, **{name: given[0] for name, given in IMPORTED.items()}}
"""With the profile that each was made of."""
SCHEDULE, CHECK, FRONTIER = "mine.schedule", "plain.check.json", "plain.frontier.json"
DEFAULTS_FILE = "pplan.toml"
"""Of the case alone that mutates it: empty beside others."""
DEFAULTS = """[solve]
mini-batch = 16
memory = "16GiB"
schedule = "1f1b"
keep-together = ["transformer.h.*"]
details = true
[lint]
gpus = 4
gpu = "h100"
"""
_RUN_BY = {"torchgpipe": "gpipe", "fairscale": "gpipe", "huggingface": "naive"}
EXPORTS = tuple(f"plain.{name}.json" for name in RUNTIMES)
TABLE = "name,forward_seconds,backward_seconds,activation_bytes,parameter_bytes,saved_bytes\n" + "".join(
    f"layer{number},{1 + number}e-3,{2 + number}e-3,1048576,4194304,2097152\n" for number in range(5)
)
GRAPH = "".join(
    f"node{number} -- Linear{number} -- forward_compute_time={number}.5, backward_compute_time={number}.9, "
    f"activation_size=[8.0; 1048576.0], parameter_size=4096.0 -- stage_id=1\n"
    for number in range(1, 6)
) + "".join(f"\tnode{number} -- node{number + 1}\n" for number in range(1, 5))
TOPOLOGY = """gpus = 4
[[device]]
gpu = "a100-40gb"
count = 2
[[device]]
name = "small"
memory = "16GiB"
count = 2
speed = 0.5
[[level]]
name = "node"
size = 2
link = "NVLink 3"
bandwidth = "300GB/s"
latency = "5us"
[[level]]
name = "network"
bandwidth = "12.5GB/s"
latency = "20us"
shared = true
"""
SHORT_TOPOLOGY = """gpu = "a100-40gb"
gpus = 16
gpus_per_node = 8
bandwidth = ["300GB/s", "25GB/s"]
latency = ["5us", "20us"]
"""
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MIXTURE = CONFIG | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
CONFIGS = {"config.json": CONFIG, "mixture.json": MIXTURE}
KERNELS = """operation,shape,peak_tflops,efficiency
matmul,"m=4096, k=1024, n=1536, layout=TN",989.5,0.61
matmul,"m=4096, k=1536, n=1024, layout=NN",989.5,0.58
matmul,"m=1536, k=4096, n=1024, layout=NT",989.5,0.52
group_matmul,"ng=8, M=1024, N=5632, K=1024, stage=fwd",989.5,0.44
sdp_fwd,"seq_len=4096, head_num=16, kv_head_num=4, qk_head_dim=64, v_head_dim=64",989.5,0.45
sdp_bwd,"seq_len=4096, head_num=16, kv_head_num=4, qk_head_dim=64, v_head_dim=64",989.5,0.39
"""
PARTITIONS = {
    "balance.txt": "balance = [3, 4]\n",
    "parts.txt": "0,3,7\n",
    "layout.txt": "--pipeline-model-parallel-size 3 --pipeline-model-parallel-layout 'E(t|)*2t*2L' "
    "--global-batch-size 16 --micro-batch-size 2\n",
    "device_map.json": json.dumps(
        {"transformer": 0, **{f"transformer.{name}": 1 for name in ("h.2", "h.3", "ln_f")}, "lm_head": 1}
    ),
    "recipe.yaml": "pp_size: 2\nmodule_fqns_per_model_part:\n  - [transformer.wte, transformer.h.0]\n"
    "  - - transformer.h.1\n    - transformer.h.2\n    - transformer.h.3\n    - transformer.ln_f\n"
    "    - lm_head\n",
}
GIB = 2**30


def make_seeds(folder: Path) -> None:
    """Writes all of them there."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        _write(folder)
    finally:
        os.chdir(before)


def _write(folder: Path) -> None:
    content = profile()
    (folder / TIED).write_text(json.dumps(content, indent=1))
    (folder / PLAIN).write_text(json.dumps(content | {"tied": []}, indent=1))
    (folder / "table.csv").write_text(TABLE)
    (folder / "graph.txt").write_text(GRAPH)
    rows = [dict(zip(TABLE.splitlines()[0].split(","), line.split(","), strict=True)) for line in _rows()]
    numbers = [{key: _number(value) for key, value in row.items()} for row in rows]
    (folder / "table.json").write_text(json.dumps({"layers": numbers}, indent=1))
    (folder / "kernels.csv").write_text(KERNELS)
    (folder / CHECK).write_text(json.dumps(check()))
    (folder / "machine.toml").write_text(TOPOLOGY)
    (folder / "short.toml").write_text(SHORT_TOPOLOGY)
    for name, config in CONFIGS.items():
        (folder / name).write_text(json.dumps(config, indent=1))
    for name, text in PARTITIONS.items():
        (folder / name).write_text(text)
    _run("solve", "mixture.json", "--gpus", "4", "--gpu", "h100", "--pp", "2", "-o", "degrees.json")
    for name, of in SOLVED.items():
        _run("solve", of, *MACHINE, "--time-limit", "2s", "-o", name)
    for name, (of, partition, more) in IMPORTED.items():
        _run("import", partition, "--profile", of, *MACHINE, *more, "-o", name)
    _run(
        "solve", PLAIN, *MACHINE, "--frontier", "--points", "3", "--time-limit", "2s", "-o", "front.plan.json"
    )
    Path("front.frontier.json").rename(FRONTIER)
    Path("front.plan.json").unlink(missing_ok=True)
    (folder / DEFAULTS_FILE).write_text(DEFAULTS)
    (folder / SCHEDULE).write_text(_run("simulate", "--list", "--schedule", "1f1b", "--text"))
    for name, file in zip(RUNTIMES, EXPORTS, strict=True):
        _run("export", name, f"{_RUN_BY.get(name, '1f1b')}.plan.json", "-o", file)


def _rows() -> list[str]:
    return TABLE.splitlines()[1:]


def _number(text: str) -> Any:
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return text


def _run(*arguments: str) -> str:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(list(arguments))
    if status:
        raise AssertionError(f"{' '.join(arguments)}: {status}: {err.getvalue()}")
    return out.getvalue()


def check() -> dict[str, Any]:
    """Of two stages, as `pplan check` writes it."""
    seconds = {"forward": 3e-3, "backward": 6e-3, "input": 3e-3, "weight": 3e-3}
    stages = [
        {"first_layer": first, "last_layer": last, "devices": [device]}
        | {"planned": seconds, "measured": seconds}
        for device, (first, last) in enumerate(((0, 2), (3, 6)))
    ]
    case = {
        "name": "plan",
        "balance": [3, 4],
        "schedule": "1f1b",
        "micro_batches": 4,
        "micro_batch_size": 4,
        "predicted_step_seconds": 0.051,
        "step_seconds": [0.05, 0.052, 0.049],
        "stages": stages,
        "devices": [{"device": 0, "planned_bytes": 2**30, "measured_bytes": 2**29}],
        "losses": {"pipeline": [2.5, 2.25], "plain": [2.5, 2.25]},
    }
    return {
        "schema": 1,
        "plan": "plain.plan.json",
        "model": "hf:gpt2",
        "backend": "gloo",
        "device_name": "a processor",
        "processes": 2,
        "cases": [case, case | {"name": "even"}],
        "links": {"sizes": [1024, 2**20], "seconds": [1e-5, 1e-4]},
        "corrections": {"overhead": 1e-5, "slowdown": 1.1},
        "notes": ["a note"],
    }


def profile(blocks: int = 4, sizes: Sequence[int] = (1, 2, 4)) -> dict[str, Any]:
    """Of a small GPT, with all that a measured profile has, at these micro-batch sizes."""
    names = ["transformer.wte", *(f"transformer.h.{block}" for block in range(blocks))]
    names += ["transformer.ln_f", "lm_head"]
    return {
        "schema": 1,
        "model": "hf:gpt2",
        "device": "cuda",
        "device_name": "NVIDIA A100-SXM4-40GB",
        "device_memory_bytes": 40 * GIB,
        "dtype": "float32",
        "input_shape": [128],
        "inputs": [{"shape": [128], "dtype": "int64"}],
        "input_bytes_per_sample": 1024,
        "settings": {"n_layer": blocks},
        "seed": 0,
        "granularity": "block",
        "layers": [_layer(name, number, sizes) for number, name in enumerate(names)],
        "edges": [list(pair) for pair in pairwise(names)],
        "whole": [_whole(size) for size in sizes],
        "loss": {"name": "cross-entropy", "costs": [_costs(size, 0.1) for size in sizes]},
        "tied": [{"tensor": "transformer.wte.weight", "layers": [names[0], names[-1]], "bytes": 2**20}],
        "unmeasured": [{"micro_batch_size": 2 * sizes[-1], "reason": "does not fit"}],
        "notes": ["a note"],
        "made_by": {"pplan": "0.1.0", "command": "pplan profile hf:gpt2", "time": "2026-01-01T00:00:00Z"},
    }


def _layer(name: str, number: int, sizes: Sequence[int]) -> dict[str, Any]:
    return {
        "name": name,
        "kind": "GPT2Block" if ".h." in name else "Embedding",
        "parameter_bytes": 2**22 + number,
        "trainable_bytes": 2**22,
        "buffer_bytes": 1024,
        "cut_after": name != "transformer.ln_f",
        "cut_reason": "one tensor" if name == "transformer.ln_f" else None,
        "crossing": 1,
        "costs": [_costs(size, 1 + number % 3) for size in sizes],
    }


def _costs(size: int, weight: float) -> dict[str, Any]:
    return {
        "micro_batch_size": size,
        "forward_seconds": 1e-3 * size * weight + 1e-4,
        "backward_seconds": 2e-3 * size * weight + 1e-4,
        "output_bytes": 2**18 * size,
        "saved_bytes": 2**20 * size,
        "saved_input_bytes": 1024,
        "workspace_bytes": 2**16,
        "forward_workspace_bytes": 2**15,
        "backward_workspace_bytes": 2**16,
        "spread": 0.02,
        "forward_host_seconds": 5e-5,
        "backward_host_seconds": 5e-5,
        "backward_input_seconds": 1e-3 * size * weight,
        "backward_weight_seconds": 1e-3 * size * weight,
    }


def _whole(size: int) -> dict[str, Any]:
    return {
        "micro_batch_size": size,
        "forward_seconds": 1.4e-2 * size,
        "backward_seconds": 2.8e-2 * size,
        "closing_ratio": 1.01,
        "forward_closing_ratio": 1.0,
        "backward_closing_ratio": 1.02,
        "peak_bytes": 2**28,
        "predicted_peak_bytes": 2**28,
        "rounds": 20,
        "spread": 0.01,
    }
