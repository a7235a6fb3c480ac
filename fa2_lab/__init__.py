"""FlashAttention-2, built step by step. Importing this takes NumPy alone; torch and Triton come with `attention`."""

import sys
from types import ModuleType

from fa2_lab.kernels import interpreter
from fa2_lab.paper import where

__all__ = ["attention", "attention_packed", "attention_paged", "where"]
__version__ = "0.1.0"

interpreter.decide()  # before anybody imports Triton


class Package(ModuleType):
    """This package. Its `attention` is the function, also after the module of that name has been imported."""

    @property
    def attention(self):
        from fa2_lab.attention import attention

        return attention

    @attention.setter
    def attention(self, module):
        """The import system binds a submodule to its package; the function keeps the name."""

    @property
    def attention_packed(self):
        from fa2_lab.packed import attention_packed

        return attention_packed

    @property
    def attention_paged(self):
        from fa2_lab.paged import attention_paged

        return attention_paged


sys.modules[__name__].__class__ = Package
