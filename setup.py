"""A wheel holds fa2_lab alone; an editable install finds fa2_studio, too."""

from setuptools import setup
from setuptools.command.build_py import build_py


class HeartAlone(build_py):
    def finalize_options(self):
        super().finalize_options()
        if not self.editable_mode:
            self.packages = [name for name in self.packages if not name.startswith("fa2_studio")]


setup(cmdclass={"build_py": HeartAlone})
