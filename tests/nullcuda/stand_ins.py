"""Makes the environment of tests on null CUDA: torch's build for CUDA over libraries that compute nothing.

`python -m tests.nullcuda.stand_ins FOLDER`: fetches the wheels of the pinned torch for CUDA, of its triton and of the
headers of CUDA's runtime, some 730 MB, unpacks them, 1.7 GB, and compiles a stand-in for each library that torch needs.
Takes gcc and binutils, and a minute. All other packages are those of the environment that runs this."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch

HERE = Path(__file__).parent
SITE, LIB, BIN, MADE, FETCHED = "site", "lib", "bin", "made", "fetched"
_SYSTEM = re.compile(r"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)\.so|ld-linux")
_RUNTIME = "libcudart.so"
# Of symbols that name no library: the library, by how they begin.
_OWNERS = {
    "nccl": "libnccl.so.2",
    "cuFile": "libcufile.so.0",
    "cusparseLt": "libcusparseLt.so.0",
    "cu[A-Z]": "libcuda.so.1",
}
_FURTHER = ("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88", "triton==3.7.1")  # headers, and a compiler
_BLOCK = """#include <stdlib.h>
static char block[1 << 16];
struct Id { char bytes[128]; };
void nullcuda_called(const char *name);
"""
# Of calls that would launch kernels of the library's own: they are counted.
_LAUNCHING = (
    r"cublasLtMatmul|cublas\w*([gG]emm|gemv|dot|trsm)\w*|cudnnBackendExecute",
    r"nccl(AllReduce|Broadcast|Bcast|Reduce|AllGather|ReduceScatter|Send|Recv|AlltoAll\w*)",
)
# What calls answer with, by name; all others answer 0 and leave their arguments as they are.
_ANSWERS = (
    ("|".join(_LAUNCHING), "int {0}(void) {{ nullcuda_called(\"{0}\"); return 0; }}"),
    (r".*(ErrorString|LastError|StatusString)", "const char *{0}(void) {{ return \"null CUDA\"; }}"),
    (r"ncclGetVersion", "int {0}(int *found) {{ *found = 22907; return 0; }}"),
    (r"ncclCommInitRankConfig|ncclCommInitRank",
     "int {0}(int **group, int ranks, struct Id id, int rank) {{ *group = malloc(8); (*group)[0] = ranks; "
     "(*group)[1] = rank; return 0; }}"),
    (r"ncclCommInitRankScalable", "int {0}(int **group, int ranks, int rank) {{ *group = malloc(8); "
     "(*group)[0] = ranks; (*group)[1] = rank; return 0; }}"),
    (r"ncclCommSplit|ncclCommShrink", "int {0}(void *of, int color, int key, void **group) "
     "{{ *group = of; return 0; }}"),
    (r"ncclCommCount", "int {0}(int *group, int *found) {{ *found = group[0]; return 0; }}"),
    (r"ncclCommUserRank", "int {0}(int *group, int *found) {{ *found = group[1]; return 0; }}"),
    (r"ncclCommGetAsyncError", "int {0}(void *group, int *found) {{ *found = 0; return 0; }}"),
    (r"cublasLtMatmulAlgoGetHeuristic", "int {0}(void *a, void *b, void *c, void *d, void *e, void *f, void *g, "
     "int most, void *found, int *count) {{ *count = 1; return 0; }}"),
    (r"cublasLtGetVersion", "long {0}(void) {{ return 130000; }}"),
    (r"cudnnGetVersion", "long {0}(void) {{ return 92000; }}"),
    (r"cublasGet(Math|Pointer)Mode(_v2)?", "int {0}(void *handle, int *mode) {{ *mode = 0; return 0; }}"),
    (r".*Create(_v2)?|cudnnCreate.*|cusparseCreate.*|.*_create", "int {0}(void **made) {{ *made = block; return 0; }}"),
    (r".*", "int {0}(void) {{ return 0; }}"),
)  # fmt: skip
# Of libraries that do more than to answer: what is written of them.
_WRITTEN = {_RUNTIME: (HERE / "runtime.c", HERE / "kernels.c"), "libcuda.so": (HERE / "driver.c",)}
_NVML = HERE / "nvml.c"


def make(folder: Path) -> None:
    """Make the environment in `folder`; what is there of the same torch, or of the same sources, stays as it is."""
    version = torch.__version__.partition("+")[0]
    unpacked, made = folder / SITE / FETCHED, folder / MADE
    if not unpacked.is_file() or unpacked.read_text() != version:
        shutil.rmtree(folder, ignore_errors=True)
        _fetch(folder, version)
        unpacked.write_text(version)
    if made.is_file() and made.read_text() == _sources():
        return
    for name in (LIB, BIN):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
    libraries = sorted((folder / SITE / "torch" / "lib").glob("*.so*"))
    headers = next((folder / SITE / "nvidia").rglob("cuda_runtime_api.h")).parent
    wanted = sorted(needed(libraries).items(), key=lambda one: not one[0].startswith(_RUNTIME))
    for name, symbols in wanted:
        _compile(folder / LIB, name, symbols, headers)
    subprocess.run([*_GCC, f"-o{folder / LIB / 'libnvidia-ml.so.1'}", str(_NVML)], check=True)
    tool = folder / BIN / "nvidia-smi"
    shutil.copy(HERE / "nvidia-smi.sh", tool)
    tool.chmod(0o755)
    shutil.copy(HERE / "in_each_process.py", folder / SITE / "sitecustomize.py")
    made.write_text(_sources())


def _fetch(folder: Path, version: str) -> None:
    wheels = folder / "wheels"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
    subprocess.run([*pip, f"torch==={version}", *_FURTHER], check=True)
    for wheel in wheels.iterdir():
        shutil.unpack_archive(wheel, folder / SITE, "zip")
    shutil.rmtree(wheels)
    for tool in (folder / SITE / "triton" / "backends" / "nvidia" / "bin").iterdir():
        tool.chmod(0o755)
    headers = next((folder / SITE / "nvidia").rglob("cuda_runtime_api.h")).parent
    shutil.rmtree(headers.parent / "lib")  # the real runtime, which torch would find first


_GCC = ("gcc", "-O1", "-shared", "-fPIC", "-w")


def _sources() -> str:
    """A digest of what the stand-ins are made of."""
    files = (Path(__file__), *sorted(HERE.glob("*.[ch]")), HERE / "nvidia-smi.sh", HERE / "in_each_process.py")
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def needed(libraries: list[Path]) -> Mapping[str, Mapping[str, set[str]]]:
    """Of each library that is missing, the symbols that `libraries` want of it, by version."""
    there = {file.name for file in libraries}
    names = set(re.findall(r"NEEDED.*\[(.*)\]", _output("readelf", "-dW", *map(str, libraries))))
    found: dict[str, dict[str, set[str]]] = {
        name: defaultdict(set) for name in sorted(names - there) if not _SYSTEM.match(name)
    }
    for line in _output("nm", "-D", "--undefined-only", *map(str, libraries)).splitlines():
        symbol, _, version = line.split()[-1].partition("@") if line.split() else ("", "", "")
        owner = _owner(symbol, version.lstrip("@"), found)
        if owner is not None:
            found[owner][version.lstrip("@")].add(symbol)
    return found


def _owner(symbol: str, version: str, found: Mapping[str, object]) -> str | None:
    if version:
        library = "libnvshmem_host.so.3" if version == "NVSHMEM" else version
        return library if library in found else None
    return next((library for begin, library in _OWNERS.items() if re.match(begin, symbol) and library in found), None)


def _compile(folder: Path, name: str, symbols: Mapping[str, set[str]], headers: Path) -> None:
    written = next((files for begin, files in _WRITTEN.items() if name.startswith(begin)), ())
    defined = re.compile(r"^[\w \*]*?(\w+)\([^;]*\{", re.M)
    ready = {name for file in written for name in defined.findall(file.read_text())}
    rest = sorted({symbol for of_version in symbols.values() for symbol in of_version} - ready)
    code = _BLOCK + "\n".join(map(_definition, rest)) + "\n"
    source, script = folder / f"{name}.c", folder / f"{name}.map"
    source.write_text(code)
    options = [f"-Wl,-soname,{name}", f"-I{headers}"]
    if versions := {version: own for version, own in symbols.items() if version}:
        script.write_text(
            "".join(f"{version} {{ global: {'; '.join(sorted(own))}; }};\n" for version, own in versions.items())
        )
        options.append(f"-Wl,--version-script={script}")
    runtime = folder.glob(f"{_RUNTIME}*[0-9]")  # which the others are linked with; it is compiled first
    files = map(str, (source, *written, *(one for one in runtime if one.name != name)))
    subprocess.run([*_GCC, f"-o{folder / name}", *files, *options, "-lpthread"], check=True)
    source.unlink()
    script.unlink(missing_ok=True)


def _definition(symbol: str) -> str:
    return next(answer.format(symbol) for pattern, answer in _ANSWERS if re.fullmatch(pattern, symbol))


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    make(Path(sys.argv[1]).resolve())
