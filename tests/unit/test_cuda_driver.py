"""The run-time loading of the CUDA driver, against libraries made up here: no GPU is needed.

Each test starts a process of its own, since a process loads the driver once.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ASK = """
import json
from tapchannel import _native
status = _native.cuda_status()
answers = {"status": status, "count": _native.device_count()}
try:
    answers["info"] = {k: v for k, v in _native.device_info(0).items() if k != "uuid"}
    answers["uuid"] = _native.device_info(0)["uuid"].hex()
    answers["peer"] = [_native.can_access_peer(0, 1), _native.can_access_peer(1, 0)]
except Exception as error:
    answers["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(answers))
"""

# A driver of one function for all purposes, and a few that answer something. Every symbol asked
# for is noted with its version and flags in $FAKE_LOG.
FAKE = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int number(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text ? atoi(text) : otherwise;
}
static int succeed(void) { return 0; }
static int init(unsigned flags) { return flags ? 1 : number("FAKE_INIT", 0); }
static int version(int* out) { *out = 12040; return 0; }
static int error_name(int code, const char** out) {
  *out = code == 100 ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_OTHER";
  return 0;
}
static int error_text(int code, const char** out) {
  *out = code == 100 ? "no CUDA-capable device is detected" : "other";
  return 0;
}
static int count(int* out) { *out = 2; return 0; }
static int device(int* out, int ordinal) { *out = ordinal + 40; return ordinal < 2 ? 0 : 101; }
static int uuid(char* out, int device) {
  for (int i = 0; i < 16; ++i) out[i] = (char)(device + i);
  return 0;
}
static int name(char* out, int length, int device) {
  snprintf(out, length, "made-up %d", device);
  return 0;
}
static int attribute(int* out, int which, int device) {
  (void)device;
  *out = which == 118 ? 100 : which != 102;
  return 0;
}
static int total(size_t* out, int device) { (void)device; *out = (size_t)141 << 30; return 0; }
static int peer(int* out, int device, int other) { *out = device < other; return 0; }

static void* find(const char* symbol) {
  if (!strcmp(symbol, "cuInit")) return init;
  if (!strcmp(symbol, "cuDriverGetVersion")) return version;
  if (!strcmp(symbol, "cuGetErrorName")) return error_name;
  if (!strcmp(symbol, "cuGetErrorString")) return error_text;
  if (!strcmp(symbol, "cuDeviceGetCount")) return count;
  if (!strcmp(symbol, "cuDeviceGet")) return device;
  if (!strcmp(symbol, "cuDeviceGetUuid")) return uuid;
  if (!strcmp(symbol, "cuDeviceGetName")) return name;
  if (!strcmp(symbol, "cuDeviceGetPCIBusId")) return name;
  if (!strcmp(symbol, "cuDeviceGetAttribute")) return attribute;
  if (!strcmp(symbol, "cuDeviceTotalMem")) return total;
  if (!strcmp(symbol, "cuDeviceCanAccessPeer")) return peer;
  return succeed;
}
static int look_up(const char* symbol, void** out, int version, uint64_t flags) {
  FILE* log = fopen(getenv("FAKE_LOG"), "a");
  fprintf(log, "%s %d %d\n", symbol, version, (int)flags);
  fclose(log);
  const char* missing = getenv("FAKE_MISSING");
  *out = missing && !strcmp(missing, symbol) ? NULL : find(symbol);
  return 0;
}
#ifdef NEW
int cuGetProcAddress_v2(const char* s, void** out, int version, uint64_t flags, int* status) {
  if (status) *status = 0;
  return look_up(s, out, version, flags);
}
#else
int cuGetProcAddress(const char* s, void** out, int version, uint64_t flags) {
  return look_up(s, out, version, flags);
}
#endif
"""

compiled = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def ask(folder: Path, **environment: str) -> dict[str, Any]:
    """Load the driver from a folder in a new process and ask it everything."""
    variables = {**os.environ, "LD_LIBRARY_PATH": str(folder), "FAKE_LOG": str(folder / "log")}
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env={**variables, **environment},
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    return json.loads(done.stdout)


def compile_driver(folder: Path, source: str, *options: str) -> None:
    """Make the folder's libcuda.so.1."""
    (folder / "fake.c").write_text(source)
    library = folder / "libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", *options, "-o", str(library), str(folder / "fake.c")]
    subprocess.run(command, check=True, timeout=50)


def asked(folder: Path) -> dict[str, tuple[int, int]]:
    """Return each symbol that was asked for, with its version and flags."""
    lines = (line.split() for line in (folder / "log").read_text().splitlines())
    return {symbol: (int(version), int(flags)) for symbol, version, flags in lines}


