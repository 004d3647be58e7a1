"""Builds the native kernels, once for each instruction set; all else is in ``pyproject.toml``.

They are plain shared libraries that ``sidestep.kernels.native`` loads. Where there is no compiler, or it fails, the
package is installed without them.
"""

import platform
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

IS_X86 = platform.machine().lower() in ("x86_64", "amd64") and sys.maxsize > 2**32
GNU = ["-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]
MICROSOFT = ["/std:c++17", "/O2", "/fp:precise"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
LEVELS = {"baseline": ([], []), "avx2": (AVX2, ["/arch:AVX2"]), "avx512": (AVX512, ["/arch:AVX512"])}


class Build(build_ext):
    """Compiles with the flags of the compiler that there is."""

    def finalize_options(self) -> None:
        """All levels at a time."""
        super().finalize_options()
        self.parallel = self.parallel or True

    def build_extension(self, extension: Extension) -> None:
        """One level."""
        is_microsofts = self.compiler.compiler_type == "msvc"
        own = LEVELS[extension.name.rsplit("._", 1)[1]][is_microsofts]
        extension.extra_compile_args = [*(MICROSOFT if is_microsofts else GNU), *own]
        super().build_extension(extension)

    def get_export_symbols(self, extension: Extension) -> list[str]:
        """None but those that the source exports: it is no module of Python's."""
        return []


setup(
    ext_modules=[
        Extension(
            f"sidestep.kernels._{level}",
            [f"src/sidestep/kernels/{level}.cpp"],
            depends=[
                "src/sidestep/kernels/kernels.h",
                "src/sidestep/kernels/lanes.h",
                "src/sidestep/kernels/numbers.h",
            ],
            language="c++",
            optional=True,
        )
        for level in (LEVELS if IS_X86 else ["baseline"])
    ],
    cmdclass={"build_ext": Build},
)
