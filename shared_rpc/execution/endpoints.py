"""Endpoints: their options, the binding of calls, and cache keys.

No function is needed here: a server that only holds records binds calls and finds cached results with the
:class:`EndpointSpec` alone.
"""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import inspect
import re
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import msgspec

from shared_rpc.errors import CapabilityError, ConfigurationError, EndpointNotFound, SignatureError
from shared_rpc.protocol.specs import EndpointSpec, Parameter
from shared_rpc.protocol.values import DtypeRef, canonical, lower

_NAME = re.compile(r"[A-Za-z_][\w.\-]{0,199}")
#: Characters of an unknown name shown in an error.
_SHOWN = 100
#: Longer keys are replaced by their digests.
KEY_LIMIT = 512


@dataclass(frozen=True)
class Endpoint:
    """A function and its spec."""

    spec: EndpointSpec
    function: Callable[..., Any]


def describe(function: Callable[..., Any], name: str | None = None, **options: Any) -> EndpointSpec:
    """Return the spec of a function.

    :raises TypeError: for an unknown option.
    :raises ConfigurationError: for a value an option does not allow, or a template with an unknown name.
    """
    chosen = name if name is not None else getattr(function, "__name__", "")
    if not _NAME.fullmatch(chosen):
        raise ConfigurationError(f"{chosen!r} cannot name an endpoint: use up to 200 letters, digits, '_', '.' and '-'")
    unknown = set(options) - _OPTIONS
    if unknown:
        raise TypeError(f"share() got an unexpected option {sorted(unknown)[0]!r}")
    parameters = tuple(_parameter(parameter) for parameter in inspect.signature(function).parameters.values())
    spec = EndpointSpec(
        name=chosen,
        parameters=parameters,
        is_async=inspect.iscoroutinefunction(function),
        doc=(inspect.getdoc(function) or "").partition("\n")[0],
        fingerprint=_fingerprint(function),
        **options,
    )
    for option, allowed in _ALLOWED.items():
        value = getattr(spec, option)
        # By type too: 1 is not True on the wire.
        if not any(type(value) is type(one) and value == one for one in allowed):
            raise ConfigurationError(f"endpoint {chosen!r}: {option}={value!r}; use {' or '.join(map(repr, allowed))}")
    ttl = spec.idle_ttl
    if ttl is not None and (type(ttl) not in (int, float) or not ttl >= 0):
        raise ConfigurationError(f"endpoint {chosen!r}: idle_ttl={ttl!r}; use seconds, or None for never")
    _check_template(spec)
    return spec


