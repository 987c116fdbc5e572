"""Checks data read from JSON files: every field is present and has its type and range, and the hash matches."""

import json
import re
from collections.abc import Mapping
from typing import Any

import xxhash

Form = Any
"""The form of a value: see `check`."""
_HASH = "hash"


def hash_of(content: Any) -> str:
    """The hash of a value of JSON's types. The order of the keys of objects does not change it."""
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())


class FormError(ValueError):
    """A value does not have its form. The message says which value, and what it should be."""


def with_hash(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a JSON file in JSON's types, together with its hash. `whole` reads it."""
    plain = json.loads(json.dumps(content))
    return {**plain, _HASH: hash_of(plain)}


def whole(file: bytes) -> dict[str, Any]:
    """The content of a JSON file to which `with_hash` gave its hash. Raises FormError if it was edited or damaged."""
    try:
        content: dict[str, Any] = dict(json.loads(file))
        if content.pop(_HASH, None) == hash_of(content):
            return content
    except (ValueError, TypeError, RecursionError) as error:  # not an object, or nested too deeply
        raise FormError(f"it is not JSON with a hash: {error}") from error
    raise FormError("its hash does not match its content")


def check(value: Any, form: Form, where: str = "it") -> None:
    """Raises FormError if a value read from JSON does not have the given form.

    A form is one of: `int` (a count: 0 to 2**63 - 1), another type, `object` (anything), a regular expression that must
    match the whole string, `[form]` (a list), `(form, ...)` (a list of exactly these), `{str: form}` (any names),
    `{name: form, ...}` (exactly these names), or a function that returns whether the value is valid; its docstring says
    what is.
    """
    match form:
        case re.Pattern():
            right = isinstance(value, str) and form.fullmatch(value) is not None
            _expect(right, value, where, f"text of the form {form.pattern}")
        case [inner]:
            _expect(isinstance(value, list), value, where, "a list")
            for index, item in enumerate(value):
                check(item, inner, f"{where}[{index}]")
        case tuple():
            right = isinstance(value, list) and len(value) == len(form)
            _expect(right, value, where, f"a list of {len(form)}")
            for index, (item, inner) in enumerate(zip(value, form, strict=True)):
                check(item, inner, f"{where}[{index}]")
        case dict():
            _expect(isinstance(value, dict), value, where, "an object")
            for problem, names in (("lacks", form.keys() - value.keys()), ("has", value.keys() - form.keys())):
                if names and str not in form:
                    raise FormError(f"{where} {problem} {', '.join(map(repr, sorted(names)))}"[:200])
            for name, item in value.items():
                check(item, form[name] if str not in form else form[str], f"{where}.{name}")
        case _ if form is int:
            _expect(type(value) is int and 0 <= value < 1 << 63, value, where, "a count")
        case type():
            _expect(isinstance(value, form), value, where, f"of type {form.__name__}")
        case _:
            _expect(form(value), value, where, form.__doc__.partition("\n")[0].rstrip("."))


def _expect(right: bool, value: Any, where: str, wanted: str) -> None:
    if not right:
        shown = repr(value)
        raise FormError(f"{where} is {shown if len(shown) <= 80 else shown[:80] + '...'}, but should be {wanted}")
