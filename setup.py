"""Adds the job templates to the wheel; everything else is declared in setup.cfg.

The templates live at the top of the checkout, where a person looks for them, and in a wheel inside the
package, where ``nvflare_torchrun_plugin.templates.path`` finds them. An editable install needs no copy: it
finds the checkout's own.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

TEMPLATES = "job_templates"


class BuildWithTemplates(build_py):
    """build_py that also copies ``job_templates`` into the package that is being built."""

    def _copies(self) -> "dict[str, str]":
        """What goes where: source file to its place in the build folder, empty for an editable install."""
        if self.editable_mode:
            return {}
        target = Path(self.build_lib, "nvflare_torchrun_plugin")
        return {str(f): str(target / f) for f in sorted(Path(TEMPLATES).glob("*/*")) if f.is_file()}

    def run(self) -> None:
        super().run()
        for source, target in self._copies().items():
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> "list[str]":
        return [*super().get_outputs(include_bytecode), *self._copies().values()]

    def get_output_mapping(self) -> "dict[str, str]":
        templates = {target: source for source, target in self._copies().items()}
        return {**super().get_output_mapping(), **templates}


setup(cmdclass={"build_py": BuildWithTemplates})
