"""From the words of a command to its arguments, as far as the script itself tells them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from bench.lint.environment import MAX_VALUE, Assigned, Branches, Environment, Unknown, Unknowns, Value
from bench.lint.nodes import Node, Part, Simple, Word

_SUBSCRIPTED = re.compile(r"([A-Za-z_]\w*)\[(.*)\]\Z", re.DOTALL)
_BARE_NAME = re.compile(r"(?<![\w#$.])[A-Za-z_]\w*")
_DEFAULTING = frozenset({":-", "-", ":=", "=", ":?", "?"})
_MOST_WORDS = 2_000


class _Field:
    """A word in the making."""

    __slots__ = ("lines", "size", "texts", "touched")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.size = 0
        self.lines: list[int] = []
        self.touched = False

    def add(self, text: str, lines: tuple[int, ...]) -> None:
        """Append ``text``, whose rows come from ``lines``."""
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
        """Return the finished word."""
        return Value("".join(self.texts), tuple(self.lines) or (0,))


class Expander:
    """Expand words with what an environment knows.

    ``used`` is called for each variable that is expanded (the part, the variable's name, whether
    it may be unset), ``ran`` with the commands of each substitution.
    """

    def __init__(
        self,
        environment: Environment,
        unknowns: Unknowns,
        used: Callable[[Part, str, bool], None],
        ran: Callable[[tuple[Node, ...]], None],
    ) -> None:
        self.environment = environment
        self.unknowns = unknowns
        self.branches: Branches = ()
        self.in_task = False
        self._used = used
        self._ran = ran

    def arguments(self, words: Iterable[Word]) -> list[Value]:
        """Return the arguments that ``words`` become, after splitting."""
        arguments: list[Value] = []
        for word in words:
            arguments.extend(self._fields(word.parts, word.line))
            if len(arguments) > _MOST_WORDS:
                break
        return arguments

    def value(self, word: Word) -> Value:
        """Return what an assignment stores: the word's text without splitting."""
        return self.text(word.parts, word.line)

    def text(self, parts: tuple[Part, ...], line: int) -> Value:
        """Return the joined text of ``parts``."""
        field = _Field()
        for part in parts:
            if part.kind == "text":
                field.add(part.text, _rows(part))
            else:
                known = self._known(part)
                if field.size > MAX_VALUE:
                    continue  # a value that doubles with each assignment must not
                for position, value in enumerate(known or [self._unknown(part)]):
                    if position:
                        field.add(" ", (value.line,))
                    field.add(value.text, value.lines)
        value = field.value()
        return Value(value.text, value.lines if field.touched else (line,))

    def items(self, word: Word) -> tuple[Value, ...]:
        """Return the elements of an array's value."""
        array = word.parts[0]
        return tuple(self.arguments(array.words))

    def _fields(self, parts: tuple[Part, ...], line: int) -> list[Value]:
        if len(parts) == 1 and parts[0].kind == "text":
            return [Value(parts[0].text, _rows(parts[0]))]
        fields: list[_Field] = []
        field = _Field()
        for part in parts:
            if part.kind == "text":
                field.add(part.text, _rows(part))
                continue
            known = self._known(part)
            if field.size > MAX_VALUE or len(fields) > _MOST_WORDS:
                continue
            if known is None:
                unknown = self._unknown(part)
                field.add(unknown.text, unknown.lines)
                continue
            pieces = known if part.quoted else [piece for value in known for piece in value.words()]
            splits = not part.quoted
            for position, value in enumerate(pieces):
                if position or (splits and _starts_blank(known) and field.touched):
                    fields.append(field)
                    field = _Field()
                field.add(value.text, value.lines)
            if splits and pieces and _ends_blank(known):
                fields.append(field)
                field = _Field()
        fields.append(field)
        return [field.value() for field in fields if field.touched]

    def _known(self, part: Part) -> list[Value] | None:
        """Return what a part expands to, or None where that is unknown; notes the variable's use."""
        if part.kind == "command":
            text = _shown_by_cat(part)
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
        if not candidates or (op and op not in _DEFAULTING):
            return None
        return _element(candidates[0], subscript.group(2) if subscript else None)

    def _unknown(self, part: Part) -> Value:
        """Return the mark of a part whose value is not known."""
        if part.body:
            self._ran(part.body)
        default = None
        if part.kind == "arith":
            default = self._expression(self.text(part.operand, part.line).text, part)
        elif part.op in _DEFAULTING:
            default = self.text(part.operand, part.line).text
        elif part.kind == "param":
            self.text(part.operand, part.line)  # its own variables are used, too
        source = _source_of(part)
        name = part.text if part.kind == "param" else ""
        base = name.partition("[")[0].lstrip("#!")
        unknown = Unknown(part.kind, base, source, part.line, part.op, default, part.body, self.in_task)
        return Value(self.unknowns.mark(unknown), (part.line,))

    def _expression(self, text: str, part: Part) -> str:
        """Return arithmetic with the values, or marks, of the variables that it names without ``$``."""

        def resolve(match: re.Match[str]) -> str:
            name = match.group()
            known = self._known(part._replace(kind="param", text=name, operand=()))
            if known:
                return known[0].text
            return self.unknowns.mark(Unknown("param", name, name, part.line, in_task=self.in_task))

        return _BARE_NAME.sub(resolve, text) if len(text) < 2_000 else text


def _shown_by_cat(part: Part) -> Word | None:
    """Return the here-document of ``$(cat <<EOF ...)``, whose text is known."""
    only = part.body[0] if len(part.body) == 1 else None
    if not isinstance(only, Simple) or len(only.words) != 1 or only.words[0].literal != "cat":
        return None
    return only.redirects[0].body if len(only.redirects) == 1 else None


def _element(assigned: Assigned, subscript: str | None) -> list[Value] | None:
    """Return what of a variable's value ``$name`` or ``${name[subscript]}`` means."""
    if assigned.items is not None:
        items = list(assigned.items)
        if subscript in ("@", "*"):
            return items
        position = int(subscript) if subscript and subscript.isdecimal() and len(subscript) < 6 else 0
        if subscript is not None and not subscript.isdecimal():
            return None
        return [items[position]] if position < len(items) and not _uncertain(items[: position + 1]) else None
    if (
        assigned.value is None
        or len(assigned.value.text) > MAX_VALUE
        or subscript not in (None, "0", "@", "*")
    ):
        return None
    return [assigned.value]


def _uncertain(items: list[Value]) -> bool:
    """Return whether an unknown among ``items`` may be several words, which moves what follows."""
    return any("\ue000" in item.text for item in items)


def _rows(part: Part) -> tuple[int, ...]:
    rows = part.text.count("\n")
    return tuple(range(part.line, part.line + rows + 1)) if rows else (part.line,)


def _starts_blank(values: list[Value]) -> bool:
    return bool(values) and values[0].text[:1] in (" ", "\t", "\n")


def _ends_blank(values: list[Value]) -> bool:
    return bool(values) and values[-1].text[-1:] in (" ", "\t", "\n")


def _source_of(part: Part) -> str:
    """Return a part as it is written."""
    if part.kind == "arith":
        return f"$(({part.text}))"
    if part.kind in ("command", "process"):
        return f"$({part.text})" if part.kind == "command" else "<(...)"
    operand = "".join(piece.text if piece.kind == "text" else _source_of(piece) for piece in part.operand)
    if part.op or "[" in part.text or part.text[:1] in ("#", "!"):
        return f"${{{part.text}{part.op}{operand}}}"
    return f"${part.text}"