def test_library_that_cannot_be_loaded(tmp_path: Path) -> None:
    """Catches: an import error or a crash where no driver can be loaded, or a refusal that hides
    what the loader said.
    """
    (tmp_path / "libcuda.so.1").write_bytes(b"this is no library, it is too honest for that " * 100)
    answers = ask(tmp_path)
    refusal = answers["status"]["refusal"]
    assert answers["status"]["available"] is False
    assert answers["status"]["driver_version"] == 0
    assert answers["count"] == 0
    assert "libcuda.so.1" in refusal
    assert "invalid ELF header" in refusal
    assert refusal in answers["error"]


@compiled
def test_library_that_is_no_driver(tmp_path: Path) -> None:
    """Catches: a null function called where the library has none of the driver's symbols."""
    compile_driver(tmp_path, "int nothing_to_see_here;")
    answers = ask(tmp_path)
    assert answers["status"]["available"] is False
    assert "cuGetProcAddress" in answers["status"]["refusal"]


@compiled
@pytest.mark.parametrize("options", [["-DNEW"], []], ids=["cuda 12 and later", "before cuda 12"])
def test_driver_is_loaded_by_either_entry_point(tmp_path: Path, options: list[str]) -> None:
    """Catches: only one of the two forms of cuGetProcAddress called rightly; wrong struct or
    argument order in a probe.
    """
    compile_driver(tmp_path, FAKE, *options)
    answers = ask(tmp_path)
    assert answers["status"] == {"available": True, "refusal": "", "driver_version": 12040}
    assert answers["count"] == 2
    assert "error" not in answers
    assert answers["info"]["name"] == "made-up 40"
    assert answers["info"]["total_bytes"] == 141 << 30
    assert answers["info"]["gpu_direct_rdma_writes_ordering"] == 100
    assert answers["info"]["stream_mem_ops_64"] is True
    assert answers["info"]["vmm"] is False
    assert answers["uuid"] == bytes(range(40, 56)).hex()
    assert answers["peer"] == [True, False]


@compiled
def test_versions_asked_for(tmp_path: Path) -> None:
    """Catches: the 32-bit or the version-1 form of a function (other arguments, other meaning),
    and the per-thread default stream, which is not the stream that torch uses.
    """
    compile_driver(tmp_path, FAKE, "-DNEW")
    ask(tmp_path)
    versions = asked(tmp_path)
    assert versions["cuMemAlloc"][0] == 3020
    assert versions["cuMemcpy2DAsync"][0] == 3020
    assert versions["cuStreamWaitValue64"][0] == 11070
    assert versions["cuStreamWriteValue64"][0] == 11070
    assert versions["cuIpcOpenMemHandle"][0] == 11000
    assert versions["cuDeviceGetUuid"][0] == 11040
    legacy_stream = 1
    assert {flags for _, flags in versions.values()} == {legacy_stream}


@compiled
def test_no_gpu_names_the_setting_that_hides_it(tmp_path: Path) -> None:
    """Catches: a driver without a GPU taken for usable, and a refusal that does not say that
    CUDA_VISIBLE_DEVICES may be the cause.
    """
    compile_driver(tmp_path, FAKE, "-DNEW")
    answers = ask(tmp_path, FAKE_INIT="100", CUDA_VISIBLE_DEVICES="7")
    refusal = answers["status"]["refusal"]
    assert answers["status"]["available"] is False
    assert "CUDA_ERROR_NO_DEVICE" in refusal
    assert "CUDA_VISIBLE_DEVICES is '7'" in refusal
    assert answers["count"] == 0


@compiled
def test_missing_function_is_named(tmp_path: Path) -> None:
    """Catches: a driver that lacks a function accepted, to crash at its first use."""
    compile_driver(tmp_path, FAKE, "-DNEW")
    answers = ask(tmp_path, FAKE_MISSING="cuStreamWaitValue64")
    refusal = answers["status"]["refusal"]
    assert answers["status"]["available"] is False
    assert "cuStreamWaitValue64" in refusal
    assert "CUDA 11.7" in refusal
    assert "cuMemAlloc" not in refusal


@compiled
def test_refused_call_says_which_and_why(tmp_path: Path) -> None:
    """Catches: a driver's error code dropped, or passed on as a bare number."""
    compile_driver(tmp_path, FAKE.replace("ordinal < 2 ? 0 : 101", "100"), "-DNEW")
    error = ask(tmp_path)["error"]
    assert "cuDeviceGet" in error
    assert "CUDA_ERROR_NO_DEVICE" in error
    assert "no CUDA-capable device is detected" in error
