"""Parameters of endpoints, equality of calls, and refusals when an endpoint is registered."""

from __future__ import annotations

import functools
import inspect
import string
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared_rpc import Provider
from shared_rpc.errors import CapabilityError, ConfigurationError, EndpointNotFound
from shared_rpc.execution.endpoints import Registry, bind, cache_key, check_chain, describe
from shared_rpc.protocol.specs import EndpointSpec
from shared_rpc.protocol.values import DtypeRef, SkeletonRef, TensorRef


def key_of(spec: EndpointSpec, *args: Any, **kwargs: Any) -> str | None:
    """Return the key of a call with lowered arguments."""
    return cache_key(spec, bind(spec, args, kwargs))


def load(hidden_size: int, /, layers: int = 2, *rest: Any, dtype: Any = "float32", tied: bool = True, **extra: Any) -> None:
    """Load a model.

    With a parameter of each kind.
    """


# Binding.


def test_parameters_of_every_kind_are_in_the_key() -> None:
    """Positional-only, keyword-only, and those without a number."""
    spec = describe(load)
    assert key_of(spec, 8) == "load(hidden_size=8, layers=2, rest=(), dtype='float32', tied=True, extra={})"
    assert key_of(spec, 8, 4, "a", 1, seed=3, tied=False) == (
        "load(hidden_size=8, layers=4, rest=('a', 1,), dtype='float32', tied=False, extra={'seed': 3})"
    )
    assert key_of(spec, 8, a=1, b=2) == key_of(spec, 8, b=2, a=1)


FUNCTIONS: list[Callable[..., Any]] = [
    lambda: {},
    lambda x: locals(),
    lambda x, y=1: locals(),
    lambda x, /, y=1: locals(),
    lambda x, y=1, /: {"x": x, "y": y},
    lambda x, *, y: locals(),
    lambda *, x=1, y=2: {"x": x, "y": y},
    lambda x=1, *y: locals(),
    lambda *x, y=1: locals(),
    lambda **x: locals(),
    lambda x, **y: locals(),
    # Nothing is passed by the names a and b: releases of inspect differ there (CPython issues 87106 and 130164).
    lambda a, /, **y: locals(),
    lambda a, b=1, /, x=1, *y, z, w=2, **v: locals(),
]
values = st.sampled_from([1, 2, True, 1.0, "1", None, (1,), [1]])
calls = st.tuples(st.lists(values, max_size=3), st.dictionaries(st.sampled_from("xyzwv"), values, max_size=3))


@given(st.sampled_from(FUNCTIONS), calls, calls)
def test_calls_bind_like_the_function(function: Callable[..., Any], one: Any, other: Any) -> None:
    """The same calls are refused, and two calls have one key if the function gets the same values."""
    spec = describe(function, "f")
    seen, keys = [], []
    for args, kwargs in (one, other):
        try:
            views = sorted((name, _exact(value)) for name, value in function(*args, **kwargs).items())
        except TypeError:
            with pytest.raises(TypeError, match=r"f\(\): "):
                bind(spec, args, kwargs)
            return
        seen.append(views)
        keys.append(key_of(spec, *args, **kwargs))
    assert (keys[0] == keys[1]) == (seen[0] == seen[1])


def _exact(value: Any) -> str:
    """Return a value with its types; dicts in one order."""
    return repr(sorted(value.items())) if isinstance(value, dict) else repr(value)


# Default keys.


@pytest.mark.parametrize("memory", [TensorRef(0), SkeletonRef(0), [TensorRef(0)], {"a": (SkeletonRef(0),)}])
def test_calls_with_memory_have_no_key(memory: Any) -> None:
    """Tensors are not compared; such a call is not cached."""
    spec = describe(lambda x, y=1, **more: x, "f")
    assert key_of(spec, memory) is None
    assert key_of(spec, 1, memory) is None
    assert key_of(spec, 1, z=memory) is None


