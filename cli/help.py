"""The help of a verb, of a group and of the program: plain text, which takes no time to import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .verb_table import Entry

ALL_OPTIONS = "pplan.all_options"
"""Key of a context's `meta`: the help is to show all options."""
_OF_ALL = "--output --force --json --help --help-all"
_STATUSES = "0 done; 1 an internal error of pplan; 2 what you or the machine must change{}; 130 interrupted."


def write_help(command: Any, entry: Entry, context: Any, formatter: Any) -> None:
    """Write the help of a command.

    Args:
        command: The command.
        entry: Its row in the table of verbs.
        context: typer's, of the command.
        formatter: typer's, to which it is written.
    """
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    verb = "VERB ..." if hasattr(command, "commands") else ""
    formatter.write_usage(context.command_path, " ".join(["[OPTIONS]", *map(_usage, arguments), verb]))
    command.format_help_text(context, formatter)
    panels: dict[str, list[tuple[str, str]]] = {}
    verbs = {name: verb.entry for name, verb in getattr(command, "commands", {}).items()}
    for name, verb in verbs.items():
        if verb.panel is not None:
            panels.setdefault(verb.panel, []).append((name.ljust(max(map(len, verbs))), verb.summary))
    options: list[tuple[str, str]] = []
    visible = None
    if entry.common_options and ALL_OPTIONS not in context.meta:
        visible = {*entry.common_options.split(), *_OF_ALL.split()}
    hidden_count = 0
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is None:
            continue
        if (
            visible is not None
            and parameter.param_type_name == "option"
            and visible.isdisjoint(parameter.opts)
        ):
            hidden_count += 1
        elif parameter.param_type_name == "argument":
            panels.setdefault("Arguments", []).append((parameter.metavar, record[1]))
        elif parameter.rich_help_panel is None:
            options.append(record)
        else:
            panels.setdefault(parameter.rich_help_panel, []).append(record)
    for panel, rows in (panels | {"Options": options}).items():
        with formatter.section(panel):
            formatter.write_dl(rows)
    if hidden_count:
        formatter.write_paragraph()
        formatter.write_text(f"{hidden_count} more options: {context.command_path} --help-all")
    if entry.examples:
        with formatter.section("Examples"):
            for example in entry.examples:
                formatter.write(f"{'':>{formatter.current_indent}}$ {example}\n")
    formatter.write_paragraph()
    formatter.write_text(f"Exit status: {_STATUSES.format(entry.status and f'; {entry.status}')}")


def _usage(argument: Any) -> str:
    """An argument as it stands in the usage: `PLAN`, `[PLAN]` or `[PLAN...]`."""
    name = f"{argument.metavar}{'...' if argument.nargs != 1 else ''}"
    return name if argument.required else f"[{name}]"
