"""A wheel takes the records of figures/data along, as data of the package."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

RECORDS = Path(__file__).parent / "figures" / "data"


class WithRecords(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "fa2_lab", "data")
            self.mkpath(str(target))
            for record in RECORDS.glob("*.json"):
                self.copy_file(str(record), str(target))


setup(cmdclass={"build_py": WithRecords})