def test_long_keys_are_digests() -> None:
    """Keys are displayed and stored; a prompt of a megabyte is too long. Equal calls still have one key."""
    spec = describe(lambda x: x, "f")
    keys = [key_of(spec, "a" * 1_000_000), key_of(spec, "a" * 999_999 + "b"), key_of(spec, x="a" * 1_000_000)]
    assert keys[0] == keys[2] != keys[1]
    for key in keys:
        assert key is not None and key.startswith("f(blake2b:") and len(key) < 64
    short = key_of(spec, "a" * 400)
    assert short == f"f(x={'a' * 400!r})"


def test_keys_of_different_endpoints_differ() -> None:
    """The name is part of the key, also with a template, and followed by a character that no name has."""
    names = ["f", "f.g", "f-1", "f_"]
    keys = {key_of(describe(lambda x: x, name, cache_format_key=template), 1) for name in names for template in (None, "{x}")}
    assert len(keys) == 2 * len(names)


@pytest.mark.parametrize("template", [None, "{dtype:>15}"])
def test_dtypes_as_default_and_as_argument_are_one_call(template: str | None) -> None:
    """Both are encoded by name."""
    spec = describe(lambda dtype=torch.float16: dtype, "f", cache_format_key=template)
    assert key_of(spec) == key_of(spec, DtypeRef("float16"))
    assert "torch.float16" in (key_of(spec) or "")
    nested = describe(lambda dtype=[torch.int8]: dtype, "f")
    assert key_of(nested) == key_of(nested, [DtypeRef("int8")])


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize("default", [object(), torch.device("cpu"), torch.zeros(2), load, {1: 2}, "\udcff", {1, 2}, ENDLESS])
def test_unencodable_defaults_have_a_key(default: Any) -> None:
    """A call without the argument differs from any that passes one."""
    spec = describe(lambda x=default: x, "f")
    assert key_of(spec) is not None
    assert key_of(spec) not in {key_of(spec, None), key_of(spec, "cpu"), key_of(spec, repr(default).replace("\udcff", ""))}


# Templates.


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("model:{hidden_size}", "load:model:8"),
        ("{hidden_size:04d}/{layers:>3}", "load:0008/  2"),
        ("{dtype}-{dtype!r}", "load:float32-'float32'"),
        ("{hidden_size:{layers}}", "load: 8"),
        ("{rest}{extra}", "load:(){}"),
        ("{rest[0]}{extra[a]}{seed}", "load:first57"),
        ("constant {{}}", "load:constant {}"),
    ],
)
def test_templates_are_filled_in(template: str, expected: str) -> None:
    """From the bound arguments, including defaults."""
    args, kwargs = ((8,), {}) if "seed" not in template else ((8, 2, "first"), {"a": 5, "seed": 7})
    assert key_of(describe(load, cache_format_key=template), *args, **kwargs) == expected
    assert key_of(describe(load, cache=False, cache_format_key=template), 8) is None


def test_arguments_outside_the_template_are_ignored() -> None:
    """Including tensors, which leave the call without a default key."""
    spec = describe(load, cache_format_key="{hidden_size}")
    assert key_of(spec, 8, 2) == key_of(spec, 8, 3, tied=False) == key_of(spec, 8, TensorRef(0)) == "load:8"


@pytest.mark.parametrize(
    ("default", "template"),
    [
        (8, "{x:04d}"),
        (float("nan"), "{x:.1f}"),
        ("it's", "{x:>8}{x!r}"),
        ((1, 2), "{x[1]:03d}{x}"),
        ({"a": 1}, "{x[a]:03d}"),
    ],
)
def test_defaults_print_as_their_values(default: Any, template: str) -> None:
    """With any format: a call with the default and one that passes it are identical."""
    spec = describe(lambda x=default: x, "f", cache_format_key=template)
    assert key_of(spec) == key_of(spec, default) == f"f:{template.format(x=default)}"


