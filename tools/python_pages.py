"""
The reference of the Python packages, made from the source: signatures, options and docstrings of all that they export.

Signatures and defaults are read from the source, so that they stand in the page as they stand in the code.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import enum
import functools
import importlib
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, NamedTuple, get_origin

from tidings.core.settings import Settings

__all__ = ["PACKAGES", "page_name", "python_page"]

PACKAGES: Final = {
    "tidings": "The names that most programs need",
    "tidings.bus": "The bus",
    "tidings.types": "Events and their parts",
    "tidings.log": "The log",
    "tidings.ledger": "The ledger",
    "tidings.client": "The Python client",
    "tidings.filters": "Filters",
    "tidings.middleware": "Middleware",
    "tidings.testing": "The test kit",
    "tidings.spark": "The log in Spark",
}
"""Each package that has a page, and what it is called there."""

_LINE_MAX: Final = 100
_SECTION: Final = re.compile(r"(Args|Raises|Returns|Yields|Attributes|Example|Examples):")
_BOUNDS: Final = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class _Attribute(NamedTuple):
    """A field, a class's own value, or an attribute that is explained where it is set."""

    name: str
    kind: str
    default: str | None
    """None if it must be given."""
    about: str


def page_name(package: str) -> str:
    """The file that has a package's page."""
    return f"{package.replace('tidings', 'python').replace('.', '-')}.md"


def python_page(package: str) -> str:
    """The page of one package: a list of what it exports, then each of them."""
    module = importlib.import_module(package)
    names = _exported(package)
    entries = {name: list(_entry(name, getattr(module, name), package)) for name in names}
    lines = [f"# {PACKAGES[package]}: `{package}`", "", *_prose(module.__doc__)]
    lines += ["", "This page is made from the source by `python -m tools.reference`, and a test keeps it current.", ""]
    lines += [f"- [`{name}`](#{name.lower()})" for name in names]
    for name, entry in entries.items():
        lines += ["", f"## {name}", "", *entry]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _exported(package: str) -> list[str]:
    names = importlib.import_module(package).__all__
    return sorted((name for name in names if not name.startswith("_")), key=str.lower)


@functools.cache
def _homes() -> dict[int, tuple[str, str]]:
    """For each thing that is exported the first package and name that it has, where it is explained."""
    places = [(package, name) for package in PACKAGES for name in _exported(package)]
    return {id(getattr(importlib.import_module(each[0]), each[1])): each for each in reversed(places)}


def _entry(name: str, found: Any, package: str) -> Iterator[str]:
    home, own_name = _homes()[id(found)]
    if (home, own_name) != (package, name):
        yield f"The same as [`{home}.{own_name}`]({page_name(home)}#{own_name.lower()})."
    elif inspect.isclass(found):
        yield from _class(name, found)
    elif inspect.isfunction(found):
        yield from _functions([_tree_of(found)], name)
    else:
        yield from _assignment(name, found)


def _tree_of(found: Any) -> Any:
    return ast.parse(textwrap.dedent(inspect.getsource(found))).body[0]


def _assignment(name: str, value: Any) -> Iterator[str]:
    """A constant or the name of a type, as the module that has it writes it down."""
    for module in [each for key, each in sorted(sys.modules.items()) if key.startswith("tidings.")]:
        if vars(module).get(name) is not value:
            continue
        for node, after in _with_next(ast.parse(inspect.getsource(module)).body):
            match node:
                case ast.Assign(targets=[ast.Name(id=target)]) | ast.AnnAssign(target=ast.Name(id=target)):
                    if target == name:
                        yield from _code(f"{name} = {_written(node.value)}" if node.value else name)
                        yield from _prose(_text_of(after))
                        return
    raise LookupError(name)


