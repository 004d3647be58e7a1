"""Parameters → chunks: what is fetched, stepped and evicted together. Pure planning; moves nothing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from sidestep.errors import CapacityError
from sidestep.leaves import PLAIN_TENSORS, is_dense
from sidestep.placement import Placement
from sidestep.probe import Cutting
from sidestep.shards import is_sharded, local_of
from sidestep.twins import CUT_ELEMENTS, Cut

_HOST = torch.device("cpu")
MAX_CHUNK_BYTES = 64 * 2**20
_CHUNKS_WANTED = 16
FINER = 4
"""By this, chunks are smaller, and slots more, where updates overlap with forward: the finer, the less it waits."""

MASTER = "master"
"""The entry of a parameter's state that holds its master."""

SHORT_DTYPES = (torch.bfloat16, torch.float16)
"""The dtypes of parameters that may have a master."""

ENCODED = torch.bfloat16
"""The dtype of encoded state."""

CORRECTION = torch.int16
"""The dtype of what is kept of a split master: the bits that its parameter has not."""

DECODABLE = (torch.float32, torch.float64)
"""The dtypes of state that may be encoded."""

ALIGNMENT_BYTES = 256
"""State tensors start at multiples of this, in slabs and in slots alike, so that both have one layout."""


def aligned(byte_count: int) -> int:
    """The next offset at which a state tensor may start."""
    return -(-byte_count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A parameter with all that planning needs to know of it."""

    parameter: torch.nn.Parameter
    name: str
    group: int
    placement: Placement
    address: torch.device  # where it lives
    is_on_device: bool
    cutting: Cutting
    is_whole: bool = False  # must not be cut, whatever the optimizer allows
    position: int = 0  # among all parameters of the optimizer
    bytes_at_rest: int = 0  # what its state takes that is at rest already; it may be more than the probe predicts

    @property
    def offloads(self) -> bool:
        """Whether any of its state leaves the device."""
        return self.is_on_device and self.placement.offloads

    @functools.cached_property
    def is_shard(self) -> bool:
        """Whether this process's part of a sharded parameter is updated as if it were a parameter of its own."""
        return self.cutting.cut is Cut.ELEMENT and is_sharded(self.parameter)

    @functools.cached_property
    def is_spread(self) -> bool:
        """Whether it is sharded, but updated as one, by operations that all ranks take part in."""
        return not self.is_shard and is_sharded(self.parameter)

    @property
    def own(self) -> torch.Tensor:
        """What is updated: the parameter, or its shard. Of a parameter that FSDP has reset it is another each time."""
        return local_of(self.parameter) if self.is_shard else self.parameter

    @functools.cached_property
    def elements(self) -> int:
        """How many are updated here. Of a sharded parameter that is updated as one, all: ranks must plan alike."""
        return self.own.numel()

    @functools.cached_property
    def is_small(self) -> bool:
        """Whether state of the parameter's shape stays where the optimizer put it."""
        return self.elements < self.placement.min_elements

    @functools.cached_property
    def has_master(self) -> bool:
        """Whether the update is applied to an fp32 copy of the parameter."""
        return self.placement.master is not None and self.parameter.dtype in SHORT_DTYPES

    @functools.cached_property
    def splits_master(self) -> bool:
        """Whether only those bits of the master are at rest that the parameter itself has not."""
        is_wanted = self.placement.master == "split" and self.parameter.dtype is torch.bfloat16
        return is_wanted and self.offloads and not self.is_small

    @functools.cached_property
    def stepped_dtype(self) -> torch.dtype:
        """The dtype of the tensor that the update is applied to: the master's, or the parameter's own."""
        return torch.float32 if self.has_master else self.parameter.dtype

    @functools.cached_property
    def is_host_stepped(self) -> bool:
        """Whether its update runs on the host, and its state is at home there. A small parameter is not worth the trip.

        Unless it is updated together with others: where one of them must stay, all are planned anew to stay.
        """
        if not (self.is_on_device and self.placement.step == "host" and self.placement.offloads):
            return False
        is_plain = type(self.own) in PLAIN_TENSORS and is_dense(self.own)
        return is_plain and (not self.is_small or self.cutting.cut >= Cut.GROUP)

    @property
    def steps_at(self) -> torch.device:
        """Where the update runs, and where state is that is too small to have a home."""
        return _HOST if self.is_host_stepped else self.address

    @functools.cached_property
    def predicted(self) -> list[tuple[str, torch.dtype]]:
        """The state tensors of the parameter's shape that will leave the device, as the probe predicts them."""
        if not self.offloads or self.is_small:
            return []
        predicted = [(name, ENCODED if name in self.encoded else dtype) for name, dtype in self._decoded]
        master = CORRECTION if self.splits_master else torch.float32
        return [*predicted, (MASTER, master)] if self.has_master else predicted

    @functools.cached_property
    def encoded(self) -> dict[Any, torch.dtype]:
        """The entries that are encoded at rest, with the dtype that the optimizer knows them in."""
        if self.placement.state_dtype is None or not self.offloads or self.is_small:
            return {}
        return {name: dtype for name, dtype in self._decoded if dtype in DECODABLE}

    @functools.cached_property
    def _decoded(self) -> list[tuple[str, torch.dtype]]:
        """The state tensors of the parameter's shape as the optimizer knows them, as the probe predicts them."""
        kinds = [kind for kind in self.cutting.kinds_for(self.parameter) if kind.elementwise]
        return [(kind.name, kind.dtype or self.stepped_dtype) for kind in kinds]

    @functools.cached_property
    def dtypes(self) -> dict[str, torch.dtype | None]:
        """The dtype of each entry that the probe has found, ``None`` where it is that of what is updated."""
        return {kind.name: kind.dtype for kind in self.cutting.kinds_for(self.parameter)}

    @property
    def sends_gradient(self) -> bool:
        """Whether its gradient rests on the host."""
        return self.is_on_device and self.placement.sends_gradient_of(self.parameter)

    @functools.cached_property
    def itemsizes(self) -> list[int]:
        """Bytes of an element of each tensor that an update needs: what is in a slot, and what is brought beside it."""
        if self.is_host_stepped:
            return [self.parameter.dtype.itemsize, self.parameter.dtype.itemsize]
        beside = [dtype.itemsize for dtype in self.encoded.values()]  # decoded, while the update runs
        if self.splits_master:
            beside.append(self.stepped_dtype.itemsize)
        if self.sends_gradient:
            beside.append(self.parameter.dtype.itemsize)
        return [dtype.itemsize for _, dtype in self.predicted] + beside

    @property
    def bytes_per_element(self) -> int:
        """Bytes in a slot for each element of the parameter, as predicted."""
        return sum(self.itemsizes)

    @functools.cached_property
    def state_bytes(self) -> int:
        """Bytes that it will take in a slot: as predicted, or more if more state is there.

        Of a parameter that may be cut, only what is shaped as it is leaves the device, and that is predicted.
        """
        predicted = sum(aligned(self.elements * itemsize) for itemsize in self.itemsizes)
        has_more = self.offloads and not (self.is_sliceable or self.is_host_stepped or self.is_spread)
        return max(predicted, self.bytes_at_rest) if has_more else predicted

    @functools.cached_property
    def is_sliceable(self) -> bool:
        """Whether it may be cut inside: bit-equal in any dtype on a device, in fp32 and fp64 on CPU kernels."""
        own = self.own
        exact = self.steps_at.type != "cpu" or self.stepped_dtype in (torch.float32, torch.float64)
        is_plain = type(own) in PLAIN_TENSORS and own.is_contiguous()
        return self.cutting.cut is Cut.ELEMENT and exact and is_plain and not self.is_whole


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """Elements [start, stop) of one parameter, in the order of memory."""

    subject: Subject
    start: int
    stop: int

    @functools.cached_property
    def parameter(self) -> torch.nn.Parameter:
        """The parameter that this is a piece of."""
        return self.subject.parameter

    @functools.cached_property
    def is_slice(self) -> bool:
        """Whether it is less than the whole parameter."""
        return self.stop - self.start != self.subject.elements

    @functools.cached_property
    def elements(self) -> int:
        """How many elements it has."""
        return self.stop - self.start

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What belongs to this piece of a tensor shaped as the parameter: all of it, or elements in one dimension.

        Of a tensor that is sharded as the parameter is, what is here; or all, where it is updated as one.
        """
        own: torch.Tensor = local_of(tensor) if self.subject.is_shard else tensor
        return own.reshape(-1)[self.start : self.stop] if self.is_slice else own


@dataclasses.dataclass(frozen=True, eq=False)
class Chunk:
    """The unit of transfer. ``pieces`` are sorted by group. ``address`` is ``None`` where nothing is offloaded."""

    pieces: tuple[Piece, ...]
    address: torch.device | None

    @functools.cached_property
    def groups(self) -> list[int]:
        """The groups that its pieces belong to."""
        return sorted({piece.subject.group for piece in self.pieces})

    @functools.cached_property
    def name(self) -> str:
        """For pictures and messages: of its first piece."""
        first = self.pieces[0] if self.pieces else None
        if first is None:
            return "nothing"
        part = f"[{first.start}:{first.stop}]" if first.is_slice else ""
        more = f" and {len(self.pieces) - 1} more" if len(self.pieces) > 1 else ""
        return f"{first.subject.name}{part}{more}"

    @functools.cached_property
    def places(self) -> frozenset[torch.device]:
        """Where its parameters are."""
        return frozenset(piece.subject.address for piece in self.pieces)

    @functools.cached_property
    def is_coupled(self) -> bool:
        """Whether the update shares values between these parameters: it then runs even if gradients are missing."""
        return any(piece.subject.cutting.cut >= Cut.GROUP for piece in self.pieces)

    @functools.cached_property
    def is_always_due(self) -> bool:
        """Whether it takes part in a step even if it has no gradient."""
        return self.is_coupled or any(piece.subject.cutting.needs_no_gradient for piece in self.pieces)

    @functools.cached_property
    def is_host_stepped(self) -> bool:
        """Whether its update runs on the host. A chunk's pieces are alike in that."""
        return bool(self.pieces) and self.pieces[0].subject.is_host_stepped

    @functools.cached_property
    def runs_on_host(self) -> bool:
        """Whether its update runs on the host because that was asked for; also where the parameters are there."""
        subjects = [piece.subject for piece in self.pieces]
        return all(s.is_host_stepped or (s.placement.step == "host" and not s.is_on_device) for s in subjects)

    def is_due(self, piece: Piece, *, all_due: bool = False) -> bool:
        """Whether the update may change the piece: it has a gradient, or needs none; ``all_due``: no step is made."""
        return all_due or self.is_always_due or piece.parameter.grad is not None

    def pieces_due(self, *, all_due: bool = False) -> list[Piece]:
        """The pieces that the update may change."""
        return [piece for piece in self.pieces if self.is_due(piece, all_due=all_due)]

    @functools.cached_property
    def state_bytes(self) -> int:
        """Bytes that it will take in a slot, as predicted."""
        return sum(aligned(p.elements * itemsize) for p in self.pieces for itemsize in p.subject.itemsizes)


def default_chunk_bytes(subjects: Sequence[Subject], *, finer: int = 1) -> int:
    """min(64 MiB, offloaded bytes ÷ 16), all of it ÷ ``finer``: a small model must not pay for a big ring.

    But the smallest slice at least, and up to 64 MiB what cannot be cut, or each of it would be moved outside the ring.
    """
    smallest_slice = max((CUT_ELEMENTS * subject.bytes_per_element for subject in subjects), default=0)
    whole = max((subject.state_bytes for subject in subjects if not subject.is_sliceable), default=0)
    wanted = sum(subject.state_bytes for subject in subjects) // _CHUNKS_WANTED
    return max(1, smallest_slice, min(MAX_CHUNK_BYTES, max(min(wanted, MAX_CHUNK_BYTES) // finer, whole)))


def plan_chunks(subjects: Sequence[Subject], chunk_bytes: int) -> list[Chunk]:
    """Chunks of at most ``chunk_bytes`` of state each, where the optimizer's step may be cut so finely.

    Raises:
        CapacityError: ``chunk_bytes`` cannot hold the state of the smallest slice of a parameter.
    """
    if any(subject.cutting.cut is Cut.OPTIMIZER for subject in subjects):
        return [_one_piece(subjects)]
    chunks = []
    for group in sorted({subject.group for subject in subjects}):
        members = [subject for subject in subjects if subject.group == group]
        if members[0].cutting.cut is Cut.GROUP:
            chunks.append(_one_piece(members))
            continue
        moving = [subject for subject in members if subject.state_bytes]
        staying = [_whole(subject) for subject in members if not subject.state_bytes]
        for place in dict.fromkeys((subject.address, subject.is_host_stepped) for subject in moving):
            together = [s for s in moving if (s.address, s.is_host_stepped) == place]
            chunks.extend(_pack(together, chunk_bytes, place[0]))
        if staying:
            chunks.append(Chunk(tuple(staying), _only_address([piece.subject for piece in staying])))
    return chunks


def on_device(subject: Subject) -> Subject:
    """The subject as it is with its state, and its update, where the parameter is."""
    return with_placement(subject, state="device", step="device")


def whole_of_all(subjects: Sequence[Subject]) -> Chunk:
    """Everything in one chunk, with its state where the parameters are."""
    near = map(on_device, subjects)
    at_once = [dataclasses.replace(s, cutting=dataclasses.replace(s.cutting, cut=Cut.OPTIMIZER)) for s in near]
    return Chunk(tuple(_whole(subject) for subject in at_once), None)


def _one_piece(subjects: Sequence[Subject]) -> Chunk:
    """All of it in one chunk. State on several devices cannot share a slot, so there it stays resident.

    The update runs on the host only if it may for all.
    """
    subjects = sorted(subjects, key=lambda subject: subject.position)  # in which it may draw random numbers, say
    address = _only_address(subjects)
    if address is None:
        subjects = [on_device(subject) for subject in subjects]
    elif not all(subject.is_host_stepped for subject in subjects):
        subjects = [with_placement(s, step="device") for s in subjects]
    return Chunk(tuple(_whole(subject) for subject in subjects), address)


def with_placement(subject: Subject, **changes: Any) -> Subject:
    """The subject as it is with these fields of its placement changed."""
    return dataclasses.replace(subject, placement=dataclasses.replace(subject.placement, **changes))


def _only_address(subjects: Sequence[Subject]) -> torch.device | None:
    addresses = {subject.address for subject in subjects if subject.offloads}
    return addresses.pop() if len(addresses) == 1 else None


def _pack(subjects: Sequence[Subject], chunk_bytes: int, address: torch.device) -> list[Chunk]:
    """Greedily: small parameters together, a large one in slices of its own."""
    chunks: list[Chunk] = []
    packed: list[Piece] = []
    packed_bytes = 0
    for subject in subjects:
        is_large = subject.state_bytes > chunk_bytes and subject.is_sliceable
        if packed and (is_large or packed_bytes + subject.state_bytes > chunk_bytes):
            chunks.append(Chunk(tuple(packed), address))
            packed, packed_bytes = [], 0
        if is_large:
            chunks.extend(Chunk((piece,), address) for piece in _slices(subject, chunk_bytes))
        else:
            packed.append(_whole(subject))
            packed_bytes += subject.state_bytes
    if packed:
        chunks.append(Chunk(tuple(packed), address))
    return chunks


def _whole(subject: Subject) -> Piece:
    return Piece(subject, 0, subject.elements)


def _slices(subject: Subject, chunk_bytes: int) -> list[Piece]:
    elements = subject.elements
    least = CUT_ELEMENTS * subject.bytes_per_element
    if chunk_bytes < least:
        raise CapacityError(
            f"chunk_bytes={chunk_bytes:,} cannot hold the state of {CUT_ELEMENTS:,} elements of {subject.name}, the"
            f" smallest slice there is: {least:,} bytes is the least that works"
        )
    step = chunk_bytes // least * CUT_ELEMENTS
    return [Piece(subject, start, min(start + step, elements)) for start in range(0, elements, step)]
