r"""Track the values of shell variables and expand words, without running the script.

The value of an expansion such as ``$SLURM_NODEID`` or ``$(date)`` is only known on the cluster.
In expanded text, a *mark* stands for such a value: the number of an :class:`Unknown` between two private-use
Unicode characters. Rules can therefore recognise ``--node_rank=$SLURM_NODEID`` after any number of
assignments, while an escaped ``\$SLURM_NODEID`` is plain text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from .syntax import Node, Part, Pipeline, Simple, Word

_OPEN, _CLOSE = "\ue000", "\ue001"
MARK = re.compile(f"{_OPEN}(\\d+){_CLOSE}")
_PRIVATE = re.compile(f"[{_OPEN}{_CLOSE}]")
_SUBSCRIPTED = re.compile(r"([A-Za-z_]\w*)\[(.*)\]\Z", re.DOTALL)
_RUNS_TEXT = re.compile(r"-[a-z]*c\Z")
#: The names in ``$@`` and ``${name[@]}``, which give several words even within quotes.
_ALL = re.compile(r"(?:\w+\[)?@\]?\Z")
_BARE_NAME = re.compile(r"(?<![\w#$.])[A-Za-z_]\w*")
_DEFAULTING = frozenset({":-", "-", ":=", "=", ":?", "?"})
#: Longer values are treated as unknown.
MAX_VALUE = 20_000
_MAX_UNKNOWNS = 5_000
_MAX_WORDS = 2_000


def without_marks(text: str) -> str:
    """Replace the two characters that are reserved for marks, which stand for unknown values."""
    return _PRIVATE.sub("\ufffd", text)


class Unknown(NamedTuple):
    """An expansion whose value is only known on the cluster; ``source`` is its text in the script.

    ``kind`` is ``param`` (``$name``), ``command`` (``$(date)``) or ``arith`` (``$((1 + x))``).
    ``default`` is the default in ``${name:-default}``; for ``arith``, ``default`` is the expression with
    its variables expanded. ``in_task`` is True if the shell of a task that srun starts makes the
    expansion, and False if the batch shell makes it. ``origin`` is the text from which the value is computed:
    the value of ``name`` in ``${name%% *}``, or the text in ``$(echo "$hosts" | head -n 1)``.
    """

    kind: str
    name: str
    source: str
    line: int
    op: str = ""
    default: str | None = None
    in_task: bool = False
    origin: str = ""


class Value(NamedTuple):
    """A text; ``lines`` contains the script line number of each row of the text."""

    text: str
    lines: tuple[int, ...]

    @property
    def line(self) -> int:
        """The line of the script on which the text starts."""
        return self.lines[0]

    def words(self) -> Iterator[Value]:
        """Split the text at blanks and yield each word with its line."""
        for number, row in enumerate(self.text.split("\n")):
            line = self.lines[min(number, len(self.lines) - 1)]
            for piece in row.split():
                if piece != "\\":
                    yield Value(piece, (line,))


#: The branches around a command, outermost first: pairs of (number of the ``if`` or ``case``, branch index).
Branches = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Assigned:
    """One assignment to a variable.

    ``items`` are the elements of an array. ``value`` and ``items`` are both None if the value is unknown.
    ``looped`` is True for the variable of a ``for`` loop, and ``choices`` are its values. ``in_task`` is
    True for an assignment in the shell of a task that srun starts. ``quoted`` is True for an array whose
    only element is one quoted expansion.
    """

    name: str
    line: int
    value: Value | None = None
    items: tuple[Value, ...] | None = None
    exported: bool = False
    branches: Branches = ()
    looped: bool = False
    in_task: bool = False
    quoted: bool = False
    choices: tuple[Value, ...] = ()


class Unknowns:
    """The unknown expansions of one script; in texts, a mark with its index stands for each one."""

    def __init__(self) -> None:
        self._all: list[Unknown] = []

    def mark(self, unknown: Unknown) -> str:
        """Store an unknown expansion and return the placeholder (mark) that stands for it in a text."""
        if len(self._all) < _MAX_UNKNOWNS:
            self._all.append(unknown)
        return f"{_OPEN}{len(self._all) - 1}{_CLOSE}"

    def __iter__(self) -> Iterator[Unknown]:
        """Iterate over all unknown expansions of the script."""
        return iter(self._all)

    def of(self, text: str) -> list[Unknown]:
        """Return the unknown expansions in ``text``, except expansions nested in other expansions."""
        if _OPEN not in text:
            return []
        return [self._all[int(number)] for number in MARK.findall(text) if int(number) < len(self._all)]

    def within(self, text: str, *, depth: int = 0) -> list[Unknown]:
        """Return the unknown expansions in ``text``, also expansions nested in arithmetic and defaults."""
        found = self.of(text)
        if depth < 6:
            found += [inner for one in found for inner in self.within(one.default or "", depth=depth + 1)]
        return found

    def behind(self, text: str, *, depth: int = 0) -> list[Unknown]:
        """Return the first unknown expansion in ``text``, and those from which its value is computed."""
        found = self.of(text)[:1]
        return found + self.behind(found[0].origin, depth=depth + 1) if found and depth < 6 else found

    def shown(self, text: str) -> str:
        """Return ``text`` with each placeholder (mark) replaced by the expansion as written in the script."""
        return MARK.sub(lambda match: self._source(int(match.group(1))), text).replace("\\\n", "")

    def _source(self, number: int) -> str:
        return self._all[number].source if number < len(self._all) else "$?"


@dataclass(slots=True)
class Environment:
    """The variables of a shell: all assignments so far, in execution order."""

    variables: dict[str, list[Assigned]] = field(default_factory=dict)

    def assign(self, assigned: Assigned) -> None:
        """Record an assignment; if it is unconditional, it replaces the variable's earlier assignments."""
        history = self.variables.setdefault(assigned.name, [])
        exported = assigned.exported or any(earlier.exported for earlier in history)
        if exported:
            assigned = replace(assigned, exported=True)
        if not assigned.branches:
            history.clear()
        elif len(history) > 20:
            del history[0]
        history.append(assigned)

    def candidates(self, name: str, branches: Branches) -> list[Assigned]:
        """Return the assignments that may determine the value of ``name``, newest first."""
        found: list[Assigned] = []
        here = dict(branches)
        for assigned in reversed(self.variables.get(name, ())):
            if any(here.get(identity, index) != index for identity, index in assigned.branches):
                continue  # in another branch of an `if` around the current command
            found.append(assigned)
            if all(identity in here for identity, _ in assigned.branches):
                break  # certainly executed, so this assignment replaced all older ones
        return found

    def exported(self, name: str) -> bool:
        """Return whether ``name`` is in the environment of the tasks that srun starts."""
        return any(assigned.exported for assigned in self.variables.get(name, ()))


