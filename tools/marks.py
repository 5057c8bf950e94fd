"""
Read from the tests' source which test carries which mark: ``req`` for a requirement, ``bound`` for a limit.

A test says so by ``@pytest.mark.req("F12")``: on the function, on its class, as ``pytestmark`` of class or
module, or in the ``marks`` of a ``pytest.param``. Reading source instead of collecting keeps this quick and
free of everything that tests import. It must then not believe a mark that pytest would never run, so a
mark counts only where pytest finds a test to carry it; any other mark is a ``Problem``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

__all__ = ["Evidence", "Problem", "SourceFile", "gather", "read_tree"]


@dataclass(frozen=True, order=True)
class Problem:
    """Something a person has to put right, and where."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@dataclass(frozen=True, order=True)
class Evidence:
    """One test's claim to show one requirement, or to cross one limit."""

    name: str
    test: str
    path: str
    line: int
    parameters: tuple[str, ...] = ()
    """The parameters of the test function; none for a class that inherits its tests."""


@dataclass(frozen=True)
class SourceFile:
    """A file of the tests' tree; ``path`` is relative to the repository, with forward slashes."""

    path: str
    text: str

    @property
    def is_collected(self) -> bool:
        """Whether pytest looks into this file by itself."""
        name = PurePosixPath(self.path).name
        return name.startswith("test_") or name.endswith("_test.py")


def read_tree(root: Path) -> list[SourceFile]:
    """Every Python file below ``root``/tests, in the order of their paths."""
    return [
        SourceFile(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))
        for path in sorted((root / "tests").rglob("*.py"))
    ]


def gather(files: Sequence[SourceFile], mark: str = "req") -> tuple[list[Evidence], list[Problem]]:
    """
    Find every mark of one kind in ``files`` and the tests that carry it.

    Returns:
        The claims and the problems, each sorted. The names are not checked.
    """
    problems: list[Problem] = []
    modules: list[tuple[SourceFile, ast.Module]] = []
    for file in files:
        try:
            modules.append((file, ast.parse(file.text)))
        except SyntaxError as error:
            problems.append(Problem(file.path, error.lineno or 0, f"cannot be parsed: {error.msg}"))
    suites = _suite_names(modules)
    evidence: set[Evidence] = set()
    for file, module in modules:
        reader = _Reader(file, module, suites, mark)
        reader.read()
        evidence.update(reader.evidence)
        problems.extend(reader.problems)
    return sorted(evidence), sorted(problems)


def _suite_names(modules: Iterable[tuple[SourceFile, ast.Module]]) -> frozenset[str]:
    """Names of the classes that pytest runs: ``Test*`` of a collected file, and all that these inherit from."""
    bases: dict[str, set[str]] = {}
    pending: list[str] = []
    for file, module in modules:
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                bases.setdefault(node.name, set()).update(_last_name(base) for base in node.bases)
                if file.is_collected and node.name.startswith("Test"):
                    pending.append(node.name)
    run: set[str] = set()
    while pending:
        name = pending.pop()
        if name in bases and name not in run:
            run.add(name)
            pending.extend(bases[name])
    return frozenset(run)