@pytest.mark.parametrize("template", ["{x}", "{y:{x}}", "{more}", "{z}"])
def test_templates_with_memory_are_refused(template: str) -> None:
    """The error names the argument and gives the remedy."""
    spec = describe(lambda x, y=1, **more: x, "f", cache_format_key=template)
    with pytest.raises(CapabilityError) as caught:
        key_of(spec, TensorRef(0), z=[SkeletonRef(0)])
    name = next(name for name in ("more", "z", "x") if f"{{{name}}}" in template)
    for part in ("endpoint 'f'", repr(template), f"names {name!r}, which is a tensor or module", "leave it out"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("template", "args"),
    [("{x:d}", ("text",)), ("{x[3]}", ((1,),)), ("{x.size}", (1,)), ("{x:{y}}", (1, "?")), ("{unknown}", (1,))],
)
def test_templates_that_do_not_fit_a_call_are_refused(template: str, args: tuple[Any, ...]) -> None:
    """The error names endpoint and template."""
    spec = describe(lambda x, y=1, **more: x, "f", cache_format_key=template)
    with pytest.raises(CapabilityError, match=r"endpoint 'f': cache_format_key='.*' does not fit this call: "):
        key_of(spec, *args)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{hiden_size}", r"names 'hiden_size', which is none of its arguments \(hidden_size, layers\)"),
        ("{hidden_size:{width}}", "names 'width', which is none of its arguments"),
        ("{hiden[0]}", "names 'hiden', which"),
        ("{}", "field without a name"),
        ("{hidden_size", "is not a format string"),
        ("{hidden_size!x}", "is not a format string"),
        (5, "use a format string, or None"),
    ],
)
def test_invalid_templates_fail_on_registration(template: Any, message: str) -> None:
    """Not on the first call."""
    with pytest.raises(ConfigurationError, match=r"endpoint 'model': cache_format_key=.*" + message):
        describe(lambda hidden_size, layers=2: None, "model", cache_format_key=template)


@given(st.text(alphabet="xy{}[]!:.0r ", max_size=8))
def test_any_template_is_refused_or_usable(template: str) -> None:
    """For any text, registration and keys raise only this library's errors."""
    try:
        spec = describe(lambda x, y=1: None, "f", cache_format_key=template)
    except ConfigurationError:
        return
    try:
        key = key_of(spec, 2)
    except CapabilityError:
        return
    assert key == "f:" + string.Formatter().vformat(template, (), {"x": 2, "y": 1})


# Options.


@pytest.mark.parametrize("option", ["manged", "doc"])
def test_unknown_options_are_type_errors(option: str) -> None:
    """With their names; the function's own facts are not options."""
    with pytest.raises(TypeError, match=rf"share\(\) got an unexpected option '{option}'"):
        describe(load, **{option: True})


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("concurrency", "serial", "'parallel' or 'serialized'"),
        ("access", "write", "'read_write' or 'read'"),
        ("tensors", "buffers", "'all' or 'parameters'"),
        ("managed", None, "True or False"),
        ("idle_ttl", -1, "seconds, or None for never"),
        ("idle_ttl", True, "seconds, or None for never"),
    ],
)
def test_invalid_values_of_options_are_refused(option: str, value: Any, allowed: str) -> None:
    """The error has endpoint, option, value and the allowed values."""
    with pytest.raises(ConfigurationError) as caught:
        describe(load, **{option: value})
    assert str(caught.value) == f"endpoint 'load': {option}={value!r}; use {allowed}"


@pytest.mark.parametrize("name", ["", "a b", "1a", "a:b", ".a", "a\n", "a" * 201])
def test_invalid_names_are_refused(name: str) -> None:
    """A name is part of keys and of command lines."""
    with pytest.raises(ConfigurationError, match="cannot name an endpoint: use up to 200 letters, digits"):
        describe(load, name)


def test_functions_without_a_name_need_one() -> None:
    """Such as lambdas and partials."""
    for function in (lambda: None, functools.partial(load, 1)):
        with pytest.raises(ConfigurationError, match="cannot name an endpoint"):
            describe(function)
    assert key_of(describe(functools.partial(load, 1), "one")) == "one(layers=2, rest=(), dtype='float32', tied=True, extra={})"


