"""Functions that compile a kernel for any chip, even an absent one, and return the resulting code and its properties.

from fa2_lab.tools.xray import xray
for kernel in xray("r09", chip="sm_90"):
    print(kernel.name, kernel.numbers["registers"], kernel.numbers["tensor"])
    print(kernel.stages["sass"])
"""

from fa2_lab.tools.xray.compile import CHIPS, STAGES, Compiled, names, xray, xray_launches
from fa2_lab.tools.xray.lines import sass_of
from fa2_lab.tools.xray.loops import Loop, loops

__all__ = ["CHIPS", "STAGES", "Compiled", "Loop", "loops", "names", "sass_of", "xray", "xray_launches"]
