"""Names and shapes of the tensors in safetensors files, from their headers alone.

Files may come from anywhere: lengths are checked before anything is read, and nothing but JSON is parsed.
The format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
from math import prod
from pathlib import Path
from typing import Any

from frozen_opt.commands.bad_input import BadInput

Shapes = dict[str, tuple[int, ...] | None]
"""Name -> shape; None where only the index of a checkpoint knows the name."""

MAX_JSON = 32 << 20
"""The format allows headers of 100 MB; real ones take some 150 bytes a tensor."""

_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


def read_header(path: Path) -> Shapes:
    """Names and shapes of the tensors in one safetensors file.

    The tensors themselves need not be there: the first part of a download will do.

    Raises:
        BadInput: There is no such file, or it has no valid header.
    """
    with open_file(path) as file:
        size = path.stat().st_size
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length < 2:
            raise _bad(path, "is no safetensors file: it has no header")
        if length > size - 8:
            kind = "a pickle" if start[:1] == b"\x80" else "a zip file" if start[:2] == b"PK" else None
            raise _bad(
                path,
                f"is no safetensors file, but {kind}, which is never opened here"
                if kind
                else f"is truncated, or no safetensors file: its header should take {length:,} bytes, and "
                f"{max(size - 8, 0):,} are there",
            )
        if length > MAX_JSON:
            raise _bad(path, f"claims a header of {length:,} bytes; more than {MAX_JSON:,} are not read")
        header = _parse(path, file.read(length))
    header.pop("__metadata__", None)
    return {name: _shape(path, name, entry) for name, entry in header.items()}


def read_index(path: Path) -> Shapes:
    """Names in the index of a sharded checkpoint, with shapes from those shards that lie beside it.

    Raises:
        BadInput: The index or one of the shards is not what it should be.
    """
    weights = read_json(path).get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise _bad(path, "is no index of a checkpoint: it has no weight_map")
    headers: dict[str, Shapes | None] = {}
    shapes: Shapes = {}
    for name, file in weights.items():
        if not isinstance(file, str):
            raise _bad(path, f"puts {name!r} into {file!r}, which is no file name")
        if file not in headers:
            if file in ("", "..") or Path(file).name != file:
                raise _bad(path, f"puts {name!r} into {file!r}, which is no file name")
            shard = path.with_name(file)
            headers[file] = read_header(shard) if os.path.exists(shard) else None
        header = headers[file]
        if header is not None and name not in header:
            raise _bad(path, f"puts {name!r} into {file!r}, whose header lacks it")
        shapes[name] = header[name] if header is not None else None
    return shapes


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        BadInput: It does not, or there is none, or it is too large.
    """
    with open_file(path) as file:
        text = file.read(MAX_JSON + 1)
    if len(text) > MAX_JSON:
        raise _bad(path, f"is larger than {MAX_JSON:,} bytes, which is more than is read")
    return _parse(path, text)


def open_file(path: Path) -> Any:
    """A file to read from, if it is one: a pipe, or a device, might never end.

    Raises:
        BadInput: It is none, or can't be read.
    """
    try:
        if not path.is_file():
            raise _bad(path, "is no file" if path.exists() else "does not exist")
        return path.open("rb")
    except (OSError, ValueError) as error:  # a name too long for any file, or with a zero byte
        raise _bad(path, f"can't be read: {getattr(error, 'strerror', None) or error}") from error


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text.decode(), object_pairs_hook=_unique)
    except RecursionError:
        raise _bad(path, "has JSON in it that is nested too deeply") from None
    except ValueError as error:  # not UTF-8, not JSON, a name twice, a number of thousands of digits
        raise _bad(path, f"has no valid JSON in it: {error}") from None
    if not isinstance(value, dict):
        raise _bad(path, "has JSON in it that is no object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a name stands there twice")
    return value


def _shape(path: Path, name: str, entry: Any) -> tuple[int, ...]:
    keys = ("dtype", "shape", "data_offsets")
    if not isinstance(entry, dict) or not entry.keys() >= {*keys}:
        raise _bad(path, f"has no valid header: {name!r} needs {', '.join(keys)}")
    dtype, shape, offsets = (entry[key] for key in keys)
    if not (isinstance(dtype, str) and _sizes(shape) and _sizes(offsets) and len(offsets) == 2):
        raise _bad(path, f"has no valid header: {name!r} has impossible {', '.join(keys)}")
    stored = 8 * (offsets[1] - offsets[0])
    if stored < 0 or (dtype in _BITS and stored != prod(shape) * _BITS[dtype]):
        raise _bad(path, f"has no valid header: the shape of {name!r} does not fit its data_offsets")
    return tuple(shape)


def _sizes(value: Any) -> bool:
    """Whether this is a list of sizes, no longer than a tensor has dimensions at most."""
    return (
        isinstance(value, list)
        and len(value) <= 64
        and all(type(size) is int and 0 <= size < 1 << 63 for size in value)
    )


def _bad(path: Path, text: str) -> BadInput:
    return BadInput(f"{path} {text}")