class _WordBuilder:
    """Collect the pieces of one word."""

    __slots__ = ("lines", "size", "texts", "touched")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.size = 0
        self.lines: list[int] = []
        self.touched = False

    def add(self, text: str, lines: tuple[int, ...]) -> None:
        """Append ``text``; ``lines`` contains the script line number of each row of ``text``."""
        self.touched = True
        if not self.lines:
            self.lines.append(lines[0])
        self.size += len(text)
        if "\n" in text:
            rows = text.count("\n")
            follow = lines[1 : rows + 1]
            self.lines.extend(follow)
            self.lines.extend([self.lines[-1]] * (rows - len(follow)))
        self.texts.append(text)

    def value(self) -> Value:
        """Return the complete word."""
        return Value("".join(self.texts), tuple(self.lines) or (0,))


class Expander:
    """Expand words with the values of an environment.

    ``used(part, name, guarded)`` is called for each expanded variable; ``guarded`` is True if the
    variable may be unset, as in ``${name:-}``. ``ran(commands)`` is called for each command substitution, and
    returns its output if that is known. ``split`` contains each ``"$@"`` within a text for ``bash -c``.
    """

    def __init__(
        self,
        environment: Environment,
        unknowns: Unknowns,
        used: Callable[[Part, str, bool], None],
        ran: Callable[[tuple[Node, ...]], Value | None],
    ) -> None:
        self.environment = environment
        self.unknowns = unknowns
        self.branches: Branches = ()
        self.in_task = False
        self.split: list[Part] = []
        self._used = used
        self._ran = ran

    def arguments(self, words: Iterable[Word]) -> list[Value]:
        """Expand and split ``words`` like the shell, and return the resulting arguments."""
        arguments: list[Value] = []
        before = ""
        for word in words:
            inside = len(word.parts) > 1 and _RUNS_TEXT.match(before)
            self.split += [part for part in word.parts if inside and _gives_words(part)]
            before = word.literal or ""
            arguments.extend(self._split(word.parts, word.line))
            if len(arguments) > _MAX_WORDS:
                break
        return arguments

    def value(self, word: Word) -> Value:
        """Expand a word without splitting it, as the shell does in an assignment."""
        return self.text(word.parts, word.line)

    def text(self, parts: tuple[Part, ...], line: int) -> Value:
        """Expand ``parts`` and join them to one text."""
        word = _WordBuilder()
        for part in parts:
            if part.kind == "text":
                word.add(part.text, _lines_of(part))
            else:
                known = self._known(part)
                if word.size > MAX_VALUE:
                    continue  # too long: a value may double with each assignment
                for position, value in enumerate(known or [self._unknown(part)]):
                    if position:
                        word.add(" ", (value.line,))
                    word.add(value.text, value.lines)
        value = word.value()
        return Value(value.text, value.lines if word.touched else (line,))

    def items(self, word: Word) -> tuple[Value, ...]:
        """Return the expanded elements of an array literal."""
        array = word.parts[0]
        return tuple(self.arguments(array.words))

    def _split(self, parts: tuple[Part, ...], line: int) -> list[Value]:
        if len(parts) == 1 and parts[0].kind == "text":
            return [Value(parts[0].text, _lines_of(parts[0]))]
        words: list[_WordBuilder] = []
        word = _WordBuilder()
        for part in parts:
            if part.kind == "text":
                word.add(part.text, _lines_of(part))
                continue
            known = self._known(part)
            if word.size > MAX_VALUE or len(words) > _MAX_WORDS:
                continue
            if known is None:
                unknown = self._unknown(part)
                word.add(unknown.text, unknown.lines)
                continue
            pieces = known if part.quoted else [piece for value in known for piece in value.words()]
            splits = not part.quoted
            joined = part.quoted and part.text.endswith(("*", "[*]"))
            for position, value in enumerate(pieces):
                if position and joined:
                    word.add(" ", (value.line,))
                elif position or (splits and known[0].text[:1].isspace() and word.touched):
                    words.append(word)
                    word = _WordBuilder()
                word.add(value.text, value.lines)
            if splits and pieces and known[-1].text[-1:].isspace():
                words.append(word)
                word = _WordBuilder()
        words.append(word)
        return [word.value() for word in words if word.touched]

    def _known(self, part: Part) -> list[Value] | None:
        """Record that the variable in a part is used; return its values, or None if they are unknown."""
        if part.kind == "command":
            text = _here_document_of_cat(part)
            return None if text is None else [self.value(text)]
        if part.kind != "param":
            return None
        name, op = part.text, part.op
        subscript = _SUBSCRIPTED.match(name)
        base = subscript.group(1) if subscript else name.lstrip("#!")
        guarded = op in _DEFAULTING or op in (":+", "+") or name.startswith(("#", "!"))
        self._used(part, base, guarded)
        if name.startswith(("#", "!")):
            return None
        candidates = self.environment.candidates(base, self.branches)
        if op in (":=", "=") and not candidates:
            default = self.text(part.operand, part.line)
            self.environment.assign(Assigned(base, part.line, default, branches=self.branches))
        is_default = op in _DEFAULTING and candidates and self._is_output(candidates[0])
        is_brace = op in _DEFAULTING and any(piece.text.startswith("{") for piece in part.operand[:1])
        if (
            not candidates
            or (op and op not in _DEFAULTING)
            or is_brace
            or is_default
            or self._differs(candidates)
        ):
            return None
        return _element(candidates[0], subscript.group(2) if subscript else None)

    def _is_output(self, assigned: Assigned) -> bool:
        """Return whether a value is the output of a command, which is possibly empty."""
        text = assigned.value.text if assigned.value else ""
        return bool(MARK.fullmatch(text)) and self.unknowns.of(text)[0].kind == "command"

    def _differs(self, candidates: list[Assigned]) -> bool:
        """Return whether the value is unknown, because ``candidates`` in branches assign different words.

        If the newest value is an option or several words, it is assumed, and the result is False.
        """
        here = {identity for identity, _ in self.branches}
        newest = candidates[0]
        if newest.value is None or all(identity in here for identity, _ in newest.branches):
            return False
        text = newest.value.text
        if text.startswith("-") or len(text.split()) > 1 or MARK.search(text):
            return False
        always = all(identity in here for identity, _ in candidates[-1].branches)
        return not always or any(one.value is None or one.value.text != text for one in candidates)

    def _unknown(self, part: Part) -> Value:
        """Return a placeholder (mark) for a part of a word with an unknown value, or a function's output."""
        calculated = _calculated(part)
        output = self._ran(part.body) if part.body and not calculated else None
        if output is not None and part.kind == "command":
            return output
        kind, default = part.kind, None
        if calculated:
            kind, default = "arith", " ".join(self.value(word).text for word in calculated)
        elif part.kind == "arith":
            default = self.expression(self.text(part.operand, part.line).text, part.line)
        elif part.op in _DEFAULTING:
            default = self.text(part.operand, part.line).text
        elif part.kind == "param":
            self.text(part.operand, part.line)  # records that variables in the operand are used
        source = _source_of(part)
        name = part.text if part.kind == "param" else ""
        base = name.partition("[")[0].lstrip("#!")
        origin = self._origin(part, base)[:400]
        unknown = Unknown(kind, base, source, part.line, part.op, default, self.in_task, origin)
        return Value(self.unknowns.mark(unknown), (part.line,))

    def _origin(self, part: Part, name: str) -> str:
        """Return the text from which an expansion is computed, or an empty string."""
        if part.kind == "param":
            known = self.environment.candidates(name, self.branches)
            if not known or self._differs(known):
                return ""
            if known[0].items is not None:
                return known[0].items[0].text if known[0].items and part.text[:1] != "#" else ""
            return known[0].value.text if known[0].value else ""
        first = part.body[0] if part.body else None
        first = first.commands[0] if isinstance(first, Pipeline) else first
        if not isinstance(first, Simple) or not first.words:
            return ""
        given = first.words[1:] if first.words[0].literal in ("echo", "printf") else ()
        given += tuple(redirect.target for redirect in first.redirects if redirect.operator == "<<<")
        return " ".join(self.value(word).text for word in given)

    def expression(self, text: str, line: int) -> str:
        """Replace variables without ``$`` in an arithmetic expression by their values or marks."""

        def resolve(match: re.Match[str]) -> str:
            name = match.group()
            known = self._known(Part("param", name, line))
            if known:
                return known[0].text
            return self.unknowns.mark(Unknown("param", name, name, line, in_task=self.in_task))

        return _BARE_NAME.sub(resolve, text) if len(text) < 2_000 else text


