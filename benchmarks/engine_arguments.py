"""Reads the command-line arguments of engines and routers out of their wheels, by their syntax.

`pip download --no-deps sglang==0.5.23` (or vllm, sglang-router, vllm-router, ai-dynamo) fetches a
wheel; then `python benchmarks/engine_arguments.py WHEEL ...` writes a table per wheel into
sim/export/arguments/, which the exporters check every flag against.
"""

from __future__ import annotations

import argparse
import ast
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ARGUMENTS = Path(__file__).resolve().parents[1] / "sim" / "export" / "arguments"
Argument = dict[str, Any]
Modules = dict[str, ast.Module]
_UNKNOWN = object()
_JSON_PARSERS = ("json.loads", "json_list_type")
_SCALARS = ("int", "float", "str", "bool")


def main() -> None:
    """Write the table of every wheel named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    for wheel in parser.parse_args().wheels:
        package, version = wheel.name.split("-")[:2]
        reader, folders = READERS[package]
        arguments = reader(_modules(wheel, folders))
        name = f"{package.replace('_', '-')}-{version}"
        (ARGUMENTS / f"{name}.json").write_text(_text(package, version, folders, arguments))
        print(f"{name}: {len(arguments)} arguments")


def _modules(wheel: Path, folders: tuple[str, ...]) -> Modules:
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: ast.parse(archive.read(name))
            for name in archive.namelist()
            if name.endswith(".py") and name.startswith(folders)
        }


def _text(
    package: str, version: str, folders: tuple[str, ...], arguments: Mapping[str, Argument]
) -> str:
    """Return the table as JSON, one argument a line, so that a new version reads as a diff."""
    lines = [f"    {json.dumps(flag)}: {json.dumps(arguments[flag])}" for flag in sorted(arguments)]
    head = {
        "package": package.replace("_", "-"),
        "version": version,
        "source": f"the wheel of {version}: {', '.join(folders)}",
    }
    top = json.dumps(head, indent=2).removesuffix("\n}")
    return top + ',\n  "arguments": {\n' + ",\n".join(lines) + "\n  }\n}\n"


# --- SGLang: fields of its configuration classes ------------------------------------------------


def sglang_arguments(modules: Modules) -> dict[str, Argument]:
    """Return what the annotated fields, and the few arguments added by hand, accept."""
    names = _constants(modules)
    found: dict[str, Argument] = {}
    for path, module in modules.items():
        if "/fields/" not in path:
            continue
        for field in _fields(module):
            declared = _sglang_field(field, names)
            if declared is not None:
                found[declared[0]] = declared[1]
    return _added(modules, names, lambda _: None) | found


def _sglang_field(field: ast.AnnAssign, names: Mapping[str, Any]) -> tuple[str, Argument] | None:
    """Return flag and argument of a field `name: A[type, "help" or Arg(...)]`."""
    annotation, target = field.annotation, field.target
    if not (isinstance(annotation, ast.Subscript) and isinstance(target, ast.Name)):
        return None
    if not (isinstance(annotation.value, ast.Name) and annotation.value.id == "A"):
        return None
    parts = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else []
    call = next((part for part in parts[1:] if isinstance(part, ast.Call)), None)
    given = {one.arg: one.value for one in call.keywords} if call else {}
    if "no_cli" in given:
        return None
    flag = _value(given["cli_name"], names) if "cli_name" in given else _flag(target.id)
    argument = _typed(parts[0], names)
    if "action" in given:
        argument = _switch(given["action"])
    elif "nargs" in given:
        argument["type"] = "list"
    if ast.unparse(given.get("type_parser", ast.Constant(None))) in _JSON_PARSERS:
        argument["type"] = "json"
    if "choices" in given:
        argument["choices"] = _choices(given["choices"], names)
    if "aliases" in given:
        argument["aliases"] = _value(given["aliases"], names)
    return flag, argument


# --- vLLM: add_argument calls that point at fields of its configuration classes -----------------


def vllm_arguments(modules: Modules) -> dict[str, Argument]:
    """Return what `vllm serve` accepts: the engine's arguments and the server's."""
    names = _constants(modules)
    classes = {
        node.name: node
        for module in modules.values()
        for node in module.body
        if isinstance(node, ast.ClassDef)
    }
    groups = _kwargs_variables(modules["vllm/engine/arg_utils.py"])

    def declared(call: ast.Call) -> Argument | None:
        for node in ast.walk(call):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
                owner = classes.get(groups.get(node.value.id, ""))
                key = _value(node.slice, {})
                if owner is not None and isinstance(key, str):
                    found = _class_field(owner, key, names)
                    return None if found is None else _negatable(found)
        return None

    found = _added(modules, names, declared)
    for name in ("BaseFrontendArgs", "FrontendArgs"):
        for field in _fields(classes[name]) if name in classes else ():
            assert isinstance(field.target, ast.Name)
            argument = _negatable(_typed(field.annotation, names))
            found.setdefault(_flag(field.target.id), argument)
    return found


def _negatable(argument: Argument) -> Argument:
    """Return an argument as vLLM makes it: every switch has a --no- form."""
    return {"type": "bool", "negatable": True} if argument["type"] == "bool" else argument


def _kwargs_variables(module: ast.Module) -> dict[str, str]:
    """Return the class behind each variable that holds `get_kwargs(Class)`."""
    groups = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            call, target = node.value, node.targets[0]
            called = isinstance(call.func, ast.Name) and call.func.id == "get_kwargs"
            if called and isinstance(target, ast.Name) and isinstance(call.args[0], ast.Name):
                groups[target.id] = call.args[0].id
    return groups


def _class_field(owner: ast.ClassDef, name: str, names: Mapping[str, Any]) -> Argument | None:
    for field in _fields(owner):
        if isinstance(field.target, ast.Name) and field.target.id == name:
            return _typed(field.annotation, names)
    return None


# --- what the readers share ---------------------------------------------------------------------


def router_arguments(modules: Modules) -> dict[str, Argument]:
    """Return what a router accepts; its flags may carry a prefix that is empty by default."""
    return _added(modules, _constants(modules), lambda _: None)


def dynamo_arguments(modules: Modules) -> dict[str, Argument]:
    """Return what Dynamo's frontend and workers accept beside what they pass on to the engine."""
    names = _constants(modules)
    found: dict[str, Argument] = {}
    for module in modules.values():
        for node in ast.walk(module):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            given = {one.arg: one.value for one in node.keywords if one.arg}
            flag = _value(given["flag_name"], names) if "flag_name" in given else None
            if not isinstance(flag, str):
                continue
            if node.func.id == "add_negatable_bool_argument":
                found[flag] = {"type": "bool", "negatable": True}
            elif node.func.id == "add_argument":
                given["type"] = given.get("arg_type", ast.Constant("str"))
                found[flag] = _described(given, names)
    return found


