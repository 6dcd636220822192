"""Faults of YAML that does not match its model: a line for each fault, with its place and what to do."""

from __future__ import annotations

import copy
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from builder.common.errors import BuilderError, MatrixError, did_you_mean
from builder.common.strict_yaml import Key, Located
from builder.common.text import Redactor

MAX_FAULTS = 20
KEY = "[key]"  # pydantic's last part of the place of a key
_OWN: Final = "fault"  # the kind of the faults of `raise_faults`
_Model = TypeVar("_Model", bound=BaseModel)


def validate(located: Located, model: type[_Model], error: type[BuilderError] = MatrixError, hint: str = "") -> _Model:
    """Parsed YAML as a model. Raises `error` with every fault and its place."""
    try:
        return model.model_validate(located.data)
    except ValidationError as invalid:
        lines = list(dict.fromkeys(_explain(dict(item), model, located) for item in invalid.errors(include_url=False)))
        rest = [f"... and {len(lines) - MAX_FAULTS} more"] if len(lines) > MAX_FAULTS else []
        raise error("\n".join(lines[:MAX_FAULTS] + rest), hint=hint) from None


def raise_faults(faults: Iterable[tuple[Key, str]]) -> None:
    """Raises a ValidationError with these faults, if there are any. For validators of models.

    A fault is the path below the validated value, and the message.
    """
    details = [
        InitErrorDetails(type=PydanticCustomError(_OWN, "{text}", {"text": text}), loc=path, input=None)
        for path, text in faults
    ]
    if details:
        raise ValidationError.from_exception_data("faults", details)


def message_of(item: Mapping[str, object]) -> str:
    """The message of a fault that pydantic found, without pydantic's prefix for errors of our own validators."""
    return str(item["msg"]).removeprefix("Value error, ")


def _clip(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def _explain(item: dict[str, Any], model: type[BaseModel], located: Located) -> str:
    loc = tuple(item["loc"])
    is_key = loc[-1:] == (KEY,)
    path = loc[:-1] if is_key else loc
    label = ".".join(_clip(str(part)) for part in path)
    kind = item["type"]
    if not path and kind != _OWN:
        return f"{located.where(())}: expected `key: value` lines, found {value_text(item['input'])}"
    if kind == "missing":
        return f"{located.where(path[:-1])}: {label}: missing"
    if kind == "extra_forbidden":
        suggestion = did_you_mean(str(path[-1]), _keys(model, path[:-1]))
        return f"{located.where(path, key=True)}: {label}: unknown key{suggestion}"
    prefix = f"{located.where(path, key=is_key)}: {label}"
    if kind == _OWN:
        return f"{prefix}: {item['msg']}"
    typed = _clip(located.typed(path))
    value = value_text(item["input"])
    if kind == "string_type" and typed:
        return f"{prefix}: {typed} is read as {value}; {_advice(path, typed, model, located)}"
    if kind == "value_error":
        message = str(item["ctx"]["error"])
        return f"{prefix}: {message if message.startswith(value) else f'{value}: {message}'}"
    return f"{prefix}: {item['msg'][:1].lower()}{item['msg'][1:]}, found {value}"


def _advice(path: Key, typed: str, model: type[BaseModel], located: Located) -> str:
    """Advice on a value that YAML does not read as text: to quote it, if it is valid in quotes."""
    data = copy.deepcopy(located.data)
    parent = data
    for part in path[:-1]:
        parent = parent[part]
    parent[path[-1]] = typed
    try:
        model.model_validate(data)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            if tuple(item["loc"]) == path:
                return str(item.get("ctx", {}).get("error", item["msg"]))
    return f'quote it: "{typed}"'


def _keys(model: type[BaseModel], path: Key) -> list[str]:
    """The keys of the model at `path` below `model`."""
    current: Any = model
    for part in path:
        if isinstance(current, type) and issubclass(current, BaseModel):
            field = current.model_fields.get(str(part))
            current = field.annotation if field else None
        else:
            current = next(reversed(typing.get_args(current)), None)
        if isinstance(current, types.UnionType):
            current = typing.get_args(current)[0]
    return list(current.model_fields) if isinstance(current, type) and issubclass(current, BaseModel) else []


def value_text(value: object) -> str:
    """A value of YAML as text: "the number 3.1"."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return f"the truth value {str(value).lower()}"
    if isinstance(value, int) and abs(value) >= 10**60:  # Python refuses to print more than 4300 digits
        return "a huge number"
    if isinstance(value, int | float):
        return f"the number {_clip(str(value))}"
    if isinstance(value, str):
        return repr(_clip(Redactor()(value)))  # a password may be in an address
    return {"dict": "a mapping", "list": "a list"}.get(type(value).__name__, f"a {type(value).__name__}")
