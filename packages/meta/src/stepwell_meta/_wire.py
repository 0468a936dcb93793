"""Metas and structures ↔ bytes, never by pickle: what is not written here cannot be said.

An encoding is the two bytes ``SW``, a version, and one value. A value is a tag and what the tag asks for; counts and sizes
are unsigned LEB128. Classes and dtypes go by name. Decoding allocates nothing that the bytes do not pay for: a count is
checked against the bytes that are left, a name against the names there are, nesting against a limit. It imports nothing and
calls no code but the constructors of stepwell-meta's own records and of torch's placements.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ._classes import class_map
from ._format import HEADER, MAX_ENCODED_BYTES
from ._reader import Reader
from ._writer import put
from .exceptions import DecodeError, MetadataError

__all__ = ["MAX_ENCODED_BYTES", "decode", "encode"]


def encode(value: Any) -> bytes:
    """Metadata as bytes.

    Args:
        value: A TensorMeta, DTensorMeta, MeshKey, StageMeta, ForwardMeta, BackwardMeta or Structure, None, a bool, int,
            float, complex, str, bytes or torch.dtype, or a tuple of any of these, nested.

    Raises:
        UnsupportedValueError: ``value`` is or holds something else.
        MetadataError: It is nested too deeply or takes more than `MAX_ENCODED_BYTES`.

    Example:
        >>> decode(encode((MeshKey(None, (4,), (1,)), "tp")))
        (MeshKey(axis_names=None, shape=(4,), stride=(1,), offsets=None), 'tp')
    """
    out = bytearray(HEADER)
    put(out, value)
    if len(out) > MAX_ENCODED_BYTES:
        raise MetadataError(f"metadata takes {len(out)} bytes, more than the {MAX_ENCODED_BYTES} that a peer accepts")
    return bytes(out)


def decode(data: bytes | bytearray | memoryview, *, classes: Iterable[type] = ()) -> Any:
    """The value that `encode` was given.

    Args:
        data: All the bytes of one encoding and nothing more.
        classes: Named tuples, dataclasses, attrs classes and enums that structures may be rebuilt with. Names of classes in
            the bytes select among these and never import anything; a class that is missing is an error only on
            `Structure.rebuild`.

    Raises:
        DecodeError: The bytes are cut short, altered, or of another version.
        MetadataError: The bytes describe something that cannot be, such as requires_grad on integers; or two of ``classes`` have
            one name.
    """
    size = memoryview(data).nbytes
    if size > MAX_ENCODED_BYTES:
        raise DecodeError(f"{size} bytes of metadata are more than {MAX_ENCODED_BYTES}", offset=0)
    reader = Reader(bytes(data), class_map(classes))
    try:
        return reader.message()
    except IndexError as error:
        raise DecodeError(f"metadata is cut short after {size} bytes", offset=size) from error
    except RecursionError as error:  # within the limit on nesting, but the caller has used up most of Python's stack
        raise DecodeError(
            f"metadata is nested deeper than the rest of Python's stack allows at byte {reader.at}: decode it nearer to the "
            "top of the program, or raise sys.setrecursionlimit",
            offset=reader.at,
        ) from error
    except UnicodeDecodeError as error:
        raise DecodeError(f"metadata has a string that is not UTF-8 at byte {reader.at}", offset=reader.at) from error