@dataclass
class _Reader:
    """Walks one module, handing marks down from module to class to test."""

    file: SourceFile
    module: ast.Module
    suites: frozenset[str]
    mark: str
    evidence: list[Evidence] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    _constants: dict[str, ast.expr] = field(default_factory=dict)
    _carried: set[ast.Call] = field(default_factory=set)

    def read(self) -> None:
        self._constants = {
            name: value for name, value in _assignments(self.module.body) if name != "pytestmark" and value is not None
        }
        self._visit(self.module.body, (), self._own_marks(self.module.body), is_run=self.file.is_collected)
        called = {id(node.func) for node in ast.walk(self.module) if isinstance(node, ast.Call)}
        for node in ast.walk(self.module):
            if isinstance(node, ast.Call) and self._is_mark(node.func) and node not in self._carried:
                self._problem(node, "this mark is on nothing that pytest runs")
            elif self._is_mark(node) and id(node) not in called:
                self._problem(node, f"a {self.mark} mark names at least one id")

    def _visit(self, body: Sequence[ast.stmt], owner: tuple[str, ...], marks: list[ast.Call], *, is_run: bool) -> bool:
        """Read the tests in ``body``; say whether there were any."""
        found = False
        for node in body:
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef() if node.name.startswith("test"):
                    found = True
                    if is_run:
                        self._carry((*owner, node.name), marks + self._marks_of(node.decorator_list), _parameters(node))
                case ast.ClassDef():
                    found |= self._visit_class(node, owner, marks)
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Attribute(value=machine, attr="TestCase")):
                    # A Hypothesis state machine is run through its ``TestCase``, and marked as a class.
                    if is_run and name.startswith("Test"):
                        found = True
                        self._carry((*owner, name), marks + self._marks_of_machine(_last_name(machine)))
                case ast.If() | ast.With() | ast.Try():
                    found |= self._visit(list(_inner(node)), owner, marks, is_run=is_run)
                case _:
                    pass
        return found

    def _visit_class(self, node: ast.ClassDef, owner: tuple[str, ...], marks: list[ast.Call]) -> bool:
        is_run = node.name in self.suites
        here = (*owner, node.name)
        own = marks + self._marks_of(node.decorator_list) + self._own_marks(node.body)
        found = self._visit(node.body, here, own, is_run=is_run)
        if not found and is_run and any(_last_name(base) in self.suites for base in node.bases):
            self._carry(here, own)  # its tests are the suite's it inherits from
            found = True
        return found

    def _marks_of(self, decorators: Iterable[ast.expr]) -> list[ast.Call]:
        """The marks in ``decorators``, also inside constants of the module that they name."""
        marks: list[ast.Call] = []
        pending = list(decorators)
        seen: set[str] = set()
        while pending:
            for node in ast.walk(pending.pop()):
                if isinstance(node, ast.Call) and self._is_mark(node.func):
                    marks.append(node)
                elif isinstance(node, ast.Name) and node.id in self._constants and node.id not in seen:
                    seen.add(node.id)
                    pending.append(self._constants[node.id])
        return marks

    def _marks_of_machine(self, name: str) -> list[ast.Call]:
        for node in self.module.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return self._marks_of(node.decorator_list) + self._own_marks(node.body)
        return []

    def _carry(self, names: tuple[str, ...], marks: Iterable[ast.Call], parameters: tuple[str, ...] = ()) -> None:
        test = "::".join((self.file.path, *names))
        for mark in marks:
            is_first = mark not in self._carried
            self._carried.add(mark)
            ids = [arg.value for arg in mark.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            if is_first and (mark.keywords or not ids or len(ids) < len(mark.args)):
                self._problem(mark, f"a {self.mark} mark takes ids as plain strings, at least one")
            self.evidence.extend(Evidence(name, test, self.file.path, mark.lineno, parameters) for name in ids)

    def _own_marks(self, body: Iterable[ast.stmt]) -> list[ast.Call]:
        """Return the marks in a body's ``pytestmark``."""
        return [
            node
            for name, value in _assignments(body)
            if name == "pytestmark" and value is not None
            for node in ast.walk(value)
            if isinstance(node, ast.Call) and self._is_mark(node.func)
        ]

    def _is_mark(self, node: ast.AST) -> bool:
        """Return whether ``node`` is ``pytest.mark.req``, or ``mark.req`` for those who import ``mark``."""
        return isinstance(node, ast.Attribute) and node.attr == self.mark and _last_name(node.value) == "mark"

    def _problem(self, node: ast.expr | ast.AST, text: str) -> None:
        self.problems.append(Problem(self.file.path, getattr(node, "lineno", 0), text))


def _last_name(node: ast.expr) -> str:
    """``c`` of ``a.b.c``, of ``c`` and of ``a.c[int]``; otherwise nothing."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=value):
            return _last_name(value)
        case _:
            return ""


def _assignments(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.expr | None]]:
    for node in body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield name, value
            case ast.AnnAssign(target=ast.Name(id=name), value=annotated):
                yield name, annotated
            case _:
                pass


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, ...]:
    return tuple(argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))


def _inner(node: ast.If | ast.With | ast.Try) -> Iterator[ast.stmt]:
    yield from node.body
    if isinstance(node, ast.If | ast.Try):
        yield from node.orelse
    if isinstance(node, ast.Try):
        yield from node.finalbody
        for handler in node.handlers:
            yield from handler.body
