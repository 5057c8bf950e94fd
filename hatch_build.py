"""
Compiles what may be compiled, when a wheel or an editable installation is made.

A machine without a compiler gets the same package in Python alone: slower, and otherwise no different.
``HATCH_BUILD_NO_HOOKS=true`` asks for that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = {
    "tidings.log._line_codec": "src/tidings/log/_line_codec.pyx",
    "tidings.log.embedded._index_keys": "src/tidings/log/embedded/_index_keys.pyx",
}


class CompileHook(BuildHookInterface[Any]):
    """Builds the extension modules beside their sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        try:
            built = compile_all(Path(self.root))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a compiler does, Python alone will do
            self.app.display_warning(f"not compiled, so Python alone will do: {error}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["artifacts"] += [f"/{path.as_posix()}" for path in built]


def compile_all(root: Path) -> list[Path]:
    """Compile all sources; the modules built, relative to ``root``."""
    import os

    from Cython.Build import cythonize
    from setuptools import Distribution, Extension
    from setuptools.command.build_ext import build_ext

    before = Path.cwd()
    os.chdir(root)
    try:
        extensions = cythonize(
            [Extension(name, [source], extra_compile_args=["-O3"]) for name, source in SOURCES.items()],
            build_dir="build",
            quiet=True,
        )
        command = build_ext(Distribution({"ext_modules": extensions, "package_dir": {"": "src"}}))
        command.inplace = True
        command.build_temp = "build"
        command.ensure_finalized()
        command.run()
        return [Path(command.get_ext_fullpath(extension.name)).relative_to(root) for extension in extensions]
    finally:
        os.chdir(before)