def _fingerprint(function: Callable[..., Any]) -> str:
    """Return a digest of a function's compiled code, independent of its position in the file and of the functions it calls."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return ""
    digest = hashlib.blake2b(digest_size=16)
    pending: list[Any] = [code]
    while pending:
        part = pending.pop()
        if isinstance(part, CodeType):
            digest.update(part.co_code)
            digest.update(repr((part.co_names, part.co_varnames, part.co_freevars)).encode())
            pending += part.co_consts
        else:
            digest.update(repr(sorted(part, key=repr) if isinstance(part, frozenset) else part).encode())
    return digest.hexdigest()


_ALLOWED: dict[str, tuple[object, ...]] = {
    "execution": ("direct", "task"),
    "concurrency": ("parallel", "serialized"),
    "access": ("read_write", "read"),
    "tensors": ("all", "parameters"),
    "cache": (True, False),
    "managed": (True, False),
    "singleflight": (True, False),
    "host_copy": ("on_evict", "never", "at_build"),
    "pinned": (False, True),
}
_OPTIONS = {*_ALLOWED, "cache_format_key", "idle_ttl"}


def _parameter(parameter: inspect.Parameter) -> Parameter:
    if parameter.default is inspect.Parameter.empty:
        variadic = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return Parameter(parameter.name, int(parameter.kind), required=not variadic)
    # A default that is not a plain value has no canonical text; its identity stands for it within one server.
    default = parameter.default
    try:
        known = canonical(lower(default, parameter.name, _dtype_by_name))
    except CapabilityError:
        known = None
    return Parameter(parameter.name, int(parameter.kind), required=False, default=known or f"<{default!r}>")


def _dtype_by_name(value: Any, path: str) -> Any:
    is_dtype = (type(value).__module__, type(value).__qualname__) == ("torch", "dtype")
    return DtypeRef(str(value).removeprefix("torch.")) if is_dtype else value


def _check_template(spec: EndpointSpec) -> None:
    if spec.cache_format_key is None:
        return
    names = {parameter.name for parameter in spec.parameters}
    open_ended = any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in spec.parameters)
    where = f"endpoint {spec.name!r}: cache_format_key={spec.cache_format_key!r}"
    if not isinstance(spec.cache_format_key, str):
        raise ConfigurationError(f"{where}; use a format string, or None")
    try:
        fields = list(_fields(spec.cache_format_key))
    except ValueError as error:
        raise ConfigurationError(f"{where} is not a format string: {error}") from error
    for name in fields:
        if not name or name.isdecimal():
            raise ConfigurationError(f"{where} has a field without a name: name the argument, as in '{{hidden_size}}'")
        if name not in names and not open_ended:
            raise ConfigurationError(
                f"{where} names {name!r}, which is none of its arguments ({', '.join(sorted(names)) or 'none'})"
            )


def _fields(template: str) -> Iterator[str]:
    """Yield the names in a template, including those in format specs (``{x:{width}}``).

    :raises ValueError: if the template is not a format string.
    """
    for _, field, spec, conversion in string.Formatter().parse(template):
        if field is not None:
            if conversion not in (None, "r", "s", "a"):
                raise ValueError(f"unknown conversion {conversion!r}, use 'r', 's' or 'a'")
            yield re.split(r"[.\[]", field, maxsplit=1)[0]
            yield from _fields(spec or "")


#: The enumeration of parameter kinds, sent as numbers; it has no public name.
_Kind: Any = type(inspect.Parameter.KEYWORD_ONLY)


class _Default(str):
    """A default value that was not overridden, which prints as its value."""


@functools.lru_cache(maxsize=1024)
def _signature(parameters: tuple[Parameter, ...]) -> inspect.Signature:
    empty = inspect.Parameter.empty
    return inspect.Signature(
        [
            inspect.Parameter(p.name, _Kind(p.kind), default=empty if p.default is None else _Default(p.default))
            for p in parameters
        ]
    )


def bind(spec: EndpointSpec, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a call's lowered arguments by parameter name, defaults included.

    :raises SignatureError: if they do not fit the endpoint's signature; a TypeError, like that of the function itself.
    """
    try:
        bound = _signature(spec.parameters).bind(*args, **kwargs)
    except TypeError as error:
        raise SignatureError(f"{spec.name}(): {error}") from None
    bound.apply_defaults()
    return bound.arguments


@functools.lru_cache(maxsize=1024)
def _positions(parameters: tuple[Parameter, ...]) -> tuple[int, int]:
    """Return the minimum and maximum of positional arguments, without keyword ones; ``(1, 0)`` for complex signatures."""
    plain = (int(inspect.Parameter.POSITIONAL_ONLY), int(inspect.Parameter.POSITIONAL_OR_KEYWORD))
    if any(parameter.kind not in plain for parameter in parameters):
        return 1, 0
    return sum(parameter.required for parameter in parameters), len(parameters)


def takes(spec: EndpointSpec, count: int) -> bool:
    """Return True if ``count`` positional arguments alone fit an endpoint; False for complex signatures."""
    least, most = _positions(spec.parameters)
    return least <= count <= most


