"""A reader of checkpoints of torch.distributed.checkpoint (DCP) that runs nothing they say.

DCP keeps its metadata, and values that are not tensors, as pickles, which may call any function. Here an
unpickler makes only DCP's own records of the metadata, and each value is first loaded with `weights_only`.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from ...cost_models.errors import FileError

METADATA = ".metadata"
"""Name of DCP's file."""
_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"Path", "PosixPath", "WindowsPath"},
}
"""By module, what metadata is made of, besides torch's dtypes."""


class _MemoryFormat:
    """Equals a member of DCP's enumeration, which metadata could change for the whole process."""

    __slots__ = ("member",)

    def __init__(self, members: type[Enum], value: int) -> None:
        self.member = members(value)

    def __eq__(self, other: object) -> bool:
        return other is self.member

    __hash__ = None  # type: ignore[assignment]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a dtype, or a new class that makes records of DCP: metadata may set its attributes.

        Raises:
            UnpicklingError: It is anything else.
        """
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _RECORDS.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint")
        make = super().find_class(module, name)
        if is_dtype or make is torch.Size:  # which have no attributes to set
            return make
        if is_dataclass(make):
            make = partial(object.__new__, cast(Any, make))
        elif isinstance(make, type) and issubclass(make, Enum):
            make = partial(_MemoryFormat, make)
        return type(name, (), {"__new__": lambda _, *arguments: make(*arguments)})


class CheckpointReader(FileSystemReader):
    """Reads the files of a checkpoint."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Read the metadata. Raises FileError where it is not DCP's."""
        try:
            with Path(self.path, METADATA).open("rb") as stream:
                metadata = _MetadataUnpickler(stream).load()
            if type(metadata) is not Metadata or not isinstance(metadata.state_dict_metadata, dict):
                raise pickle.UnpicklingError("its metadata is none of DCP")
            metadata.storage_meta = metadata.storage_meta or StorageMeta()
            metadata.storage_meta.load_id = self.load_id
        except _FAULTS as error:
            raise FileError(
                f"{self.path}: the checkpoint cannot be read: {error}",
                "Name a checkpoint that was written whole.",
            ) from None
        return metadata


_FAULTS = (
    *(pickle.UnpicklingError, OSError, EOFError, ImportError, RecursionError, MemoryError),
    *(ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError, AssertionError),
)
"""What reading damaged metadata raises."""


class CheckpointPlanner(DefaultLoadPlanner):
    """Puts what was read where it belongs."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a value that is not a tensor. Raises UnpicklingError where it is more than data."""
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)
