"""An aggregate: values that go through a kernel together under one name, each a field with a name of its own."""

from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate


def aggregate(cls):
    """Give a class of annotated fields a constructor that takes them in their order; Triton 3.8 would do so itself."""
    fields = cls.__annotations__

    def __init__(self, *values, **named):
        values = *values, *(named[name] for name in list(fields)[len(values) :])
        for (name, annotation), value in zip(fields.items(), values, strict=True):
            setattr(self, name, gl.constexpr(value) if annotation is gl.constexpr else value)

    __init__.__triton_builtin__ = True  # Triton must not look in it for code to compile
    cls.__init__ = __init__
    return _aggregate(cls)
