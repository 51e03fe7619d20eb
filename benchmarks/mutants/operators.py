"""Small changes to Python source, one at a time: what a test suite ought to notice."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

SWAPS: Mapping[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.USub: ast.UAdd,
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One change: `file`, relative to the repository, and its number in that file."""

    file: str
    number: int
    line: int
    last_line: int
    words: str


@dataclass(frozen=True, eq=False)
class Change:
    """A field of a node, or an element of a list, with what is put there."""

    node: ast.AST
    target: Any
    key: str | int
    value: Any

    @property
    def is_element(self) -> bool:
        """Whether the node itself is replaced."""
        return isinstance(self.target, list) and not isinstance(self.value, ast.cmpop)

    def swap(self) -> Any:
        """Puts the value there; returns what was there before."""
        if isinstance(self.key, str):
            before = getattr(self.target, self.key)
            setattr(self.target, self.key, self.value)
        else:
            before = self.target[self.key]
            self.target[self.key] = self.value
        return before

    def restore(self, before: Any) -> None:
        """Puts back what was there."""
        if isinstance(self.key, str):
            setattr(self.target, self.key, before)
        else:
            self.target[self.key] = before


def changes(tree: ast.AST) -> Iterator[Change]:
    """All changes of a module, but of annotations, texts and the `strict=True` of a `zip`."""
    for field, value in ast.iter_fields(tree):
        if field in {"annotation", "returns", "decorator_list", "type_params"} or _is_strict(tree):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_for_type_checkers(child):
                yield from _of_node(child)
                yield from changes(child)
        if isinstance(value, list):
            yield from _of_list(value)


def _is_strict(node: ast.AST) -> bool:
    """Whether it is the `strict=True` of a `zip`: a check, which no input that a test may give fails."""
    return isinstance(node, ast.keyword) and node.arg == "strict" and ast.unparse(node.value) == "True"


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _of_node(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Compare():
            for number, operator in enumerate(node.ops):
                yield Change(node, node.ops, number, SWAPS[type(operator)]())
        case ast.BinOp() | ast.AugAssign() | ast.BoolOp() if type(node.op) in SWAPS:
            yield Change(node, node, "op", SWAPS[type(node.op)]())
        case ast.UnaryOp(op=ast.USub()):
            yield Change(node, node, "op", ast.UAdd())
        case ast.UnaryOp(op=ast.Not()):
            yield Change(node, node, "operand", _negation(node.operand))
        case ast.If() | ast.IfExp() | ast.While():
            yield Change(node, node, "test", _negation(node.test))
        case ast.For():
            yield Change(node, node, "iter", ast.Tuple([], ast.Load()))
        case ast.Constant(value=bool()):
            yield Change(node, node, "value", not node.value)
        case ast.Constant(value=int() | float()):
            yield Change(node, node, "value", node.value + 1)  # type: ignore[operator]
        case ast.Call(func=ast.Name(id=name)) if name in NAMES:
            yield Change(node, node, "func", ast.Name(NAMES[name], ast.Load()))
        case _:
            pass


def _of_list(nodes: list[Any]) -> Iterator[Change]:
    """Of statements that go, and of the conditions of a comprehension."""
    for number, node in enumerate(nodes):
        match node:
            case ast.comprehension():
                for index, condition in enumerate(node.ifs):
                    yield Change(condition, node.ifs, index, _negation(condition))
            case ast.Break():
                yield Change(node, nodes, number, ast.Continue())
            case ast.Continue():
                yield Change(node, nodes, number, ast.Break())
            case ast.Raise() | ast.Expr(value=ast.Call()):
                yield Change(node, nodes, number, ast.Pass())
            case _:
                pass


def _negation(node: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.Not(), node)


def mutants(folder: Path, file: str) -> list[Mutant]:
    """All of one file."""
    tree = ast.parse((folder / file).read_text(encoding="utf-8"))
    listed = []
    for number, change in enumerate(changes(tree)):
        node: Any = change.node
        old = ast.unparse(node)
        before = change.swap()
        new = ast.unparse(change.target[change.key] if change.is_element else node)
        change.restore(before)
        listed.append(Mutant(file, number, node.lineno, node.end_lineno, f"{_short(old)}  ->  {_short(new)}"))
    return listed


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 70 else f"{line[:67]}..."


def mutated_code(folder: Path, mutant: Mutant) -> CodeType:
    """The module with the change."""
    path = folder / mutant.file
    tree = ast.parse(path.read_text(encoding="utf-8"))
    list(changes(tree))[mutant.number].swap()
    return compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True)