# The registry, and calls that would wait for themselves.


@pytest.mark.parametrize(
    ("names", "asked", "hint"),
    [
        (["load_model", "encode"], "load_modle", "did you mean 'load_model'?"),
        (["load_model", "encode"], "zzz", "it has encode, load_model"),
        ([], "load_model", "it has none"),
    ],
)
def test_unknown_endpoints_come_with_a_suggestion(names: list[str], asked: str, hint: str) -> None:
    """A similar name, else all names."""
    with pytest.raises(EndpointNotFound) as caught:
        Registry(describe(load, name) for name in names).get(asked)
    assert str(caught.value) == f"the server has no endpoint {asked!r}: {hint}"


def test_recursive_calls_are_refused() -> None:
    """They would join their own run and deadlock; without singleflight, or without a key, the inner call is a separate run."""
    spec, alone = describe(lambda x: x, "f"), describe(lambda x: x, "f", singleflight=False)
    key = key_of(spec, 1)
    with pytest.raises(ConfigurationError, match=r"f\(x=1\) calls itself while it is being built.*wait forever"):
        check_chain(spec, key, frozenset({"f", "f(x=1)"}))
    check_chain(spec, key_of(spec, 2), frozenset({"f", "f(x=1)"}))
    check_chain(spec, key, frozenset({"g"}))
    check_chain(alone, key_of(alone, 1), frozenset({"f", "f(x=1)"}))
    check_chain(spec, None, frozenset({"f"}))


def test_recursive_calls_of_serialized_endpoints_are_refused() -> None:
    """With any arguments: they run one call at a time."""
    spec = describe(lambda x: x, "f", concurrency="serialized")
    for key in (key_of(spec, 2), None):
        with pytest.raises(ConfigurationError, match="endpoint 'f' is serialized and calls itself"):
            check_chain(spec, key, frozenset({"f", "f(x=1)"}))
    check_chain(spec, key_of(spec, 2), frozenset({"g"}))


def compiled(source: str) -> EndpointSpec:
    """Return the spec of the function ``f`` defined by a source text."""
    names: dict[str, Any] = {}
    exec(compile(source, "app.py", "exec"), names)
    return describe(names["f"])


BODY = "def f(x, y=2):\n    return {'a': x + 1, 'b': [z for z in (y, 'text', {1, 2})]}\n"


@pytest.mark.parametrize("moved", [BODY, "import os\n\n\n" + BODY, BODY.replace("\n    return", "\n    # why\n\n    return")])
def test_a_function_that_is_moved_keeps_its_fingerprint(moved: str) -> None:
    """Its position and comments have no effect."""
    assert compiled(moved) == compiled(BODY)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x + 1", "x + 2"),
        ("x + 1", "x - 1"),
        ("y=2", "y=3"),
        ("'text'", "'other'"),
        ("{1, 2}", "{1, 3}"),
        ("z for z", "(z, z) for z"),
    ],
)
def test_a_function_that_is_changed_has_another_fingerprint(old: str, new: str) -> None:
    """With other constants, operators, nested functions, or defaults."""
    assert compiled(BODY.replace(old, new)) != compiled(BODY)


# The decorator.


def test_decorators_take_parentheses_and_names() -> None:
    """With or without parentheses, and with a name of its own; the result has the function's name, docstring and signature."""

    provider = Provider(device="cpu")

    def load(size: int, *, bias: bool = True) -> torch.nn.Module:
        """Build a layer."""
        return torch.nn.Linear(size, size, bias=bias)

    for shared in (
        provider.share(load),
        provider.share()(load),
        provider.share("load")(load),
        provider.share(name="load")(load),
    ):
        assert (shared.name, shared.__name__, shared.__doc__, shared.__module__) == ("load", "load", "Build a layer.", __name__)
        assert inspect.signature(shared) == inspect.signature(load)
    assert provider.share("models.load")(load).name == "models.load"
