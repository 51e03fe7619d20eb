"""Options and their values in a trainer's command line, launch script, override, configuration or recipe."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence

from ..cost_models.errors import FileError

Options = dict[str, list[str]]
_KEY = re.compile(r"^(?:--)?((?:[A-Za-z]\w*[.-])*[A-Za-z]\w*)=(.+)$", re.DOTALL)


FORMATS = (
    "a balance list (12,34), DeepSpeed's parts (0,12,46), a Megatron layout (Et*3|t*5L), module names by "
    "stage as torchtitan takes them, a device_map, or what pplan export wrote"
)


def partition_error(where: str, why: str, hint: str = "") -> FileError:
    """The error for a partition that cannot be read, or is not one of the profile's layers."""
    return FileError(f"{where}: {why}", hint or f"Give {FORMATS}.")


def parse_options(text: str, where: str) -> Options:
    """The values that follow each option, or stand after its `=`.

    Names are without dashes and sections: `--parallelism.pipeline_parallel_degree 4` is
    {"pipeline_parallel_degree": ["4"]}. A variable of a script may hold several options. Raises FileError for
    quotes that do not end.
    """
    text = text.replace("\\\n", " ")
    if re.search(r"=\(\s*--", text):  # an array of bash, which may begin and end next to an option
        text = re.sub(r"\)(?=\s*$)", " )", text.replace("=(", "=( "), flags=re.MULTILINE)
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise partition_error(where, f"its quotes do not end ({error})") from error
    options: Options = {}
    last: list[str] | None = None
    for word in words:
        match = _KEY.match(word)
        if match and re.match(r"\s*--\S*\s", match[2]):
            options |= parse_options(match[2], where)
            last = None
        elif match:
            value = options[_name(match[1])] = [match[2]]
            last = value if match[2].startswith("[") else None
        elif word.startswith("--"):
            last = options.setdefault(_name(word), [])
        elif last is not None and word not in ("\\", ")"):
            last.append(word)
    return options


def flatten_options(content: Mapping[str, object]) -> Options:
    """Flatten the tables of a trainer's TOML or JSON configuration to the values of each last key.

    A list of lists becomes one text a list, its items separated by commas. torchtitan's table
    `activation_checkpoint` becomes an option, because its key `mode` alone says nothing.
    """
    options: Options = {}
    for key, value in content.items():
        if isinstance(value, Mapping):
            options |= flatten_options(value)
            if key == "activation_checkpoint" and "mode" in value:
                options["activation_checkpointing"] = [str(value["mode"])]
        elif isinstance(value, list):
            options[key] = [
                ",".join(map(str, item)) if isinstance(item, list) else str(item) for item in value
            ]
        elif value is not None:
            options[key] = [str(value)]
    return options


def read_module_lists(options: Options) -> list[list[str]]:
    """Read the module names of each stage; an empty list where the options name none.

    The value is one text a stage, its names separated by commas, or a list of lists as Python, JSON or YAML
    write it, also without the quotes, which a shell removes.
    """
    stages = options.get("module_fqns_per_model_part", [])
    text = "".join(stages)
    if re.match(r"[\[(]\s*[\[(]", text):
        stages = re.findall(r"[\[(]([^\[\]()]*)[\])]", text)
    elif re.match(r"[\[(]", text):
        stages = re.findall(r"[\"']([^\"']*)[\"']", text)
    names = [[_plain(name) for name in stage.split(",")] for stage in stages]
    return [[name for name in stage if name] for stage in names]


def read_names(texts: Sequence[str]) -> list[str]:
    """Names in one text or several, with commas between them, or a list as Python or JSON writes it."""
    return [_plain(name) for name in ",".join(texts).strip("[]()").split(",") if name.strip()]


def is_set(options: Options, name: str) -> bool:
    """Return whether a switch is on: alone, or with a value that is not false."""
    return name in options and options[name][:1] not in (["False"], ["false"])


def parse_yaml(text: str, where: str) -> Options:
    """The options of a recipe. Raises FileError where it is no YAML, or repeats parts by reference."""
    import yaml  # type: ignore[import-untyped,unused-ignore]  # only recipes need it

    # libyaml limits how deep lists and maps are nested. PyYAML's own parser takes 30 s for 50 KB of brackets.
    safe = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text, safe)):
            raise partition_error(where, "its YAML has references (*name)", "Write out what they stand for.")
        content = safe(text).get_single_data()
    except (yaml.YAMLError, RecursionError) as error:
        raise partition_error(where, f"it is no YAML: {' '.join(str(error).split())}") from error
    return flatten_options(content) if isinstance(content, Mapping) else {}


def _plain(text: str) -> str:
    text = text.strip()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text.strip("'\"")
    return text if isinstance(value, list | dict) else str(value)


def _name(option: str) -> str:
    return option.removeprefix("--").rpartition(".")[2].replace("-", "_")


def read_number(options: Options, name: str, where: str) -> int | None:
    """The whole number that an option is given; None where it is not there. Raises FileError."""
    values = options.get(name)
    if not values:
        return None
    if not re.fullmatch(r"[1-9]\d{0,17}", values[0]):
        raise _wrong(where, name, values[0])
    return int(values[0])


def _wrong(where: str, name: str, value: str) -> FileError:
    return partition_error(where, f"{name} is {value!r}, not a whole number", f"For example: {name} 8")