def key_of(spec: EndpointSpec, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    """Return the :func:`cache_key` of a call; binds the arguments only where binding can fail or changes the key.

    :raises SignatureError: if they do not fit the endpoint's signature.
    """
    if not spec.cache and not kwargs and takes(spec, len(args)):
        return None
    return cache_key(spec, bind(spec, args, kwargs))


def identity_of(spec: EndpointSpec, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    """Return a text that identifies a call's arguments, including those that its key leaves out.

    None if there are tensors or modules among them.

    :raises SignatureError: if they do not fit the endpoint's signature.
    """
    return cache_key(msgspec.structs.replace(spec, cache_format_key=None), bind(spec, args, kwargs))


def cache_key(spec: EndpointSpec, bound: dict[str, Any]) -> str | None:
    """Return the key of a call, None if it is not cached.

    The key is the endpoint's name and a canonical form of the bound arguments, or its filled-in ``cache_format_key``. A call
    with a tensor or a module has no default key, only one from a template that leaves these out.

    :raises CapabilityError: if the template names an argument that is a tensor or a module.
    """
    if not spec.cache:
        return None
    if spec.cache_format_key is not None:
        return _shortened(spec.name, f"{spec.name}:{_fill(spec, bound)}")
    texts = []
    for name, value in bound.items():
        text = str(value) if type(value) is _Default else canonical(value)
        if text is None:
            return None
        texts.append(f"{name}={text}")
    return _shortened(spec.name, f"{spec.name}({', '.join(texts)})")


def _shortened(name: str, key: str) -> str:
    if len(key) <= KEY_LIMIT:
        return key
    return f"{name}(blake2b:{hashlib.blake2b(key.encode('utf-8', 'surrogatepass'), digest_size=16).hexdigest()})"


def _fill(spec: EndpointSpec, bound: dict[str, Any]) -> str:
    template = spec.cache_format_key or ""
    values = {name: _unquoted(value) for name, value in bound.items()}
    for parameter in spec.parameters:
        if parameter.kind == inspect.Parameter.VAR_KEYWORD:
            values = {**bound.get(parameter.name, {}), **values}
    for name in sorted(set(_fields(template)) & set(values)):
        if canonical(values[name]) is None:
            raise CapabilityError(
                f"endpoint {spec.name!r}: cache_format_key={template!r} names {name!r}, which is a tensor or module in this "
                f"call: leave it out, or pass a plain argument that identifies it"
            )
    try:
        return template.format(**values)
    except (LookupError, AttributeError, ValueError, TypeError) as error:
        raise CapabilityError(
            f"endpoint {spec.name!r}: cache_format_key={template!r} does not fit this call: {error}"
        ) from error


_NO_LITERALS = {text: float(text) for text in ("nan", "inf", "-inf")}


def _unquoted(value: Any) -> Any:
    """Return a default as its value prints: strings lose the quotes that :func:`canonical` added."""
    if type(value) is DtypeRef:
        return str(value)
    if type(value) is not _Default:
        return value
    if value in _NO_LITERALS:
        return _NO_LITERALS[value]
    try:
        return ast.literal_eval(str(value))
    except (ValueError, SyntaxError):
        return str(value)


def check_chain(spec: EndpointSpec, key: str | None, chain: frozenset[str]) -> None:
    """Refuse a call that would wait for itself.

    :param chain: names and keys of the calls that directly or indirectly make this one.
    :raises ConfigurationError: if the chain contains this call, or a serialized endpoint of the same name.
    """
    if key is not None and key in chain and spec.singleflight:
        raise ConfigurationError(
            f"{key} calls itself while it is being built, directly or through another one: it would wait forever"
        )
    if spec.concurrency == "serialized" and spec.name in chain:
        raise ConfigurationError(
            f"endpoint {spec.name!r} is serialized and calls itself, directly or through another one: it would wait forever"
        )


class Registry:
    """Endpoints by name."""

    def __init__(self, specs: Iterable[EndpointSpec] = ()) -> None:
        self.replace(specs)
        #: Called after an endpoint was added.
        self.on_add: Callable[[], None] | None = None

    def add(self, spec: EndpointSpec) -> None:
        """Add an endpoint; it replaces one of the same name, like a repeated function definition."""
        self._specs[spec.name] = spec
        if self.on_add is not None:
            self.on_add()

    def replace(self, specs: Iterable[EndpointSpec]) -> None:
        """Replace all endpoints with these."""
        self._specs = {spec.name: spec for spec in specs}
        #: Returns the spec of an endpoint, or None.
        self.find: Callable[[str], EndpointSpec | None] = self._specs.get

    def get(self, name: str) -> EndpointSpec:
        """Return the spec of an endpoint.

        :raises EndpointNotFound: with the names of the existing ones.
        """
        spec = self._specs.get(name)
        if spec is None:
            name = name[:_SHOWN]  # the time of the search grows with the length
            near = difflib.get_close_matches(name, self._specs, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(self._specs)) or 'none'}"
            raise EndpointNotFound(f"the server has no endpoint {name!r}: {hint}")
        return spec

    def all(self) -> list[EndpointSpec]:
        """Return all specs, in the order of registration."""
        return list(self._specs.values())
