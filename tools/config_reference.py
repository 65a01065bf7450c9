"""Writes docs/config_reference.md and configs/schema.json from the models of
`deepspeed_ext.config`.

    python -m tools.config_reference

All about fields comes from the models' annotations and docstrings, so there is nothing to edit in
the two files.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepspeed_ext.config import ZeroFields

__all__ = ["REFERENCE_FILE", "SCHEMA_FILE", "json_schema", "markdown"]

ROOT = Path(__file__).resolve().parent.parent
REFERENCE_FILE = ROOT / "docs" / "config_reference.md"
SCHEMA_FILE = ROOT / "configs" / "schema.json"

SECTION = "zero_optimization"
INTRODUCTION = f"""# Config reference

<!-- Written by `make docs` from the models in deepspeed_ext/config; edit those. -->

The fields that deepspeed_ext adds to a DeepSpeed config. All of them live under `{SECTION}`, beside DeepSpeed's own
[ZeRO fields](https://www.deepspeed.ai/docs/config-json/#zero-optimizations-for-fp16-training), and all are optional.
The value `"auto"` means the same as leaving the field out, as in DeepSpeed's own sections; under Accelerate and the
Hugging Face Trainer leave it out, because they refuse an `"auto"` that they do not fill in. An unknown field or an
impossible value is an error at `initialize` that names the field. Editors can check a config against
`configs/schema.json` (`deepspeed-ext config schema` prints it).
"""
ENVIRONMENT = """
## Environment variables

| variable | meaning |
|---|---|
| `DSEXT_BIND` | `0`: bind no cores, whatever the config says |
| `DSEXT_ALLOWED_CPUS` | CPUs that a plan may use, such as `0,4-11`. Not given: the mask before torch was imported |
| `DSEXT_LOG_LEVEL` | `DEBUG`, `INFO` (default), `WARNING` or `ERROR` |
| `DSEXT_NATIVE_KERNEL` | `0`: ZenFlow's pass uses torch operations |
| `CXX` | compiler of the native kernel when the package is installed, with arguments if you like |
| `DEEPSPEED_TIMEOUT` | DeepSpeed's: the process group's timeout in minutes |
"""
NOT_GIVEN = "Not given:"
"""Begins the sentence of a field's text that says what happens without it."""
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
TYPES = {
    "boolean": "bool",
    "integer": "int",
    "number": "float",
    "string": "str",
    "object": "object",
    "null": "none",
}


def json_schema() -> str:
    """A JSON schema for a whole DeepSpeed config that knows our fields and lets all of DeepSpeed's
    pass."""
    fields = _schema()
    definitions = fields.pop("$defs", {})
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "DeepSpeed config with the fields of deepspeed_ext",
        "type": "object",
        "properties": {SECTION: {**fields, "title": SECTION, "additionalProperties": True}},
        "$defs": definitions,
    }
    return json.dumps(schema, indent=2) + "\n"


def markdown() -> str:
    """The reference: one table for `zero_optimization`, one for each section in it, and the
    environment variables."""
    schema = _schema()
    return INTRODUCTION + "".join(_section(SECTION, schema, schema.get("$defs", {}))) + ENVIRONMENT


def _schema() -> dict[str, Any]:
    """The models' schema. A field whose text says what happens if it is not given has no default
    beside that."""
    schema = ZeroFields.model_json_schema()
    for section in (schema, *schema.get("$defs", {}).values()):
        for field in section.get("properties", {}).values():
            field["description"] = " ".join(field.get("description", "").split())
            if NOT_GIVEN in field["description"]:
                field.pop("default", None)
    return schema


def _section(path: str, section: dict[str, Any], definitions: dict[str, Any]) -> Iterator[str]:
    """The table of one section, then those of the sections in it."""
    inner = []
    yield f"\n## `{path}`\n\n"
    if path != SECTION and "description" in section:
        yield f"{_one_line(section)}\n\n"
    yield "| field | meaning |\n|---|---|\n"
    for name, field in section["properties"].items():
        target = _target(field, definitions)
        if target is not None:
            inner.append((f"{path}.{name}", target))
        anchor = f"{path}{name}".replace(".", "")
        kind = f"[section](#{anchor})" if target is not None else _type(field)
        default = "" if target is not None else f"<br>{_default(field)}"
        yield f"| `{name}`<br>{kind}{default} | {_one_line(field)} |\n"
    for inner_path, target in inner:
        yield from _section(inner_path, target, definitions)


def _target(field: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any] | None:
    """The model that a field holds, if it is a section of its own."""
    for option in (field, *field.get("anyOf", ()), *field.get("allOf", ())):
        target = definitions.get(option.get("$ref", "").removeprefix("#/$defs/"))
        if target is not None and "properties" in target:
            return target
    return None


def _type(field: dict[str, Any]) -> str:
    options = field.get("anyOf") or field.get("oneOf")
    if options:
        return " or ".join(_type(option) for option in options if option.get("type") != "null")
    if "enum" in field or "const" in field:
        return ", ".join(
            f"`{json.dumps(value)}`" for value in field.get("enum", [field.get("const")])
        )
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}))}"
    bounds = [f"{sign} {_number(field[key])}" for key, sign in BOUNDS.items() if key in field]
    return " ".join([TYPES.get(field.get("type", ""), "any"), " and ".join(bounds)]).strip()


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def _default(field: dict[str, Any]) -> str:
    """What happens without the field, or where its text says that."""
    if "default" in field:
        return f"default: `{json.dumps(field['default'])}`"
    return "default: see *Not given*"


def _one_line(described: dict[str, Any]) -> str:
    text = " ".join(described.get("description", "").split()).replace("``", "`")
    return text.replace(NOT_GIVEN, f"*{NOT_GIVEN.rstrip(':')}*:")


def main() -> None:
    REFERENCE_FILE.write_text(markdown())
    SCHEMA_FILE.write_text(json_schema())


if __name__ == "__main__":
    main()