def _class(name: str, kind: type[Any]) -> Iterator[str]:
    own = [each for each in kind.__mro__ if each.__module__.startswith("tidings")]
    bodies = [_tree_of(each).body for each in own]
    functions = [node for body in bodies for node in body if isinstance(node, _Function)]
    methods: dict[str, list[_Function]] = {}
    for node in functions:
        methods.setdefault(node.name, []).append(node)
    if issubclass(kind, Settings):
        methods.clear()  # what checks them
    attributes = list(_attributes(own, bodies, methods))
    start = methods.get("__init__", [])
    if kind.__name__ != name:
        yield from (f"The class `{kind.__module__}.{kind.__name__}`.", "")
    if start and not issubclass(kind, BaseException):
        yield from _functions(start[:1], name, with_text=False)
    yield from _prose(kind.__doc__)
    if start and (text := ast.get_docstring(start[0])):
        yield from ("", *_prose(text))
    if attributes:
        yield from ("", "| name | type | default | meaning |", "|---|---|---|---|")
        for each in attributes:
            default = "required" if each.default is None else _as_code(each.default)
            cells = (f"`{each.name}`", _as_code(each.kind), default, " ".join(_prose(each.about)))
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    for method, nodes in methods.items():
        if not method.startswith("_"):
            yield from ("", f"### {name}.{method}", "", *_functions(_of_one_class(nodes), method))


def _of_one_class(nodes: Sequence[_Function]) -> list[_Function]:
    """Of all definitions of a method those of the first class that has it: its overloads, and the one that does it."""
    overloads = list(itertools.takewhile(lambda node: "overload" in _decorators(node), nodes))
    return [*overloads, nodes[len(overloads)]]


def _attributes(
    classes: Sequence[type[Any]], bodies: Sequence[list[ast.stmt]], methods: dict[str, list[_Function]]
) -> Iterator[_Attribute]:
    """Fields in the order of the code, those of bases first; then what is explained where it is set."""
    kind = classes[0]
    is_record = hasattr(kind, "__struct_fields__") or dataclasses.is_dataclass(kind) or issubclass(kind, tuple)
    seen: set[str] = set()
    starts = [statement for node in methods.get("__init__", [])[:1] for statement in node.body]
    placed = [(each, pair) for each, body in zip(classes, bodies, strict=True) for pair in _with_next(body)]
    ordered = sorted(placed, key=lambda each: -classes.index(each[0]))
    for owner, (statement, after) in (*ordered, *((kind, pair) for pair in _with_next(starts))):
        text, found = _text_of(after), None
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=value):
                if text or is_record or issubclass(kind, BaseException):
                    form, bounds = _type_and_bounds(annotation, owner)
                    missing = None if is_record else ""
                    default = missing if value is None else _default(value, owner)
                    found = _Attribute(name, form, default, " ".join(filter(None, [text, bounds])))
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                if text or issubclass(kind, enum.Enum):
                    found = _Attribute(name, "", _written(value), text)
            case ast.Assign(targets=[ast.Attribute(attr=name)]) if text:
                found = _Attribute(name, "", "", text)
            case ast.AnnAssign(target=ast.Attribute(attr=name), annotation=annotation) if text:
                found = _Attribute(name, _written(annotation), "", text)
        if found and not found.name.startswith("_") and found.name not in seen:
            seen.add(found.name)
            yield found


def _value(node: ast.expr, owner: type[Any]) -> Any:
    """What an expression is in the module of a class."""
    return eval(ast.unparse(node), dict(vars(sys.modules[owner.__module__])))


def _default(node: ast.expr, owner: type[Any]) -> str:
    """A default as it is written; a number as the number that it is."""
    if isinstance(node, ast.BinOp | ast.Constant | ast.Name) and isinstance(value := _value(node, owner), int | float):
        return f"{value:_}" if type(value) is int else str(value)
    match node:
        case ast.Call(keywords=[ast.keyword(arg="default_factory", value=factory)]):
            return {"dict": "{}", "list": "[]"}.get(ast.unparse(factory), f"{ast.unparse(factory)}()")
    return _written(node)


def _type_and_bounds(annotation: ast.expr, owner: type[Any]) -> tuple[str, str]:
    """A type without its bounds, and those in words."""
    said: list[str] = []

    class Plain(ast.NodeTransformer):
        """Puts the type in the place of ``Annotated``, and of a name for one."""

        def generic_visit(self, node: ast.AST) -> ast.AST:
            if isinstance(node, ast.Name | ast.Subscript):
                found: Any = _value(node, owner) if _is_known(node, owner) else None
                if get_origin(found) is Annotated:
                    bounds = [
                        (word, getattr(meta, name, None))
                        for meta in found.__metadata__
                        for name, word in _BOUNDS.items()
                    ]
                    said.extend(f"{word} {bound:_}" for word, bound in bounds if bound is not None)
                    origin = found.__origin__
                    return ast.Name(origin.__name__ if inspect.isclass(origin) else str(origin))
            return super().generic_visit(node)

    plain = _written(Plain().visit(annotation))
    bounds = " and ".join(said)
    return plain, f"{bounds[:1].upper()}{bounds[1:]}." if bounds else ""


