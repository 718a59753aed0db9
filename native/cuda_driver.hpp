// SPDX-License-Identifier: Apache-2.0
// The CUDA driver's ABI, declared by hand and loaded at run time: one build serves CUDA 12 and 13
// and starts without a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>

namespace tapchannel::cuda {

// The driver's own names and sizes.
// NOLINTBEGIN(readability-identifier-naming, performance-enum-size)

// Handles. The structs stay incomplete: only the driver looks inside.
struct CUctx_st;
struct CUstream_st;
struct CUevent_st;
struct CUarray_st;
using CUcontext = CUctx_st*;
using CUstream = CUstream_st*;
using CUevent = CUevent_st*;
using CUarray = CUarray_st*;
using CUdevice = int;
using CUdeviceptr = unsigned long long;  // CUdeviceptr_v2
using CUmemGenericAllocationHandle = unsigned long long;

// Only the codes that are told apart here; every other int is a valid value too and is named by the
// driver.
enum CUresult : int {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_NOT_INITIALIZED = 3,
  CUDA_ERROR_DEINITIALIZED = 4,
  CUDA_ERROR_STUB_LIBRARY = 34,
  CUDA_ERROR_NO_DEVICE = 100,
  CUDA_ERROR_NOT_READY = 600,
  CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
  CUDA_ERROR_NOT_SUPPORTED = 801,
  CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803,
  CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
};

enum CUdevice_attribute : int {
  CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING = 41,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
  CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91,
  CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES = 98,
  CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
  CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103,
  CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110,
  CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED = 116,
  CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS = 117,
  CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING = 118,
  CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS = 122,
};

enum CUpointer_attribute : int {
  CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
  CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
};

enum CUmemorytype : int {
  CU_MEMORYTYPE_HOST = 1,
  CU_MEMORYTYPE_DEVICE = 2,
};

enum CUmemAllocationType : int {
  CU_MEM_ALLOCATION_TYPE_INVALID = 0,
  CU_MEM_ALLOCATION_TYPE_PINNED = 1
};
enum CUmemAllocationHandleType : int {
  CU_MEM_HANDLE_TYPE_NONE = 0,
  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1
};
enum CUmemLocationType : int { CU_MEM_LOCATION_TYPE_INVALID = 0, CU_MEM_LOCATION_TYPE_DEVICE = 1 };
enum CUmemAccess_flags : int {
  CU_MEM_ACCESS_FLAGS_PROT_NONE = 0,
  CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3
};
enum CUmemAllocationGranularity_flags : int {
  CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0,
  CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1
};
enum CUstreamCaptureStatus : int {
  CU_STREAM_CAPTURE_STATUS_NONE = 0,
  CU_STREAM_CAPTURE_STATUS_ACTIVE = 1,
  CU_STREAM_CAPTURE_STATUS_INVALIDATED = 2,
};
enum CUstreamCaptureMode : int {
  CU_STREAM_CAPTURE_MODE_GLOBAL = 0,
  CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1,
  CU_STREAM_CAPTURE_MODE_RELAXED = 2,
};

// Flag words are plain `unsigned int` in the ABI.
inline constexpr unsigned CU_STREAM_NON_BLOCKING = 1;
inline constexpr unsigned CU_EVENT_DISABLE_TIMING = 2;
inline constexpr unsigned CU_STREAM_WAIT_VALUE_GEQ =
    0;  // cyclic signed compare: (int64_t)(*addr - value) >= 0
inline constexpr unsigned CU_STREAM_WRITE_VALUE_DEFAULT =
    0;  // the write follows a system-scope fence of its stream
inline constexpr unsigned CU_MEMHOSTALLOC_PORTABLE = 1;
inline constexpr unsigned CU_MEMHOSTALLOC_DEVICEMAP = 2;
inline constexpr unsigned CU_MEMHOSTREGISTER_PORTABLE = 1;
inline constexpr unsigned CU_MEMHOSTREGISTER_DEVICEMAP = 2;
inline constexpr unsigned CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1;

struct CUuuid {
  char bytes[16];
};
struct CUipcMemHandle {
  char reserved[64];
};
struct CUmemLocation {
  CUmemLocationType type;
  int id;
};
struct CUmemAccessDesc {
  CUmemLocation location;
  CUmemAccess_flags flags;
};
struct CUmemAllocationProp {
  CUmemAllocationType type;
  CUmemAllocationHandleType requestedHandleTypes;
  CUmemLocation location;
  void* win32HandleMetaData;
  struct {
    unsigned char compressionType;
    unsigned char gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
  } allocFlags;
};
struct CUDA_MEMCPY2D {
  std::size_t srcXInBytes, srcY;
  CUmemorytype srcMemoryType;
  const void* srcHost;
  CUdeviceptr srcDevice;
  CUarray srcArray;
  std::size_t srcPitch;
  std::size_t dstXInBytes, dstY;
  CUmemorytype dstMemoryType;
  void* dstHost;
  CUdeviceptr dstDevice;
  CUarray dstArray;
  std::size_t dstPitch;
  std::size_t WidthInBytes, Height;
};
// NOLINTEND(readability-identifier-naming, performance-enum-size)

static_assert(sizeof(void*) == 8 && sizeof(std::size_t) == 8,
              "only 64-bit hosts: the _v2 ABI passes size_t and 64-bit pointers");
static_assert(sizeof(CUresult) == 4 && sizeof(CUdevice_attribute) == 4 &&
              sizeof(CUmemorytype) == 4);
static_assert(sizeof(CUuuid) == 16 && sizeof(CUipcMemHandle) == 64);
static_assert(sizeof(CUmemLocation) == 8 && sizeof(CUmemAccessDesc) == 12);
static_assert(sizeof(CUmemAllocationProp) == 32 && offsetof(CUmemAllocationProp, allocFlags) == 24);
static_assert(sizeof(CUDA_MEMCPY2D) == 128 && offsetof(CUDA_MEMCPY2D, dstXInBytes) == 56 &&
              offsetof(CUDA_MEMCPY2D, WidthInBytes) == 112);

// X(name, version, parameters...): the base name and the CUDA version asked of cuGetProcAddress.
// The version picks the ABI: 3020 is the 64-bit `_v2` of the memory calls, 11070 the `_v2` of the
// stream memory operations. Streams mean the legacy default stream where a caller passes 0, as
// torch does.
#define TAPCHANNEL_CUDA_FUNCTIONS(X)                                                              \
  X(cuInit, 2000, unsigned flags)                                                                 \
  X(cuDriverGetVersion, 2020, int* version)                                                       \
  X(cuGetErrorName, 6000, CUresult code, const char** name)                                       \
  X(cuGetErrorString, 6000, CUresult code, const char** text)                                     \
  X(cuDeviceGetCount, 2000, int* count)                                                           \
  X(cuDeviceGet, 2000, CUdevice* device, int ordinal)                                             \
  X(cuDeviceGetName, 2000, char* name, int length, CUdevice device)                               \
  X(cuDeviceGetUuid, 11040, CUuuid* uuid, CUdevice device)                                        \
  X(cuDeviceGetAttribute, 2000, int* value, CUdevice_attribute attribute, CUdevice device)        \
  X(cuDeviceTotalMem, 3020, std::size_t* bytes, CUdevice device)                                  \
  X(cuDeviceGetPCIBusId, 4010, char* text, int length, CUdevice device)                           \
  X(cuDeviceCanAccessPeer, 4000, int* possible, CUdevice device, CUdevice peer)                   \
  X(cuDevicePrimaryCtxRetain, 7000, CUcontext* context, CUdevice device)                          \
  X(cuDevicePrimaryCtxRelease, 11000, CUdevice device)                                            \
  X(cuCtxPushCurrent, 4000, CUcontext context)                                                    \
  X(cuCtxPopCurrent, 4000, CUcontext* context)                                                    \
  X(cuCtxGetCurrent, 4000, CUcontext* context)                                                    \
  X(cuCtxSetCurrent, 4000, CUcontext context)                                                     \
  X(cuMemAlloc, 3020, CUdeviceptr* address, std::size_t bytes)                                    \
  X(cuMemFree, 3020, CUdeviceptr address)                                                         \
  X(cuMemGetInfo, 3020, std::size_t* free_bytes, std::size_t* total_bytes)                        \
  X(cuMemGetAddressRange, 3020, CUdeviceptr* base, std::size_t* bytes, CUdeviceptr address)       \
  X(cuPointerGetAttribute, 4000, void* value, CUpointer_attribute attribute, CUdeviceptr address) \
  X(cuMemHostRegister, 6050, void* address, std::size_t bytes, unsigned flags)                    \
  X(cuMemHostUnregister, 4000, void* address)                                                     \
  X(cuMemHostGetDevicePointer, 3020, CUdeviceptr* device_address, void* address, unsigned flags)  \
  X(cuMemHostAlloc, 2020, void** address, std::size_t bytes, unsigned flags)                      \
  X(cuMemFreeHost, 2000, void* address)                                                           \
  X(cuIpcGetMemHandle, 4010, CUipcMemHandle* handle, CUdeviceptr address)                         \
  X(cuIpcOpenMemHandle, 11000, CUdeviceptr* address, CUipcMemHandle handle, unsigned flags)       \
  X(cuIpcCloseMemHandle, 4010, CUdeviceptr address)                                               \
  X(cuMemGetAllocationGranularity, 10020, std::size_t* bytes,                                     \
    const CUmemAllocationProp* properties, CUmemAllocationGranularity_flags option)               \
  X(cuMemCreate, 10020, CUmemGenericAllocationHandle* handle, std::size_t bytes,                  \
    const CUmemAllocationProp* properties, unsigned long long flags)                              \
  X(cuMemRelease, 10020, CUmemGenericAllocationHandle handle)                                     \
  X(cuMemAddressReserve, 10020, CUdeviceptr* address, std::size_t bytes, std::size_t alignment,   \
    CUdeviceptr hint, unsigned long long flags)                                                   \
  X(cuMemAddressFree, 10020, CUdeviceptr address, std::size_t bytes)                              \
  X(cuMemMap, 10020, CUdeviceptr address, std::size_t bytes, std::size_t offset,                  \
    CUmemGenericAllocationHandle handle, unsigned long long flags)                                \
  X(cuMemUnmap, 10020, CUdeviceptr address, std::size_t bytes)                                    \
  X(cuMemSetAccess, 10020, CUdeviceptr address, std::size_t bytes, const CUmemAccessDesc* access, \
    std::size_t count)                                                                            \
  X(cuMemExportToShareableHandle, 10020, void* shareable, CUmemGenericAllocationHandle handle,    \
    CUmemAllocationHandleType type, unsigned long long flags)                                     \
  X(cuMemImportFromShareableHandle, 10020, CUmemGenericAllocationHandle* handle, void* shareable, \
    CUmemAllocationHandleType type)                                                               \
  X(cuStreamCreate, 2000, CUstream* stream, unsigned flags)                                       \
  X(cuStreamCreateWithPriority, 5050, CUstream* stream, unsigned flags, int priority)             \
  X(cuStreamDestroy, 4000, CUstream stream)                                                       \
  X(cuStreamSynchronize, 2000, CUstream stream)                                                   \
  X(cuStreamQuery, 2000, CUstream stream)                                                         \
  X(cuStreamIsCapturing, 10000, CUstream stream, CUstreamCaptureStatus* status)                   \
  X(cuStreamWaitEvent, 3020, CUstream stream, CUevent event, unsigned flags)                      \
  X(cuStreamWaitValue64, 11070, CUstream stream, CUdeviceptr address, std::uint64_t value,        \
    unsigned flags)                                                                               \
  X(cuStreamWriteValue64, 11070, CUstream stream, CUdeviceptr address, std::uint64_t value,       \
    unsigned flags)                                                                               \
  X(cuThreadExchangeStreamCaptureMode, 10010, CUstreamCaptureMode* mode)                          \
  X(cuEventCreate, 2000, CUevent* event, unsigned flags)                                          \
  X(cuEventDestroy, 4000, CUevent event)                                                          \
  X(cuEventRecord, 2000, CUevent event, CUstream stream)                                          \
  X(cuEventQuery, 2000, CUevent event)                                                            \
  X(cuEventSynchronize, 2000, CUevent event)                                                      \
  X(cuMemcpyAsync, 4000, CUdeviceptr target, CUdeviceptr source, std::size_t bytes,               \
    CUstream stream)                                                                              \
  X(cuMemcpyDtoDAsync, 3020, CUdeviceptr target, CUdeviceptr source, std::size_t bytes,           \
    CUstream stream)                                                                              \
  X(cuMemcpyHtoDAsync, 3020, CUdeviceptr target, const void* source, std::size_t bytes,           \
    CUstream stream)                                                                              \
  X(cuMemcpyDtoHAsync, 3020, void* host, CUdeviceptr source, std::size_t bytes, CUstream stream)  \
  X(cuMemcpyDtoH, 3020, void* target, CUdeviceptr source, std::size_t bytes)                      \
  X(cuMemcpy2DAsync, 3020, const CUDA_MEMCPY2D* copy, CUstream stream)                            \
  X(cuMemsetD8Async, 3020, CUdeviceptr target, unsigned char byte, std::size_t bytes,             \
    CUstream stream)                                                                              \
  X(cuMemsetD2D8Async, 3020, CUdeviceptr target, std::size_t pitch, unsigned char byte,           \
    std::size_t width, std::size_t height, CUstream stream)

// Every entry point, non-null, after `cuInit(0)` succeeded. Names are the base names: `cuMemAlloc`
// is cuMemAlloc_v2.
struct Driver {
#define TAPCHANNEL_CUDA_MEMBER(name, version, ...) CUresult (*name)(__VA_ARGS__) = nullptr;
  TAPCHANNEL_CUDA_FUNCTIONS(TAPCHANNEL_CUDA_MEMBER)
#undef TAPCHANNEL_CUDA_MEMBER
  int version = 0;  // of the installed driver, as 1000 * major + 10 * minor
};

// The driver's answer when it refuses a call.
class CudaError : public std::exception {
 public:
  CudaError(std::string call, CUresult code);  // name and meaning are asked of the driver
  CudaError(std::string call, CUresult code, std::string name, std::string meaning);
  const char* what() const noexcept override { return text_.c_str(); }

  std::string call;     // "cuMemCreate"
  CUresult code;        // CUDA_ERROR_OUT_OF_MEMORY
  std::string name;     // "CUDA_ERROR_OUT_OF_MEMORY"
  std::string meaning;  // "out of memory"

 private:
  std::string text_;
};

// Returns the loaded driver, or nullptr where it cannot be used; then `driver_refusal()` says why.
// Blocks:     the first call, for the load and cuInit (up to a second); later calls never. Any
// thread may call. Ownership:  the process's; never unloaded, so deleters that run at exit may
// still use it.
const Driver* driver();

// Returns why the driver cannot be used, empty where it can.
const std::string& driver_refusal();

// Returns the driver. Throws CudaError (CUDA_ERROR_NOT_INITIALIZED, meaning = driver_refusal())
// where there is none.
const Driver& require_driver();

// Throws CudaError unless `result` is CUDA_SUCCESS. `call` names the driver function.
inline void check(CUresult result, const char* call) {
  if (result != CUDA_SUCCESS) throw CudaError(call, result);
}

}  // namespace tapchannel::cuda
