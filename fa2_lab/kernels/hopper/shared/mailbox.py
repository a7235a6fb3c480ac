"""Mailboxes in shared memory, through which the producer sends integers to the consumers."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from fa2_lab.kernels.hopper.shared.pipeline import barriers

all_threads = gl.barrier


@triton.aggregate
class IntRecords:
    """Records of named integers, called fields, in shared memory. Record n overwrites record n − stages."""

    memory: gl.shared_memory_descriptor
    names: gl.constexpr  # the names of a record's fields
    stages: gl.constexpr  # number of records in shared memory, a power of two

    @gluon.jit
    def write(self, n, values):
        """Write `values`, in the order of the field names, to record n. Extra values are ignored."""
        for i in gl.static_range(len(self.names)):
            element = self.memory.index((n & (self.stages - 1)) * record_stride(self.names) + i)
            element.store(gl.full([1], values[i], gl.int32, scalar_layout(gl.num_warps())))

    @gluon.jit
    def read(self, n, name: gl.constexpr):
        """Return field `name` of record n, replicated in every thread."""
        element = self.memory.index((n & (self.stages - 1)) * record_stride(self.names) + field_index(self.names, name))
        return gl.max(element.load(scalar_layout(gl.num_warps())), 0)


@gluon.jit
def new_int_records(names: gl.constexpr, stages: gl.constexpr):
    """Allocate shared memory for `stages` records of integers with these field names."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return IntRecords(gl.allocate_shared_memory(gl.int32, [stages * record_stride(names), 1], layout), names, stages)


@gluon.constexpr_function
def record_stride(names):
    """Return the number of elements reserved per record: the number of fields, rounded up to a power of two.

    Because this number is a power of two, a field's address can be computed without a multiplication.
    """
    return 1 << (len(names) - 1).bit_length()


@gluon.constexpr_function
def field_index(names, name):
    """Return the index of field `name` within a record."""
    return names.index(name)


@gluon.constexpr_function
def scalar_layout(warps):
    """Return the layout of a scalar that is replicated in every thread."""
    return gl.BlockedLayout([1], [32], [warps], [0])


@triton.aggregate
class Mailbox:
    """A mailbox in which the producer describes each block to the consumers, up to two blocks ahead."""

    fields: IntRecords
    filled: gl.shared_memory_descriptor  # barriers on which consumers wait for the producer
    emptied: gl.shared_memory_descriptor  # barriers on which the producer waits for all consumers to release a block

    @gluon.jit
    def send(self, n, values):
        """Producer: wait until all consumers have released block n − 2, and then write the fields of the n-th block."""
        mbarrier.wait(self.emptied.index(n & 1), (n >> 1 & 1) ^ 1)
        self.fields.write(n, values)
        all_threads()
        mbarrier.arrive(self.filled.index(n & 1), count=1)

    @gluon.jit
    def wait(self, n):
        """Consumer: wait until the fields of the n-th block have been written."""
        mbarrier.wait(self.filled.index(n & 1), n >> 1 & 1)

    @gluon.jit
    def read(self, n, name: gl.constexpr):
        """Consumer: return field `name` of the n-th block."""
        return self.fields.read(n, name)

    @gluon.jit
    def release(self, n):
        """Consumer: signal to the producer that this consumer has finished reading the n-th block's fields.

        In the compiled code, all threads synchronize twice: once in this function, and once more because the compiler
        lets a single thread arrive for all of them.
        """
        all_threads()
        mbarrier.arrive(self.emptied.index(n & 1), count=1)


@gluon.jit
def new_mailbox(names: gl.constexpr, consumers: gl.constexpr):
    """Create an empty mailbox with these field names. Each block must be released by `consumers` consumers."""
    return Mailbox(new_int_records(names, 2), barriers(2, 1), barriers(2, consumers))