def _added(
    modules: Modules, names: Mapping[str, Any], declared: Callable[[ast.Call], Argument | None]
) -> dict[str, Argument]:
    """Return the arguments of all `add_argument("--flag", ...)` calls."""
    found: dict[str, Argument] = {}
    for module in modules.values():
        for node in ast.walk(module):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr != "add_argument":
                continue
            flags = [one for one in map(_literal_flag, node.args) if one]
            main_flag = next((one for one in flags if one.startswith("--")), None)
            if main_flag is None:
                continue
            argument = declared(node) or _called(node, names)
            others = [one for one in flags if one != main_flag]
            found[main_flag] = argument | ({"aliases": others} if others else {})
    return found


def _called(call: ast.Call, names: Mapping[str, Any]) -> Argument:
    """Return the argument that a call of add_argument describes by its own keywords."""
    return _described({one.arg: one.value for one in call.keywords if one.arg}, names)


def _described(given: Mapping[str, ast.expr], names: Mapping[str, Any]) -> Argument:
    argument: Argument = {"type": "str"}
    kind = given.get("type")
    if isinstance(kind, ast.Name) and kind.id in _SCALARS:
        argument["type"] = kind.id
    if "action" in given:
        argument = _switch(given["action"])
    if "nargs" in given:
        argument["type"] = "list"
    if "choices" in given:
        argument["choices"] = _choices(given["choices"], names)
    return argument


