// SPDX-License-Identifier: Apache-2.0
#include "cuda_memory.hpp"

#include <fcntl.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

namespace tapchannel::cuda {
namespace {

// cuMemAlloc carves smaller allocations out of blocks of this size, and an IPC handle exposes the
// whole block: rounding up to it keeps the process's other memory out of a peer's mapping.
constexpr std::size_t kIpcBlockBytes = std::size_t{2} * 1024 * 1024;

constexpr unsigned char kUnwritten = 0xFF;  // NaN in every IEEE format that has all-ones NaNs

std::size_t round_up(std::size_t bytes, std::size_t granularity) {
  if (bytes == 0 || bytes > std::numeric_limits<std::size_t>::max() - granularity)
    throw CudaError("DeviceArena", CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE",
                    "an arena of " + std::to_string(bytes) + " bytes cannot be mapped");
  return (bytes + granularity - 1) / granularity * granularity;
}

CUmemAllocationProp shareable_memory_of(const Device& device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device.handle()};
  properties.allocFlags.gpuDirectRDMACapable =
      device.attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) != 0 ? 1 : 0;
  return properties;
}

std::size_t granularity_of(const CUmemAllocationProp& properties) {
  std::size_t bytes = 0;
  check(require_driver().cuMemGetAllocationGranularity(&bytes, &properties,
                                                       CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
        "cuMemGetAllocationGranularity");
  return bytes;
}

class FillStream {
 public:
  FillStream() {
    check(require_driver().cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  }
  ~FillStream() { static_cast<void>(driver()->cuStreamDestroy(stream_)); }
  FillStream(const FillStream&) = delete;
  FillStream& operator=(const FillStream&) = delete;
  CUstream get() const noexcept { return stream_; }

 private:
  CUstream stream_ = nullptr;
};

// Runs a release with the device's context current. Its answers do not matter: at exit the driver
// may be shut down already (CUDA_ERROR_DEINITIALIZED), the context destroyed or the device lost,
// and in each case the memory is gone anyway.
template <typename Release>
void release_quietly(const Device& device, Release release) noexcept {
  try {
    const ContextGuard current(device);
    const RelaxedCapture relaxed;
    release(require_driver());
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): see above
  }
}

}  // namespace

const char* to_text(ArenaKind kind) noexcept {
  switch (kind) {
    case ArenaKind::vmm:
      return "vmm";
    case ArenaKind::ipc:
      return "ipc";
    default:
      return "local";
  }
}

DeviceArena::DeviceArena(const Device& device, ArenaKind kind, std::size_t bytes)
    : device_(device), kind_(kind), bytes_(bytes), mapped_(bytes) {}

DeviceArena DeviceArena::allocate_vmm(const Device& device, std::size_t bytes) {
  const ContextGuard current(device);
  const RelaxedCapture relaxed;
  const CUmemAllocationProp properties = shareable_memory_of(device);
  DeviceArena arena(device, ArenaKind::vmm, bytes);
  arena.mapped_ = round_up(bytes, granularity_of(properties));
  check(require_driver().cuMemCreate(&arena.allocation_, arena.mapped_, &properties, 0),
        "cuMemCreate");
  arena.map_allocation();
  arena.fill();
  return arena;
}

DeviceArena DeviceArena::allocate_ipc(const Device& device, std::size_t bytes) {
  const ContextGuard current(device);
  const RelaxedCapture relaxed;
  DeviceArena arena(device, ArenaKind::ipc, bytes);
  arena.mapped_ = round_up(bytes, kIpcBlockBytes);
  check(require_driver().cuMemAlloc(&arena.address_, arena.mapped_), "cuMemAlloc");
  arena.fill();
  return arena;
}

