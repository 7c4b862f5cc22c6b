"""Small changes of Python source: where ``tools/mutate.py`` may change a module, and what it may write there.

A mutant replaces one expression or one statement by another text that spans as many lines, so every other line keeps
its number. Left out is what no test should pin down: docstrings and all other strings, the arguments of errors and of
notes to the user, annotations, code that only type checkers read, and ``__repr__`` with its like.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
CALLED = {
    "min": "max",
    "max": "min",
    "minimum": "maximum",
    "maximum": "minimum",
    "argmin": "argmax",
    "argmax": "argmin",
    "amin": "amax",
    "amax": "amin",
    "sum": "mean",
    "mean": "sum",
    "nansum": "nanmean",
    "any": "all",
    "all": "any",
    "floor": "ceil",
    "ceil": "floor",
    "zeros": "ones",
    "ones": "zeros",
    "zeros_like": "ones_like",
    "ones_like": "zeros_like",
    "add_": "sub_",
    "sub_": "add_",
    "mul_": "div_",
    "div_": "mul_",
    "union1d": "intersect1d",
    "startswith": "endswith",
    "endswith": "startswith",
}
EITHER_WAY = {"minimum", "maximum", "union1d", "intersect1d"}
"""Of ``CALLED``, what gives the same of two arguments whichever comes first, as do the built-in min and max."""
BUILT_IN = {"min", "max", "any", "all"}
"""Of ``CALLED``, what exists as a plain name; ``sum(x)`` has no plain ``mean`` as its counterpart."""
WORDS = {
    "note",
    "warn",
    "print",
    "echo",
    "info",
    "debug",
    "warning",
    "told",
    "tell",
    "unknown",
    "TypeVar",
    "NewType",
    "ParamSpec",
    "namedtuple",
    "Option",
    "Argument",
}
"""Calls whose arguments are words for a person or names for a type checker."""
GENERIC = {
    "Annotated",
    "Literal",
    "Callable",
    "Mapping",
    "Sequence",
    "Union",
    "Optional",
    "dict",
    "tuple",
    "list",
}
"""Types whose subscripts are type aliases."""
MODULE = "<module>"
"""Stands for the name that a statement at the top of a module does not define."""
TINY = 1e-4
"""Constants up to here guard against division by zero and the like: half as much again would change nothing."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        file: path below the root of the repository.
        where: the function or class it is in, dotted; empty at the top of the module.
        line: first line of what is replaced.
        end: its last line.
        stop: last line of the statement around it, or of that statement's head.
        first: first line of that statement.
        names: what the statement defines where it runs at import; empty inside a function.
        span: first and last byte of what is replaced.
        text: what is written there.
        before: the source of these lines, on one line.
        after: the same, changed.
    """

    file: str
    where: str
    line: int
    end: int
    first: int
    stop: int
    names: tuple[str, ...]
    span: tuple[int, int]
    text: str
    before: str
    after: str

    def apply(self, source: str) -> str:
        """The changed source."""
        raw = source.encode()
        return (raw[: self.span[0]] + self.text.encode() + raw[self.span[1] :]).decode()


def mutants_of(source: str, file: str) -> list[Mutant]:
    """Every mutant of a module."""
    return list(
        dict.fromkeys(_Finder(source, file).block(ast.parse(source).body, _At("", (), 0, 0, False)))
    )


@dataclass(frozen=True)
class _At:
    """Where the walk is: see ``Mutant``; ``inside`` a function."""

    where: str
    names: tuple[str, ...]
    first: int
    stop: int
    inside: bool


class _Finder:
    """Walks a module; the methods yield the mutants below a node."""

    def __init__(self, source: str, file: str) -> None:
        self.file = file
        self.raw = source.encode()
        self.begins = [0]
        for line in self.raw.splitlines(keepends=True):
            self.begins.append(self.begins[-1] + len(line))

    def made(self, node: ast.expr | ast.stmt, text: str, at: _At) -> Mutant:
        """``node`` replaced by ``text``, with blank lines for those that it no longer has."""
        end_line = node.end_lineno or node.lineno
        end_col = node.end_col_offset or 0
        span = self.begins[node.lineno - 1] + node.col_offset, self.begins[end_line - 1] + end_col
        lost = "\n" * self.raw[span[0] : span[1]].count(b"\n")
        if isinstance(node, ast.stmt):
            text += lost
        elif lost or not text.isidentifier():
            text = f"({text}{lost})"
        a = self.begins[node.lineno - 1]
        z = self.begins[end_line]
        before = self.raw[a:z].decode()
        after = (self.raw[a : span[0]] + text.encode() + self.raw[span[1] : z]).decode()
        return Mutant(
            self.file,
            at.where,
            node.lineno,
            end_line,
            at.first,
            at.stop,
            at.names,
            span,
            text,
            " ".join(before.split()),
            " ".join(after.split()),
        )

    def block(self, body: Sequence[ast.stmt], at: _At) -> Iterator[Mutant]:
        """Statements of one level."""
        known = set()
        for node in body:
            if not _for_people(node):
                yield from self.statement(node, at, known)
            known |= {t.id for t in _targets(node) if isinstance(t, ast.Name)}

    def statement(self, node: ast.stmt, at: _At, known: set[str]) -> Iterator[Mutant]:
        """One statement and all that is in it."""
        inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
        stop = max(node.lineno, inner[0].lineno - 1) if inner else node.end_lineno or node.lineno
        names = () if at.inside else (*at.names, *_defined(node)) or (MODULE,)
        at = _At(at.where, names, node.lineno, stop, at.inside)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for default in [*node.args.defaults, *node.args.kw_defaults]:
                if default is not None:
                    yield from self.expression(default, at)
            yield from self.block(node.body, _At(_dotted(at.where, node.name), (), 0, 0, True))
            return
        if isinstance(node, ast.ClassDef):
            yield from self.block(
                node.body, _At(_dotted(at.where, node.name), names, 0, 0, at.inside)
            )
            return
        for text in _other_statements(node, known):
            yield self.made(node, text, at)
        if isinstance(node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom):
            return
        if isinstance(node, ast.If | ast.While):
            yield self.made(node.test, f"not ({ast.unparse(node.test)})", at)
        for name, value in ast.iter_fields(node):
            if name == "annotation":
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.expr):
                    yield from self.expression(child, at)
                elif isinstance(child, ast.withitem):
                    yield from self.expression(child.context_expr, at)
                elif isinstance(child, ast.ExceptHandler | ast.match_case):
                    yield from self.block(child.body, at)
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield from self.block(value, at)

    def expression(self, node: ast.expr, at: _At) -> Iterator[Mutant]:
        """One expression and all that is in it."""
        if isinstance(node, ast.JoinedStr) or _wording(node):
            return
        for other in _other_expressions(node):
            yield self.made(node, ast.unparse(other), at)
        if isinstance(node, ast.Slice):
            for bound in (node.lower, node.upper):
                # a constant changes by itself
                if bound is not None and not isinstance(bound, ast.Constant):
                    yield self.made(bound, f"({ast.unparse(bound)}) + 1", at)
        if isinstance(node, ast.Lambda):
            yield from self.expression(node.body, _At(at.where, (), at.first, at.stop, True))
            return
        types = (
            node.args[:1] if isinstance(node, ast.Call) and _name_of(node.func) == "cast" else ()
        )
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.comprehension):
                for test in child.ifs:
                    yield self.made(test, f"not ({ast.unparse(test)})", at)
                for part in (child.iter, *child.ifs):
                    yield from self.expression(part, at)
            elif isinstance(child, ast.keyword):
                # ``strict`` of zip states what always holds.
                if child.arg != "strict":
                    yield from self.expression(child.value, at)
            elif isinstance(child, ast.expr) and child not in types:
                yield from self.expression(child, at)


def _other_statements(node: ast.stmt, known: set[str]) -> Iterator[str]:
    """Texts that may stand for a whole statement; ``known`` are names that have a value already."""
    calls = (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not _wording(node.value)
    )
    if isinstance(node, ast.Raise | ast.Delete) or calls:
        yield "pass"
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        # Without the first value of a name, whatever reads the name would fail.
        first = {t.id for t in _targets(node) if isinstance(t, ast.Name)} - known
        others = any(not isinstance(t, ast.Name) for t in _targets(node))
        if node.value is not None and (others or not first):
            yield "pass"
    elif isinstance(node, ast.AugAssign):
        yield "pass"
        if (other := COMPUTED.get(type(node.op))) is not None:
            yield ast.unparse(ast.AugAssign(node.target, other(), node.value))
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield "return None"
    elif isinstance(node, ast.Continue):
        yield from ("break", "pass")
    elif isinstance(node, ast.Break):
        yield from ("continue", "pass")


def _other_expressions(node: ast.expr) -> Iterator[ast.expr]:
    """Expressions that may stand for this one."""
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            for kind in COMPARED[type(op)]:
                yield _with(node, ops=[*node.ops[:i], kind(), *node.ops[i + 1 :]])
    elif isinstance(node, ast.BinOp):
        other = COMPUTED.get(type(node.op))
        if other is not None and not _text_or_list(node.left) and not _text_or_list(node.right):
            yield _with(node, op=other())
    elif isinstance(node, ast.BoolOp):
        yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        for i in range(len(node.values)):
            rest = node.values[:i] + node.values[i + 1 :]
            yield _with(node, values=rest) if len(rest) > 1 else rest[0]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.Invert):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield _with(node, test=ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.Constant):
        yield from (ast.Constant(value) for value in _other_values(node.value))
    elif isinstance(node, ast.Call):
        yield from _other_calls(node)


def _other_values(value: object) -> Iterator[object]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield value + 1
        if value > 0:
            yield value - 1
    elif isinstance(value, float):
        yield 1.0 if value == 0 else value * (1000 if value <= TINY else 1.5)


def _other_calls(node: ast.Call) -> Iterator[ast.expr]:
    func = node.func
    if isinstance(func, ast.Attribute) and func.attr in CALLED:
        yield _with(node, func=_with(func, attr=CALLED[func.attr]))
    if isinstance(func, ast.Name) and func.id in BUILT_IN:
        yield _with(node, func=_with(func, id=CALLED[func.id]))
    if isinstance(func, ast.Name) and func.id in {"abs", "sorted", "reversed"} and node.args:
        yield ast.Call(ast.Name("list"), node.args[:1], []) if func.id != "abs" else node.args[0]
    largest = isinstance(func, ast.Name) and func.id in {"min", "max"}
    commutes = (
        (largest or _name_of(func) in EITHER_WAY) and len(node.args) == 2 and not node.keywords
    )
    for i, (a, b) in enumerate(() if commutes else zip(node.args, node.args[1:], strict=False)):
        if (
            not isinstance(a, ast.Starred)
            and not isinstance(b, ast.Starred)
            and ast.dump(a) != ast.dump(b)
        ):
            yield _with(node, args=[*node.args[:i], b, a, *node.args[i + 2 :]])
    for keyword in node.keywords:
        if keyword.arg not in (None, "strict") and not _is_text(keyword.value):
            yield _with(node, keywords=[k for k in node.keywords if k is not keyword])


def _for_people(node: ast.stmt) -> bool:
    """Whether a statement is only for a reader or a type checker."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or _wording(node.value)
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in (text := ast.unparse(node.test)) or "__name__" in text
    if isinstance(node, ast.FunctionDef):
        return node.name in ("__repr__", "__str__", "_repr_html_") or any(
            _name_of(d) == "overload" for d in node.decorator_list
        )
    if isinstance(node, ast.ClassDef):
        return any(_name_of(base) == "Protocol" for base in node.bases)
    if isinstance(node, ast.Assign):  # a type alias, and what the module lists of itself
        alias = isinstance(node.value, ast.Subscript) and _name_of(node.value.value) in GENERIC
        return alias or any(isinstance(t, ast.Name) and t.id.startswith("__") for t in node.targets)
    return False


def _wording(node: ast.expr) -> bool:
    """A call that says something to a person, makes an error, or declares a type."""
    name = _name_of(node.func) if isinstance(node, ast.Call) else ""
    return name in WORDS or name.endswith(("Error", "Exception"))


def _name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Call | ast.Subscript):
        return _name_of(node.func if isinstance(node, ast.Call) else node.value)
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    return ""


def _targets(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return [e for t in node.targets for e in (t.elts if isinstance(t, ast.Tuple) else [t])]
    if isinstance(node, ast.AnnAssign | ast.AugAssign):
        return [node.target]
    return []


def _defined(node: ast.stmt) -> tuple[str, ...]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return (node.name,)
    return tuple(t.id for t in _targets(node) if isinstance(t, ast.Name))


def _dotted(where: str, name: str) -> str:
    if where:
        return f"{where}.{name}"
    return name


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _text_or_list(node: ast.expr) -> bool:
    """What cannot be computed with: another operator would fail on any input, and show nothing."""
    return _is_text(node) or _is_none(node) or isinstance(node, ast.List | ast.Tuple | ast.Dict)


def _with(node: ast.expr, **fields: object) -> ast.expr:
    made = copy.copy(node)
    for name, value in fields.items():
        setattr(made, name, value)
    return made