def _switch(action: ast.expr) -> Argument:
    """Return a flag without a value; `negatable`: there is a --no- form of it too."""
    negatable = "BooleanOptionalAction" in ast.unparse(action)
    return {"type": "bool", "negatable": True} if negatable else {"type": "bool"}


def _typed(annotation: ast.expr, names: Mapping[str, Any]) -> Argument:
    """Return type and choices of an annotation: the first scalar in it, or a Literal's values."""
    words = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
    words |= {node.attr for node in ast.walk(annotation) if isinstance(node, ast.Attribute)}
    literal = next((names[word] for word in words if isinstance(names.get(word), tuple)), None)
    for node in ast.walk(annotation):
        if isinstance(node, ast.Subscript) and _is_named(node.value, "Literal"):
            literal = _value(node, names)
    if "bool" in words:
        return {"type": "bool"}
    literal = tuple(one for one in literal or () if one is not None)
    if literal:
        free = "str" in words  # any other name is accepted too: plugins bring more
        return {"type": type(literal[0]).__name__, "known" if free else "choices": list(literal)}
    if words & {"list", "List", "tuple", "set"}:
        return {"type": "list"}
    return {"type": next((one for one in ("int", "float", "str") if one in words), "json")}


def _constants(modules: Modules) -> dict[str, Any]:
    """Return the constants of the modules' top level; those made of others need a second look."""
    names: dict[str, Any] = {}
    for _ in range(3):
        for module in modules.values():
            for node in module.body:
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    value = _value(node.value, names)
                    if value is not _UNKNOWN:
                        names[node.targets[0].id] = value
    return names


def _choices(node: ast.expr, names: Mapping[str, Any]) -> list[Any] | None:
    """Return the choices, None where the program makes them up while it runs."""
    value = _value(node, names)
    return None if value is _UNKNOWN else list(value)


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return what a literal, a name, a sum of lists or a Literal[...] stands for."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return names.get(node.id, _UNKNOWN)
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        values = [_value(one, names) for one in node.elts]
        return _UNKNOWN if _UNKNOWN in values else values
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _value(node.left, names), _value(node.right, names)
        return left + right if isinstance(left, list) and isinstance(right, list) else _UNKNOWN
    if isinstance(node, ast.Subscript) and _is_named(node.value, "Literal"):
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return tuple(_flat(_value(one, names) for one in inner))
    return _UNKNOWN


def _flat(values: Iterator[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple):
            yield from value
        elif value is not _UNKNOWN:
            yield value


def _is_named(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _fields(node: ast.Module | ast.ClassDef) -> Iterator[ast.AnnAssign]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.ClassDef):
            yield from (one for one in inner.body if isinstance(one, ast.AnnAssign))


def _literal_flag(node: ast.expr) -> str | None:
    """Return a flag written as a string, or as an f-string behind a prefix."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value if node.value.startswith("-") else None
    if isinstance(node, ast.JoinedStr):
        parts = [part.value for part in node.values if isinstance(part, ast.Constant)]
        flag = "".join(str(part) for part in parts)
        return flag if flag.strip("-") else None
    return None


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


Reader = Callable[[Modules], dict[str, Argument]]
READERS: dict[str, tuple[Reader, tuple[str, ...]]] = {
    "sglang": (sglang_arguments, ("sglang/srt/server_args.py", "sglang/srt/arg_groups/")),
    "vllm": (
        vllm_arguments,
        (
            "vllm/engine/arg_utils.py",
            "vllm/config/",
            "vllm/entrypoints/common/cli_args.py",
            "vllm/entrypoints/launchers/cli_args.py",  # until 0.31
            "vllm/model_executor/layers/quantization/__init__.py",
        ),
    ),
    "sglang_router": (router_arguments, ("sglang_router/router_args.py",)),
    "vllm_router": (router_arguments, ("vllm_router/router_args.py",)),
    "ai_dynamo": (
        dynamo_arguments,
        (
            "dynamo/frontend/frontend_args.py",
            "dynamo/vllm/backend_args.py",
            "dynamo/sglang/backend_args.py",
            "dynamo/common/configuration/",
        ),
    ),
}


if __name__ == "__main__":
    main()