DeviceArena DeviceArena::import_fd(const Device& device, int fd, std::size_t bytes) {
  const ContextGuard current(device);
  const RelaxedCapture relaxed;
  DeviceArena arena(device, ArenaKind::vmm, bytes);
  arena.imported_ = true;
  arena.mapped_ = round_up(bytes, granularity_of(shareable_memory_of(device)));
  // The ABI passes the number itself. NOLINTNEXTLINE(performance-no-int-to-ptr)
  void* shareable = reinterpret_cast<void*>(static_cast<std::intptr_t>(fd));
  check(require_driver().cuMemImportFromShareableHandle(&arena.allocation_, shareable,
                                                        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
        "cuMemImportFromShareableHandle");
  arena.map_allocation();  // cuMemMap refuses a range that is longer than the allocation
  return arena;
}

DeviceArena DeviceArena::import_handle(const Device& device, const IpcHandle& handle,
                                       std::size_t bytes) {
  const ContextGuard current(device);
  const RelaxedCapture relaxed;
  CUipcMemHandle raw{};
  std::copy(handle.begin(), handle.end(), std::begin(raw.reserved));
  DeviceArena arena(device, ArenaKind::ipc, bytes);
  arena.imported_ = true;
  check(
      require_driver().cuIpcOpenMemHandle(&arena.address_, raw, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
      "cuIpcOpenMemHandle");
  CUdeviceptr base = 0;
  check(require_driver().cuMemGetAddressRange(&base, &arena.mapped_, arena.address_),
        "cuMemGetAddressRange");
  const std::size_t usable = arena.mapped_ - static_cast<std::size_t>(arena.address_ - base);
  if (bytes == 0 || usable < bytes)
    throw CudaError("cuIpcOpenMemHandle", CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE",
                    "the peer's allocation has " + std::to_string(usable) +
                        " bytes, its descriptor says " + std::to_string(bytes));
  return arena;
}

DeviceArena DeviceArena::local(const Device& device, CUdeviceptr address, std::size_t bytes) {
  DeviceArena arena(device, ArenaKind::local, bytes);
  arena.address_ = address;
  return arena;
}

void DeviceArena::map_allocation() {
  const Driver& cu = require_driver();
  check(cu.cuMemAddressReserve(&address_, mapped_, 0, 0, 0), "cuMemAddressReserve");
  check(cu.cuMemMap(address_, mapped_, 0, allocation_, 0), "cuMemMap");
  is_mapped_ = true;
  const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, device_.handle()},
                               CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  check(cu.cuMemSetAccess(address_, mapped_, &access, 1), "cuMemSetAccess");
}

void DeviceArena::fill() {
  const Driver& cu = require_driver();
  const FillStream stream;  // not the default stream: that would wait for the caller's own work
  check(cu.cuMemsetD8Async(address_, kUnwritten, mapped_, stream.get()), "cuMemsetD8Async");
  check(cu.cuStreamSynchronize(stream.get()), "cuStreamSynchronize");
}

int DeviceArena::export_fd() const {
  const ContextGuard current(device_);
  int fd = -1;
  check(require_driver().cuMemExportToShareableHandle(&fd, allocation_,
                                                      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
        "cuMemExportToShareableHandle");
  fcntl(fd, F_SETFD, FD_CLOEXEC);
  return fd;
}

DeviceArena::IpcHandle DeviceArena::export_handle() const {
  const ContextGuard current(device_);
  CUipcMemHandle raw{};
  check(require_driver().cuIpcGetMemHandle(&raw, address_), "cuIpcGetMemHandle");
  IpcHandle handle{};
  std::copy(std::begin(raw.reserved), std::end(raw.reserved), handle.begin());
  return handle;
}

void DeviceArena::free_memory() {
  if (kind_ == ArenaKind::local || (address_ == 0 && allocation_ == 0)) return;
  release_quietly(device_, [this](const Driver& cu) {
    if (kind_ == ArenaKind::ipc) {
      static_cast<void>(imported_ ? cu.cuIpcCloseMemHandle(address_) : cu.cuMemFree(address_));
      return;
    }
    if (is_mapped_) static_cast<void>(cu.cuMemUnmap(address_, mapped_));
    if (address_ != 0) static_cast<void>(cu.cuMemAddressFree(address_, mapped_));
    if (allocation_ != 0) static_cast<void>(cu.cuMemRelease(allocation_));
  });
}

void DeviceArena::swap(DeviceArena& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(kind_, other.kind_);
  std::swap(imported_, other.imported_);
  std::swap(bytes_, other.bytes_);
  std::swap(mapped_, other.mapped_);
  std::swap(address_, other.address_);
  std::swap(is_mapped_, other.is_mapped_);
  std::swap(allocation_, other.allocation_);
}

DeviceArena::DeviceArena(DeviceArena&& other) noexcept
    : DeviceArena(other.device_, ArenaKind::local, 0) {
  swap(other);
}

DeviceArena& DeviceArena::operator=(DeviceArena&& other) noexcept {
  swap(other);  // what this held goes with `other`
  return *this;
}

DeviceArena::~DeviceArena() { free_memory(); }

RegisteredHost::RegisteredHost(const Device& device, void* address, std::size_t bytes)
    : device_(device), host_(address), bytes_(bytes) {
  const ContextGuard current(device_);
  const RelaxedCapture relaxed;
  const Driver& cu = require_driver();
  check(cu.cuMemHostRegister(host_, bytes_,
                             CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP),
        "cuMemHostRegister");
  const CUresult answer = cu.cuMemHostGetDevicePointer(&device_pointer_, host_, 0);
  if (answer != CUDA_SUCCESS) static_cast<void>(cu.cuMemHostUnregister(host_));
  check(answer, "cuMemHostGetDevicePointer");
}

RegisteredHost::~RegisteredHost() {
  release_quietly(device_,
                  [this](const Driver& cu) { static_cast<void>(cu.cuMemHostUnregister(host_)); });
}

PinnedPage::PinnedPage(const Device& device, std::size_t bytes) : device_(device), bytes_(bytes) {
  const ContextGuard current(device_);
  const RelaxedCapture relaxed;
  const Driver& cu = require_driver();
  void* page = nullptr;
  check(cu.cuMemHostAlloc(&page, bytes_, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
        "cuMemHostAlloc");
  const CUresult answer = cu.cuMemHostGetDevicePointer(&device_pointer_, page, 0);
  if (answer != CUDA_SUCCESS) static_cast<void>(cu.cuMemFreeHost(page));
  check(answer, "cuMemHostGetDevicePointer");
  host_ = static_cast<std::uint8_t*>(page);
}

PinnedPage::~PinnedPage() {
  release_quietly(device_,
                  [this](const Driver& cu) { static_cast<void>(cu.cuMemFreeHost(host_)); });
}

}  // namespace tapchannel::cuda