def _is_known(node: ast.expr, owner: type[Any]) -> bool:
    """Whether it can be worked out: names that are there for type checkers only cannot."""
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return names <= {*vars(sys.modules[owner.__module__]), *vars(builtins)}


def _functions(nodes: Sequence[_Function], name: str, *, with_text: bool = True) -> Iterator[str]:
    """What is called, each way that it can be; then its docstring."""
    shown = nodes[:-1] or nodes
    yield from _code("\n".join(_signature(node, name) for node in shown))
    if with_text:
        yield from _prose(ast.get_docstring(nodes[-1]))


def _written(node: ast.AST) -> str:
    """The source of a node, with the quotes that our code has."""
    text = ast.unparse(node)
    return text if '"' in text else text.replace("'", '"')


def _decorators(node: _Function) -> set[str]:
    return {_written(each).rpartition(".")[2] for each in node.decorator_list}


def _signature(node: _Function, name: str) -> str:
    answer = "" if node.returns is None else _written(node.returns)
    decorators = _decorators(node)
    if decorators & {"property", "cached_property"}:
        return f"{name}: {answer}"
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    shown = [_argument(each, default) for each, default in zip(positional, defaults, strict=True)]
    if "staticmethod" not in decorators and positional and positional[0].arg in ("self", "cls"):
        del shown[0]
    if arguments.vararg:
        shown.append("*" + _argument(arguments.vararg, None))
    elif arguments.kwonlyargs:
        shown.append("*")
    shown += [_argument(*each) for each in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg:
        shown.append("**" + _argument(arguments.kwarg, None))
    before = "await " if isinstance(node, ast.AsyncFunctionDef) and "asynccontextmanager" not in decorators else ""
    after = f" -> {answer}" if answer and node.name != "__init__" else ""
    line = f"{before}{name}({', '.join(shown)}){after}"
    if len(line) <= _LINE_MAX:
        return line
    return "\n".join([f"{before}{name}(", *(f"    {each}," for each in shown), f"){after}"])


def _argument(node: ast.arg, default: ast.expr | None) -> str:
    kind = "" if node.annotation is None else f": {_written(node.annotation)}"
    value = "" if default is None else f" = {_written(default)}"
    return f"{node.arg}{kind}{value}"


def _with_next(body: Sequence[ast.stmt]) -> Iterator[tuple[ast.stmt, ast.stmt | None]]:
    return itertools.zip_longest(body, body[1:])


def _text_of(node: ast.stmt | None) -> str:
    match node:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return inspect.cleandoc(text)
    return ""


def _code(text: str) -> Iterator[str]:
    yield from ("```py", text, "```", "")


def _as_code(text: str) -> str:
    return f"`{text}`" if text else ""


def _prose(text: str | None) -> Iterator[str]:
    """A docstring as Markdown: its sections are lists, what is set off is code."""
    plain = inspect.cleandoc(text or "").replace("``", "`")
    lines = re.sub(r"`docs/(\S+?\.md)`", r"[docs/\1](../\1)", plain).splitlines()
    section = ""
    for line in lines:
        if found := _SECTION.fullmatch(line):
            section = found[1]
            yield from ("", f"{section}:", "")
        elif not section or not line.startswith("    "):
            section = section if not line else ""
            yield re.sub(r"::$", ":", line)
        elif section in ("Args", "Raises", "Attributes"):
            entry = line[4:]
            item = re.fullmatch(r"([\w.*]+(?:, [\w.*]+)*): (.*)", entry)
            yield f"- `{item[1]}`: {item[2]}" if item and not entry.startswith(" ") else f"  {entry.strip()}"
        else:
            yield line[4:]