def _gives_words(part: Part) -> bool:
    """Return whether a part is ``$@`` or ``${name[@]}`` within quotes."""
    return part.kind == "param" and part.quoted and bool(_ALL.match(part.text))


def _calculated(part: Part) -> tuple[Word, ...]:
    """Return the expression in ``$(expr ...)`` or ``$(echo ... | bc)``, or an empty tuple."""
    only = part.body[0] if len(part.body) == 1 and part.kind == "command" else None
    if isinstance(only, Pipeline) and len(only.commands) == 2:
        only, last = only.commands
        is_calculator = isinstance(last, Simple) and last.words and last.words[0].literal == "bc"
        command = "echo" if is_calculator else ""
    else:
        command = "expr"
    is_expression = isinstance(only, Simple) and len(only.words) > 1 and only.words[0].literal == command
    return only.words[1:] if isinstance(only, Simple) and is_expression else ()


def _here_document_of_cat(part: Part) -> Word | None:
    """Return the here-document of ``$(cat <<EOF ...)``, or None for other commands."""
    only = part.body[0] if len(part.body) == 1 else None
    if not isinstance(only, Simple) or len(only.words) != 1 or only.words[0].literal != "cat":
        return None
    return only.redirects[0].body if len(only.redirects) == 1 else None


def _element(assigned: Assigned, subscript: str | None) -> list[Value] | None:
    """Return the values of ``$name`` or ``${name[subscript]}``, or None if they are unknown."""
    if assigned.items is not None:
        items = list(assigned.items)
        if subscript in ("@", "*") or assigned.name == "@":
            return items
        position = int(subscript) if subscript and subscript.isdecimal() and len(subscript) < 6 else 0
        if subscript is not None and not subscript.isdecimal():
            return None
        certain = not any(_OPEN in item.text for item in items[: position + 1])  # may be several elements
        return [items[position]] if position < len(items) and certain else None
    if (
        assigned.value is None
        or len(assigned.value.text) > MAX_VALUE
        or subscript not in (None, "0", "@", "*")
    ):
        return None
    return [assigned.value]


def _lines_of(part: Part) -> tuple[int, ...]:
    rows = part.text.count("\n")
    return tuple(range(part.line, part.line + rows + 1)) if rows else (part.line,)


def _source_of(part: Part) -> str:
    """Return a part of a word as written in the script."""
    if part.kind == "arith":
        return f"$(({part.text}))"
    if part.kind in ("command", "process"):
        return f"$({part.text})" if part.kind == "command" else "<(...)"
    operand = "".join(piece.text if piece.kind == "text" else _source_of(piece) for piece in part.operand)
    if part.op or "[" in part.text or part.text[:1] in ("#", "!"):
        return f"${{{part.text}{part.op}{operand}}}"
    return f"${part.text}"
